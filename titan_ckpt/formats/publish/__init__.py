"""Exports that several ranks write together: planned, written, proved, then renamed into place."""

__all__ = ["bucket_record", "plan", "publication", "record", "run"]
