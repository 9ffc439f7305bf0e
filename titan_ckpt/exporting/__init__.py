"""Exports: the model in a format for other programs, in folders that resuming never reads."""

__all__ = ["checks", "exporter"]
