"""Checkpoint folders: how steps are saved, committed, listed, kept and removed."""
