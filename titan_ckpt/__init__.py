"""Checkpoints for PyTorch training: atomic, verified, and readable by the rest of the world."""

from __future__ import annotations

__version__ = "0.1.0"
