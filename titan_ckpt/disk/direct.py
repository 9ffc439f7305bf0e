"""Bulk I/O: worker threads, bounce buffers and direct reads (`file_writer` writes).

Owns the fallback from O_DIRECT to buffered I/O and the size of one I/O. Knows no formats and no tensors' geometry.
Direct I/O is used because one thread with 8 MiB blocks saturates the disk at an eighth of the processor time of
buffered writes, which also fill the page cache with bytes that nobody reads again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from titan_ckpt.disk import cuda, kernel
from titan_ckpt.disk.files import Reader
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, advise, libc, map_memory, release, round_up
from titan_ckpt.errors import CorruptCheckpointError

IO_BYTES = 4 << 20
"""Bytes of one read or write; also of each worker's bounce buffer."""

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

NUM_WORKERS = 4
"""Threads of one save or load on one rank: while one copies and hashes, the others' reads or writes are in flight."""


def num_copy_workers() -> int:
    """Return the number of threads that copy memory: this rank's share of the processors, at most NUM_WORKERS.

    Copying, unlike waiting for a disk, uses a processor, so more threads would only slow each other and the other ranks
    of this machine (LOCAL_WORLD_SIZE, which torchrun sets).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(NUM_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks)))


_Item = TypeVar("_Item")


def run_workers(items: Iterable[_Item], function: Callable[[_Item], None], num_workers: int = NUM_WORKERS) -> None:
    """Call the function with every item, in order, on several threads; the caller's thread is one of them.

    The first error, or an interrupt of the caller's thread, stops all threads at their next item, and is raised when
    all have stopped. If no thread can be started, as at the exit of Python 3.12 and later while it waits for a save,
    the caller's thread does all the work.
    """
    todo, end = iter(items), object()
    as_here = cuda.as_here()
    errors: list[BaseException] = []
    busy: set[int] = set()
    lock = threading.RLock()  # entered itself: an interrupt in `Condition.__enter__` leaves it taken
    changed = threading.Condition(lock)

    def work() -> None:
        thread = threading.get_ident()
        try:
            as_here()
            while True:
                with lock:
                    item = end if errors else next(todo, end)
                    if item is end:
                        return
                    busy.add(thread)
                function(item)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)
        finally:
            with lock:
                busy.discard(thread)
                changed.notify_all()

    threads: list[threading.Thread] = []
    try:
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
    except BaseException as error:  # an interrupt, after which `join` takes threads for ended that still run
        errors.append(error)
        while busy - {threading.get_ident()}:  # whatever interrupts this: they use what the caller then closes
            with suppress(BaseException), lock:
                changed.wait(1.0)
    if errors:
        raise errors[0]


@contextmanager
def meanwhile(action: Callable[[], None], *, patience: float | None = None) -> Iterator[None]:
    """Run the action in a second thread while the block runs; leaving waits for it and raises its error.

    `patience`: an error of the block waits so many seconds for the thread, which then is left to end by itself. If no
    thread can be started, the action comes first, in this thread.
    """
    errors: list[BaseException] = []
    as_here = cuda.as_here()

    def run() -> None:
        try:
            as_here()
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="titan_ckpt-meanwhile", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        action()
        yield
        return
    try:
        yield
    except BaseException:
        thread.join(patience)
        raise
    thread.join()
    if errors:
        raise errors[0]


@dataclass(slots=True, eq=False)
class _Bounce:
    buffer: Buffer
    pinned: bool | None = None
    """Whether the memory is page-locked; None until CUDA was asked."""
    copies: Sequence[torch.cuda.Event] = ()
    """Ends of the copies to devices that still read the buffer."""


_bounces: deque[_Bounce] = deque()
"""Buffers that nobody uses; the one used last, which the processor's cache may hold, is the last one."""

os.register_at_fork(after_in_child=lambda: _bounces.clear())  # a child does not inherit page-locked memory


@contextmanager
def bounce_buffer() -> Iterator[Buffer]:
    """Lend an aligned buffer of IO_BYTES, page-locked if CUDA is in use. Buffers stay for later saves and loads.

    There is at most one per worker, and two while devices read them: a worker fills one while the other is copied.
    """
    bounce = _take_bounce()
    if bounce.pinned is None and cuda.in_use():
        bounce.buffer.tensor.zero_()
        bounce.pinned = cuda.pin(bounce.buffer)
    outer = cuda.take_uploads()  # from a buffer that this thread holds meanwhile
    try:
        yield bounce.buffer
    finally:
        bounce.copies = cuda.take_uploads()
        cuda.keep_uploads(outer)
        _bounces.append(bounce)


def _take_bounce() -> _Bounce:
    with suppress(IndexError):  # `if _bounces` first would race with other threads
        bounce = _bounces.pop()
        if all(event.query() for event in bounce.copies):
            return bounce
        _bounces.append(bounce)
        if len(_bounces) >= NUM_WORKERS:
            bounce = _bounces.popleft()
            cuda.await_events(bounce.copies)
            return bounce
    return _Bounce(Buffer.allocate(IO_BYTES))


def finish_uploads() -> None:
    """Wait for all copies from bounce buffers to devices. Called when no thread uses one."""
    for bounce in tuple(_bounces):
        cuda.await_events(bounce.copies)


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
    num_workers = NUM_WORKERS
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
        """Give the pages of a view back, that no more of the file is in this process than is being read."""
        release(view)

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
