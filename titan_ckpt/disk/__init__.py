"""Bytes and the kernel. Knows no checkpoint and no tensor."""

__all__ = [
    "cuda",
    "files",
    "kernel",
    "posix",
    "unpublished_folder",
    "workers",
]
