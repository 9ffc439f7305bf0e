"""A file that is read or written at offsets: Reader and Writer wherever its bytes are, FileReader and FileWriter here.

Owns the fallback from O_DIRECT to buffered I/O and the size of one I/O. Knows no formats and imports no torch.

Direct I/O is used because one thread with 8 MiB blocks saturates the disk at an eighth of the processor time of
buffered writes, which also fill the page cache with bytes that nobody reads again. Buffered writers of one file wait
for each other's inode lock, and all of them for the kernel's limit of dirty pages; direct writers of reserved space
share the lock and need a third of the processor time. The partial blocks at both ends of a write, which other writers
may share, go through the page cache. They are collected and joined, because each buffered write would wait for all
direct writes in flight and hold back the next one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_ckpt.disk import kernel, posix
from titan_ckpt.disk.kernel import ALIGNMENT, address_of, advise, libc, map_memory, round_up
from titan_ckpt.errors import CorruptCheckpointError

IO_BYTES = 4 << 20
"""Bytes of one read or write; also of each worker's bounce buffer."""

NUM_WORKERS = 4
"""Threads of one save on one rank: while one hashes, the others' writes are in flight."""

NUM_READERS = 12
"""Threads that read a file around the page cache. A disk is as fast as the bytes in flight let it be, and a thread that
hashes, casts or copies has none in flight: with 4 a load reached 70 % of raw reads where it reaches 85 % with 12."""

_CACHESTAT = 451
"""Number of the system call, which the C library does not name."""

