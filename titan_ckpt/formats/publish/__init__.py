"""Exports that several ranks write together: planned, written, proved, then renamed into place."""
