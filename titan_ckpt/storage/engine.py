"""How this package moves many bytes: worker threads, direct writes and reads, questions to the page cache.

Owns the ladder O_DIRECT -> buffered and the size of one I/O. Knows no formats and no tensors' geometry.
Why direct: one thread with 8 MiB blocks saturates the disk at an eighth of the processor time of buffered writes,
which leave the page cache full of bytes nobody reads again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import torch

from titan_ckpt import posix
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.storage.memory import ALIGNMENT, Buffer, round_up
from titan_ckpt.storage.page_cache import Witness, cached_bytes

IO_BYTES = 4 << 20
"""Bytes of one read or write; also of each worker's bounce buffer."""

NUM_WORKERS = 4
"""Threads of one save or load on one rank: while one copies and hashes, the others' reads or writes are in flight."""


def num_copy_workers() -> int:
    """Return how many threads copy memory: this rank's share of the processors, which waiting for disks does not take.

    More would only take them from each other and from the other ranks of this machine (LOCAL_WORLD_SIZE, as torchrun
    sets it).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(NUM_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks)))


_Item = TypeVar("_Item")


def run_workers(items: Iterable[_Item], function: Callable[[_Item], None], num_workers: int = NUM_WORKERS) -> None:
    """Call the function with every item, in order, on several threads; the caller's thread is one of them.

    The first error stops all threads at their next item and is raised here. Where no thread can be started, as while
    Python 3.12 and later wait for a save before they end, this one does it all.
    """
    todo = iter(items)
    end = object()
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    item = next(todo, end)
                if item is end:
                    return
                function(item)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    threads = []
    for _ in range(num_workers - 1):
        thread = threading.Thread(target=work, name="titan_ckpt-io", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def meanwhile(action: Callable[[], None] | None) -> Iterator[None]:
    """Run the action in another thread while the block runs; leaving waits for it. Raises: what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if action is not None:
                action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="titan_ckpt-meanwhile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


_bounces: list[Buffer] = []


@contextmanager
def bounce_buffer() -> Iterator[Buffer]:
    """Lend an aligned buffer of IO_BYTES. At most one per worker is ever made; they stay for the next save or load."""
    try:
        buffer = _bounces.pop()
    except IndexError:  # asked and taken at once: several threads want one
        buffer = _new_bounce()
    try:
        yield buffer
    finally:
        _bounces.append(buffer)


def _new_bounce() -> Buffer:
    buffer = Buffer.allocate(IO_BYTES)
    if torch.cuda.is_initialized():
        buffer.pin()
    return buffer


@contextmanager
def collector_held() -> Iterator[None]:
    """Hold the cyclic collector back: it would walk the 10^6 new objects of a large plan again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class FileWriter:
    """A new file written in aligned blocks, directly where the file system can, buffered where it cannot.

    A context manager: leaving it closes the file; `finish` makes it durable. Writes may come from several threads.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        try:
            self._fd = posix.open_exclusive(path, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = posix.open_exclusive(path)
        try:
            posix.fallocate(self._fd, round_up(num_bytes))
        except BaseException:
            self.close()
            raise

    def write(self, view: memoryview, offset: int) -> None:
        """Write a block whose memory, offset and length are aligned; `finish` cuts off what reaches past the end."""
        try:
            posix.pwrite_all(self._fd, view, offset)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # some file systems accept the flag at open and refuse the write
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            posix.pwrite_all(self._fd, view, offset)

    def finish(self) -> None:
        """Cut the padding of the last block and fsync."""
        if round_up(self.num_bytes) != self.num_bytes:
            posix.truncate(self._fd, self.num_bytes)
        posix.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            posix.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileReader:
    """An open regular file, read at offsets through the page cache or around it. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Open the file. Raises: OSError, also for a symbolic link; CorruptCheckpointError if it is no regular file."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        self._direct_fd = -1
        status = os.fstat(self._fd)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptCheckpointError(f"{path}: is no regular file; remove it and copy the right one", str(path))

    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views one after the other with the bytes from `offset` on, through the page cache.

        Raises: EOFError if the file ends before.
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
        """Return the bytes, fewer at the end of the file."""
        parts = []
        while num_bytes > 0 and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            offset += len(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the aligned buffer's first `num_bytes` from an aligned offset, around the page cache where possible.

        The buffer must have room for `num_bytes` rounded up. Raises: EOFError if the file ends before.
        """
        done = 0
        while done < num_bytes:
            fd = self._direct() if done % ALIGNMENT == 0 else self._fd
            try:
                got = os.preadv(fd, [buffer[done : round_up(num_bytes)]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self._fd:
                    raise
                self._direct_fd = self._fd
                continue
            if got == 0:
                raise EOFError(f"{self.path} ends at byte {offset + done}")
            done += got

    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill the view; whole blocks around the page cache where possible, what is left at both ends through it.

        Its memory address and the offset are equal modulo ALIGNMENT. Raises: EOFError if the file ends before.
        """
        first = min(-offset % ALIGNMENT, len(view))
        stop = first + (len(view) - first) // ALIGNMENT * ALIGNMENT
        self.read_into([view[:first]], offset)
        self.read_aligned(view[first:stop], offset + first, stop - first)
        self.read_into([view[stop:]], offset + stop)

    def _direct(self) -> int:
        if self._direct_fd < 0:
            try:
                self._direct_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct_fd = self._fd
        return self._direct_fd

    def cached_bytes(self, offset: int, num_bytes: int) -> int:
        """Return how many of these bytes are in the page cache, in whole pages; 0 where the kernel cannot tell."""
        return cached_bytes(self._fd, offset, num_bytes)

    def is_cached(self, offset: int, num_bytes: int) -> bool:
        """Say whether (nearly) all of these bytes are in the page cache."""
        return self.cached_bytes(offset, num_bytes) >= 0.95 * num_bytes

    def witness(self) -> Witness | None:
        """Begin to watch the file for changes, where that is possible."""
        return Witness.of(self._fd)

    @functools.cached_property
    def identity(self) -> str:
        """Name the file among all that this host can see."""
        status = os.fstat(self._fd)
        return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"

    def close(self) -> None:
        """Close the file; idempotent."""
        for fd in {self._fd, self._direct_fd} - {-1}:
            os.close(fd)
        self._fd = self._direct_fd = -1


_MAX_VIEWS = 1024
