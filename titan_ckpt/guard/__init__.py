"""Saving a run that is interrupted by a signal, a time limit or an exception, and saves requested from outside."""

__all__ = ["outside_request", "run_guard"]