_NETWORKED = {
    0x6969,  # NFS
    0xFF534D42, 0xFE534D42, 0x517B,  # SMB
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS
    0x00C36400,  # Ceph
    0x19830326,  # BeeGFS
    0x65735546,  # FUSE: gcsfuse, mountpoint-s3, juicefs, and most others
    0x01021997,  # 9P
    0x5346414F,  # AFS
}  # fmt: skip
"""Types of file systems that hosts mount over a network. Source: statfs(2), and the headers of each."""

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python does not name yet."""

_MAX_VIEWS = 1024
"""Buffers of one preadv; Linux accepts no more (IOV_MAX)."""

_PUT_OFF_BYTES = 1 << 20
"""Collected bytes of partial blocks are written when they reach this size."""


class Reader(ABC):
    """A file that does not change. Threads may share it. Too short a file raises EOFError."""

    path: Any
    num_bytes: int
    written_ns: int = 0
    """When it was last written, by its file system; 0 for an object."""
    num_workers: int
    """Reads that are worth having in flight."""
    request_bytes: int
    """Bytes to ask for at a time where many are wanted."""
    is_remote: ClassVar[bool]
    """Whether each read is a request, so that runs near each other are worth one, and nothing is in a page cache."""

    @property
    def is_networked(self) -> bool:
        """Return whether it is on a file system that hosts mount over a network."""
        return False

    @abstractmethod
    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `offset` on; fewer if the file ends."""

    @abstractmethod
    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order with the bytes from `offset` on."""

    @abstractmethod
    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the aligned buffer's first `num_bytes`; it has room for `num_bytes` rounded up."""

    @abstractmethod
    def read_again(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Do as `read_aligned`, and ask the disk or the server, whatever is in memory."""

    @abstractmethod
    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill a view whose memory address and offset are equal modulo ALIGNMENT."""

    @abstractmethod
    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes in a mapping, or in memory of the client that got them. Nobody may write to them."""

    def release(self, view: memoryview) -> None:  # noqa: B027
        """Give up what `view` has returned; nobody uses it any more."""

    def fetch(self, offset: int, num_bytes: int) -> None:  # noqa: B027
        """Get bytes that are then read by pieces, if each piece would be a request. For one thread."""

    def cached_bytes(self, offset: int, num_bytes: int) -> int:
        """Return how many of these bytes are in this machine's page cache."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the file; idempotent."""


class Writer(ABC):
    """A file that is written at offsets, in any order. Threads may write at the same time.

    A context manager that closes it. A new file that is closed before it is finished is given up.
    """

    @property
    def is_direct(self) -> bool:
        """Return whether whole blocks bypass the page cache, and so must be aligned in memory as in the file."""
        return False

    @property
    def is_reserved(self) -> bool:
        """Return whether all its space is reserved, so that it may be mapped and stored to. Raises: OSError."""
        return False

    def map(self, offset: int, num_bytes: int) -> memoryview:
        """Return memory that is this part of the file, if it `is_reserved`. Raises: OSError."""
        raise NotImplementedError

    @abstractmethod
    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes, or copy them to be written by `finish`. Raises: OSError of this or an earlier write."""

    def flush(self) -> None:  # noqa: B027
        """Write what was put off. Raises: OSError."""

    @abstractmethod
    def finish(self, num_bytes: int) -> None:
        """Make the file durable. Its `num_bytes` are all written, and no others. Raises: OSError; EOFError."""

    @abstractmethod
    def close(self) -> None:
        """Release the file; idempotent. Raises: OSError, when a network file system reports a late error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_direct(path: Path, flags: int) -> int:
    """Open an existing file with O_DIRECT; return -1 where the file system cannot. Raises: OSError."""
    try:
        return kernel.open_file(path, flags | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return -1


class FileReader(Reader):
    """An open regular file, read at offsets through the page cache or around it. Threads may share it."""

    is_remote = False
    num_workers = NUM_READERS
    request_bytes = IO_BYTES

    def __init__(self, path: Path) -> None:
        """Open the file. Raises: OSError, also for a symbolic link; CorruptCheckpointError if it is no regular file."""
        self.path = path
        # without O_NONBLOCK, opening a pipe of that name would wait forever
        self._fd = kernel.open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        self._direct_fd = -1
        self._refuses_direct = False
        """Whether reads through `_direct_fd` fail; it stays open meanwhile, because other threads may be at it."""
        self._opening = threading.Lock()
        self._mapping: memoryview | None = None
        status = os.fstat(self._fd)
        self.num_bytes, self.written_ns = status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptCheckpointError(f"{path}: is no regular file; remove it and copy the right one", str(path))

    @property
    def is_networked(self) -> bool:
        area = (ctypes.c_long * 32)()
        return libc().fstatfs(self._fd, ctypes.byref(area)) == 0 and area[0] & 0xFFFFFFFF in _NETWORKED

    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order with the bytes from `offset` on, through the page cache.

        Raises: EOFError if the file is too short.
        """
        views = [view for view in views if len(view)]
        while views:
            got = os.preadv(self._fd, views[:_MAX_VIEWS], offset)
            if got == 0:
                raise EOFError(f"{self.path} ends at byte {offset}")
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `offset` on; fewer if the file ends."""
        parts = []
        while num_bytes > 0 and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            offset += len(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the aligned buffer's first `num_bytes` from an aligned offset, around the page cache where possible.

        The buffer must have room for `num_bytes` rounded up. Raises: EOFError if the file is too short.
        """
        done = 0
        while done < num_bytes:
            fd = self._direct() if done % ALIGNMENT == 0 else self._fd
            try:
                got = os.preadv(fd, [buffer[done : round_up(num_bytes)]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self._fd:
                    raise
                self._refuses_direct = True
                continue
            if got == 0:
                raise EOFError(f"{self.path} ends at byte {offset + done}")
            done += got

    def read_again(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Do as `read_aligned`, through a new descriptor and with these bytes forgotten by the page cache."""
        again = FileReader(self.path)
        try:
            os.posix_fadvise(again._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
            again.read_aligned(buffer, offset, num_bytes)
        finally:
            again.close()

    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill the view; whole blocks bypass the page cache where possible, partial ones at both ends go through it.

        The view's memory address and the offset are equal modulo ALIGNMENT. Raises: EOFError if the file is too short.
        """
        first = min(-offset % ALIGNMENT, len(view))
        stop = first + (len(view) - first) // ALIGNMENT * ALIGNMENT
        self.read_into([view[:first]], offset)
        self.read_aligned(view[first:stop], offset + first, stop - first)
        self.read_into([view[stop:]], offset + stop)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Map the file once, and fill the page tables of these bytes. Raises: EOFError if the file is too short."""
        stop = offset + num_bytes
        cut_short = f"{self.path} ends before byte {stop}"
        if min(self.num_bytes, os.fstat(self._fd).st_size) < stop:
            raise EOFError(cut_short)
        with self._opening:
            if self._mapping is None:
                self._mapping = map_memory(self.num_bytes, self._fd)
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapped = self._mapping[offset - skipped : stop]
        try:
            advise(mapped, _POPULATE_READ)
        except OSError as error:
            if error.errno == errno.EFAULT:  # the file was cut short meanwhile, or the disk fails
                if os.fstat(self._fd).st_size < stop:
                    raise EOFError(cut_short) from error
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path)) from error
            if error.errno != errno.EINVAL:  # Linux before 5.14 fills the tables when they are used
                raise
        return mapped[skipped:]

    def release(self, view: memoryview) -> None:
        """Give the pages of a view back, that no more of the file is in this process than is being read.

        They stay in the page cache.
        """
        first = address_of(view)
        skipped = first % mmap.ALLOCATIONGRANULARITY
        libc().madvise(first - skipped, skipped + len(view), mmap.MADV_DONTNEED)

    def _direct(self) -> int:
        with self._opening:  # two descriptors would be opened otherwise, and one of them closed
            if self._direct_fd < 0 and not self._refuses_direct:
                self._direct_fd = open_direct(self.path, os.O_RDONLY)
                self._refuses_direct = self._direct_fd < 0
        return self._fd if self._refuses_direct else self._direct_fd

    def cached_bytes(self, offset: int, num_bytes: int) -> int:
        """Return how many of these bytes are in the page cache, in whole pages; 0 where the kernel cannot tell.

        Source: cachestat(2), Linux 6.5.
        """
        area = (ctypes.c_uint64 * 2)(offset, num_bytes)
        counts = (ctypes.c_uint64 * 5)()
        failed = libc().syscall(_CACHESTAT, self._fd, ctypes.byref(area), ctypes.byref(counts), 0)
        return 0 if failed else int(counts[0]) * ALIGNMENT

    def close(self) -> None:
        """Close the file; idempotent."""
        for fd in {self._fd, self._direct_fd} - {-1}:
            kernel.close(fd)
        self._fd = self._direct_fd = -1
        self._mapping = None


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
