"""Boxes of tensors, names of tensors, and the request to fill memory: the seam between content and files."""

__all__ = ["boxes", "chunks", "keymap", "nested", "requests"]
