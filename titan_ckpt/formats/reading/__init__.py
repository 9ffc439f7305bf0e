"""The engine that reads every format: slices of stored tensors, from files into memory."""

__all__ = ["engine", "shared", "slices"]
