"""Bytes and the kernel. Knows no checkpoint and no tensor."""

__all__ = [
    "background",
    "cuda",
    "direct",
    "file_writer",
    "files",
    "kernel",
    "posix",
    "unpublished_folder",
]
