"""One file that several ranks write at the same time, each its own bytes of it.

Owns the way of the bytes: whole blocks go around the page cache, what is left at both ends of a write, where a block
is shared with other writers, goes through it. Knows no tensors and creates no file.

Why around it: buffered writers of one file wait for each other's inode lock, and all of them for the kernel's limit of
dirty pages; direct writers of space that is reserved share the lock, and need a third of the processor time. What goes
through it is put off and joined, for each such write would wait for all direct ones that are under way, and hold back
the next.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from titan_ckpt import posix
from titan_ckpt.storage.memory import ALIGNMENT

_PUT_OFF_BYTES = 1 << 20
"""How much is put off at most."""


class SharedFile:
    """A file that is there, at its final size. Threads may write at the same time."""

    def __init__(self, path: Path, direct: bool) -> None:
        """Open it. `direct`: around the page cache where the file system can. Raises: OSError."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        """For mappings, which are coherent with all writes."""
        self._direct_fd = _open_direct(path) if direct else -1
        self._put_off: list[tuple[int, bytes]] = []
        self._put_off_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_direct(self) -> bool:
        return self._direct_fd >= 0

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes; whole blocks of them directly where their memory is aligned as their place in the file is.

        That is for the caller to arrange: memory address and offset are equal modulo ALIGNMENT. The rest is copied,
        and is in the file after `flush`. Raises: OSError.
        """
        first = -offset % ALIGNMENT
        stop = len(view) - (offset + len(view)) % ALIGNMENT
        if self.is_direct and first >= stop:
            self._put_off_writing(view, offset)
        elif not self.is_direct or not self._write_direct(view[first:stop], offset + first):
            posix.pwrite_all(self.fd, view, offset)
        else:
            self._put_off_writing(view[:first], offset)
            self._put_off_writing(view[stop:], offset + stop)

    def _put_off_writing(self, view: memoryview, offset: int) -> None:
        if not len(view):
            return
        with self._lock:
            self._put_off.append((offset, bytes(view)))
            self._put_off_bytes += len(view)
            full = self._put_off_bytes >= _PUT_OFF_BYTES
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what was put off; neighbours at once. Raises: OSError."""
        with self._lock:
            parts, self._put_off, self._put_off_bytes = sorted(self._put_off), [], 0
        runs: list[tuple[int, list[bytes]]] = []
        end = -1
        for offset, data in parts:
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].append(data)
            end = offset + len(data)
        for offset, neighbours in runs:
            posix.pwrite_all(self.fd, b"".join(neighbours), offset)

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
        """Make all that was written durable. Raises: OSError."""
        self.flush()
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
