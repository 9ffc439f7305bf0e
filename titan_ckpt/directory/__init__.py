"""Checkpoint folders: how steps are saved, committed, listed, kept and removed."""

__all__ = ["directory", "lease", "manifest", "names", "steps"]
