"""Bytes and the kernel. Knows no checkpoint and no tensor."""

__all__ = [
    "background",
    "cuda",
    "descriptors",
    "direct",
    "file_writer",
    "files",
    "holder",
    "kernel",
    "memory",
    "posix",
    "unpublished_folder",
]
