"""FileWriter: a file that one rank writes, or several at the same time, each its own bytes.

Owns how the bytes reach the file: whole blocks bypass the page cache; the partial blocks at both ends of a write, which
other writers may share, go through it. Knows no tensors.

Whole blocks bypass the page cache because buffered writers of one file wait for each other's inode lock, and all of
them for the kernel's limit of dirty pages; direct writers of reserved space share the lock and need a third of the
processor time. Partial blocks are collected and joined, because each buffered write would wait for all direct writes in
flight and hold back the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from titan_ckpt.disk import kernel, posix
from titan_ckpt.disk.direct import open_direct
from titan_ckpt.disk.files import Writer
from titan_ckpt.disk.kernel import ALIGNMENT, round_up

_PUT_OFF_BYTES = 1 << 20
"""Collected bytes of partial blocks are written when they reach this size."""


class FileWriter(Writer):
    """An open file. What `write` is given past the end of the file is padding, which `finish` cuts off."""

    def __init__(self, path: Path, direct: bool, *, fd: int = -1) -> None:
        """Open an existing file; `direct` bypasses the page cache where the file system can. Raises: OSError."""
        self.path = path
        self.fd = kernel.open_file(path, os.O_RDWR | os.O_NOFOLLOW) if fd < 0 else fd
        """Descriptor for mappings, which are coherent with all writes."""
        self._put_off: list[tuple[int, bytes]] = []
        self._put_off_bytes = 0
        self._lock = threading.Lock()
        self._direct_fd = -1
        try:
            self._direct_fd = open_direct(path, os.O_RDWR) if direct else -1
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path, num_bytes: int | None = None) -> FileWriter:
        """Create a file whose space is reserved, or without `num_bytes` one that grows. Raises: OSError."""
        # without O_DIRECT: where that is refused, the file is there nevertheless
        file = FileWriter(path, num_bytes is not None, fd=posix.open_exclusive(path))
        try:
            if file.is_direct:  # one descriptor, by which the fault tests know the file
                direct = file._direct_fd
                os.dup2(direct, file.fd, inheritable=False)
                file._direct_fd = file.fd  # first: an interrupt may come right after the close
                kernel.close(direct)
            if num_bytes is not None:
                posix.fallocate(file.fd, round_up(num_bytes))
        except BaseException:
            file.close()
            raise
        return file

    @staticmethod
    def reserve(path: Path, num_bytes: int, head: bytes) -> None:
        """Create a file of its final size, all space reserved, into which ranks write. Raises: OSError."""
        fd = posix.open_exclusive(path)
        try:
            posix.fallocate(fd, num_bytes)
            posix.truncate(fd, num_bytes)
            posix.pwrite_all(fd, head, 0)
        finally:
            posix.close(fd)

    @property
    def is_direct(self) -> bool:
        return self._direct_fd >= 0

    @cached_property
    def is_reserved(self) -> bool:
        """Return whether the space of the whole file is reserved, so that it may be mapped and stored to.

        The file system is asked here, because another rank has created the file. Raises: OSError.
        """
        return posix.fallocate(self.fd, os.fstat(self.fd).st_size)

    def map(self, offset: int, num_bytes: int) -> memoryview:
        """Return memory that is this part of the file, if it `is_reserved`. Raises: OSError."""
        return posix.map_shared(self.fd, offset, num_bytes)

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes; whole blocks bypass the page cache, partial blocks are copied and written by `flush`.

        Where memory address and offset differ modulo ALIGNMENT, a disk refuses the direct write, and all bytes go
        through the page cache. Raises: OSError.
        """
        first = -offset % ALIGNMENT
        stop = len(view) - (offset + len(view)) % ALIGNMENT
        if self.is_direct and first >= stop:
            self._put_off_writing(view, offset)
        elif not self.is_direct or not self._write_direct(view[first:stop], offset + first):
            posix.pwrite_all(self._cached_fd(), view, offset)
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
        """Write the collected partial blocks; adjacent ones in one write."""
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
            posix.pwrite_all(self._cached_fd(), b"".join(neighbours), offset)

    def _cached_fd(self) -> int:
        """Return the descriptor whose writes go through the page cache; a new file's goes on in that way."""
        if self.fd == self._direct_fd:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return self.fd

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write whole blocks; return False if the file system accepted O_DIRECT and refuses the write."""
        try:
            posix.pwrite_all(self._direct_fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def finish(self, num_bytes: int) -> None:
        self.flush()
        if os.fstat(self.fd).st_size != num_bytes:
            posix.truncate(self.fd, num_bytes)
        posix.fsync(self.fd)

    def close(self) -> None:
        """Close the file; idempotent. Raises: OSError, when a network file system reports a late error."""
        fds = {self._direct_fd, self.fd} - {-1}
        self.fd = self._direct_fd = -1
        with ExitStack() as stack:
            for fd in fds:
                stack.callback(posix.close, fd)
