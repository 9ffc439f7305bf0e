"""One file that several ranks write at the same time, each its own bytes of it.

Owns the way of the bytes: whole blocks go around the page cache, what is left at both ends of a write, where a block
is shared with other writers, goes through it. Knows no tensors and creates no file.

Why around it: buffered writers of one file wait for each other's inode lock, and all of them for the kernel's limit of
dirty pages; direct writers of space that is reserved share the lock, and need a third of the processor time.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from titan_ckpt import posix
from titan_ckpt.storage.memory import ALIGNMENT


class SharedFile:
    """A file that is there, at its final size. Threads may write at the same time."""

    def __init__(self, path: Path, direct: bool) -> None:
        """Open it. `direct`: around the page cache where the file system can. Raises: OSError."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        """For mappings, which are coherent with all writes."""
        self._direct_fd = _open_direct(path) if direct else -1

    @property
    def is_direct(self) -> bool:
        return self._direct_fd >= 0

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes; whole blocks of them directly where their memory is aligned as their place in the file is.

        That is for the caller to arrange: memory address and offset are equal modulo ALIGNMENT. Raises: OSError.
        """
        first = -offset % ALIGNMENT
        stop = len(view) - (offset + len(view)) % ALIGNMENT
        if not self.is_direct or first >= stop or not self._write_direct(view[first:stop], offset + first):
            posix.pwrite_all(self.fd, view, offset)
            return
        if first:
            posix.pwrite_all(self.fd, view[:first], offset)
        if stop < len(view):
            posix.pwrite_all(self.fd, view[stop:], offset + stop)

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write whole blocks; say no where the file system takes the flag and refuses the write."""
        try:
            posix.pwrite_all(self._direct_fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def sync(self) -> None:
        """Make all that was written durable."""
        posix.fsync(self.fd)

    def close(self) -> None:
        """Close it; idempotent. Raises: OSError, where a network file system reports a late error."""
        fd, self.fd = self.fd, -1
        direct_fd, self._direct_fd = self._direct_fd, -1
        if direct_fd >= 0:
            posix.close(direct_fd)
        if fd >= 0:
            posix.close(fd)


def _open_direct(path: Path) -> int:
    """Open around the page cache; -1 where the file system cannot."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1
