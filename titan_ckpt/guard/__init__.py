"""Saving a run that is interrupted by a signal, a time limit or an exception, and saves requested from outside."""
