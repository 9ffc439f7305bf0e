"""Objects in a bucket as files: one is read at offsets, and one is uploaded while it is written, in any order.

Owns the memory between the writers and the requests: parts that are not whole yet, and a few that wait to be sent.
"""

from __future__ import annotations

import errno
import queue
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from titan_ckpt.disk.files import IO_BYTES, Reader, Writer
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.stores.answers import StoreError

if TYPE_CHECKING:
    from titan_ckpt.stores.objects import BucketPath

HEAD_BYTES = 1 << 20
"""The first request gets the size and so many bytes: the header of most files."""
_REQUEST_BYTES = 16 << 20
"""A server reads whole blocks of its own, and pays for each request; larger answers only take more memory."""
_WAITING_PARTS = 2
"""Whole parts that wait to be sent; a writer that would make more waits, too."""


class ObjectReader(Reader):
    """An object that does not change, read by ranges as `FileReader` reads a file. Threads may share it."""

    is_remote = True
    path: BucketPath

    def __init__(self, path: BucketPath) -> None:
        """Read the object's head. Raises: FileNotFoundError; StoreError."""
        self.path = path
        self.num_workers = path.bucket.concurrency
        self.request_bytes = min(_REQUEST_BYTES, path.bucket.part_mib << 20)
        """Bytes to ask for at a time where many are wanted."""
        self._head, self.num_bytes = path.read_head(HEAD_BYTES)
        self._fetched = 0, memoryview(self._head)
        """Offset and content of what is in memory."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `offset` on; fewer if the object ends. Raises: EOFError; StoreError."""
        stop = min(offset + num_bytes, self.num_bytes)
        known = self._head[offset:stop]
        if offset + len(known) >= stop:
            return known
        return known + self.path.bucket.read_range(self.path.key, offset + len(known), stop)

    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the buffer's first `num_bytes`, by one request. Raises: EOFError; StoreError."""
        data = self.view(offset, num_bytes)
        np.copyto(np.frombuffer(buffer[:num_bytes], np.uint8), np.frombuffer(data, np.uint8))  # without the interpreter

    def read_again(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Do as `read_aligned`, by a new request whatever is in memory."""
        data = self.path.bucket.read_range(self.path.key, offset, offset + num_bytes)
        buffer[:num_bytes] = data

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes in the client's memory, by one request. Raises: EOFError; StoreError."""
        if offset + num_bytes > self.num_bytes:
            raise EOFError(f"{self.path} ends at byte {self.num_bytes}")
        first, fetched = self._fetched
        if first <= offset and offset + num_bytes <= first + len(fetched):
            return fetched[offset - first :][:num_bytes]
        return self.path.bucket.read_range(self.path.key, offset, offset + num_bytes)

    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order, by one request for each. Raises: as `read_aligned`."""
        for view in views:
            if len(view):
                self.read_aligned(view, offset, len(view))
                offset += len(view)

    def fetch(self, offset: int, num_bytes: int) -> None:
        """Get these bytes, and what follows them if they are few; later reads of them send nothing. For one thread.

        Raises: EOFError; StoreError.
        """
        first, fetched = self._fetched
        if first <= offset and offset + num_bytes <= first + len(fetched):
            return
        self._fetched = 0, memoryview(b"")
        memory = np.empty(min(max(num_bytes, IO_BYTES), self.num_bytes - offset), np.uint8).data
        parts = [(memory[at : at + IO_BYTES], offset + at) for at in range(0, len(memory), IO_BYTES)]
        run_workers(parts, lambda part: self.read_blocks(*part), min(self.num_workers, len(parts)))
        self._fetched = offset, memory

    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill the view, by one request. Raises: as `read_aligned`."""
        self.read_aligned(view, offset, len(view))

    def close(self) -> None:
        """Forget what was read."""
        self._head, self._fetched = b"", (0, memoryview(b""))


class ObjectWriter(Writer):
    """A new object at a place where nobody else writes. Threads may write at the same time.

    A byte that is written twice keeps its first value. `finish` or `close` comes last.
    """

    def __init__(self, path: BucketPath, expected_bytes: int) -> None:
        """Send nothing yet. `expected_bytes`: at most a little less than the size of the object."""
        self.path = path
        self._part_bytes = path.bucket.part_bytes(expected_bytes)
        self._parts: dict[int, _Part] = {}
        self._taken = 0
        """Number of parts that the upload has taken, from the first one on."""
        self._total: int | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        """Taken itself: an interrupt as `with` leaves a condition, whose methods are Python's, would leave it taken."""
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def write(self, view: memoryview, offset: int) -> None:
        """Copy bytes to their place; return while they are sent. Raises: StoreError of this or an earlier write."""
        while len(view):
            number, at = divmod(offset, self._part_bytes)
            piece = view[: self._part_bytes - at]
            self._write_part(number, at, piece)
            view, offset = view[len(piece) :], offset + len(piece)

    def _write_part(self, number: int, at: int, piece: memoryview) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._error or number in self._parts or self._num_waiting() < _WAITING_PARTS)
            self._check()
            if number < self._taken:
                return
            part = self._parts.setdefault(number, _Part(self._part_bytes))
            new = part.reserve(at, at + len(piece))
        for start, stop in new:
            np.copyto(part.memory[start:stop], np.frombuffer(piece[start - at : stop - at], np.uint8))
        with self._lock:
            part.num_written += sum(stop - start for start, stop in new)
            self._start()
            self._changed.notify_all()
            self._check()

    def finish(self, num_bytes: int) -> None:
        """Wait until the object of `num_bytes`, which are all written, is there. Raises: StoreError; EOFError."""
        with self._lock:
            written = self._taken * self._part_bytes + sum(part.num_written for part in self._parts.values())
            if self._error is None and self._total is None and written != num_bytes:
                self._error = EOFError(f"{self.path}: {written} of {num_bytes} bytes were written")
            self._total = num_bytes
            self._start()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._check()

    def close(self) -> None:
        """End the upload; there is no object then, unless it is finished already. Idempotent."""
        with self._lock:
            self._error = self._error or InterruptedError(f"{self.path}: its upload was given up")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._thread is not None or self._error is not None:
            return
        thread = threading.Thread(target=self._upload, name="titan_ckpt-upload", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # without one, all of the object would have to be in memory
            message = f"{self.path}: the object cannot be uploaded: {no_thread(error)}"
            self._error = StoreError(errno.EAGAIN, message, is_final=True)
        else:
            self._thread = thread

    def _upload(self) -> None:
        try:
            self.path.bucket.upload(self.path.key, self._whole_parts(), self._part_bytes)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._parts.clear()
                self._changed.notify_all()

    def _whole_parts(self) -> Iterator[memoryview]:
        """Yield the parts in order, each when it is whole."""
        for number in count():
            with self._lock:
                self._changed.wait_for(lambda n=number: self._error or self._is_whole(n) or self._is_end(n))  # type: ignore[misc]
                self._check()
                if self._is_end(number):
                    return
                part = self._parts.pop(number)
                self._taken = number + 1
                self._changed.notify_all()
            yield part.memory[: part.num_written].data

    def _is_end(self, number: int) -> bool:
        return self._total is not None and number * self._part_bytes >= self._total

    def _is_whole(self, number: int) -> bool:
        size = self._part_bytes
        if self._total is not None:
            size = min(size, self._total - number * size)
        return number in self._parts and self._parts[number].num_written == size

    def _num_waiting(self) -> int:
        """Return how many parts from the next one on are whole."""
        return next(n for n in count() if not self._is_whole(self._taken + n))


def no_thread(error: RuntimeError) -> str:
    """Return why a thread cannot be started, and the next step for the user."""
    return f"{error}. Raise the limit of processes and threads of this user or container (`ulimit -u`, pids.max)"


class _Part:
    """The memory of a part, and which of its bytes are written."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(num_bytes, np.uint8)
        self.num_written = 0
        self._ends: list[tuple[int, int]] = []
        """(Start, stop) of what is written or being written, in order and apart from each other."""

    def reserve(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of [start, stop) that nobody has reserved; they are reserved then."""
        runs = self._ends
        first = bisect_left(runs, (start, start))
        if first and runs[first - 1][1] >= start:
            first -= 1
        last, free, at = first, [], start
        while last < len(runs) and runs[last][0] <= stop:
            if at < runs[last][0]:
                free.append((at, runs[last][0]))
            at = max(at, runs[last][1])
            last += 1
        if at < stop:
            free.append((at, stop))
        low, high = min([start, *(run[0] for run in runs[first:last])]), max([stop, *(r[1] for r in runs[first:last])])
        runs[first:last] = [(low, high)]
        return free


class PartMemory:
    """Memory of parts that are being sent, which is used again when the client has let go of a part.

    At most `num_parts` buffers of `part_bytes`: fresh memory takes longer to touch than to fill, so an upload has as
    much as it has parts in flight, and no more. One thread takes them; any may let them go.
    """

    def __init__(self, part_bytes: int, num_parts: int) -> None:
        """Allocate nothing yet."""
        self._part_bytes = part_bytes
        self._num_unmade = num_parts
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()  # its `put` may interrupt any call, even its own
        self._lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Return memory for a part. It is lent again when nobody has this view, or another one of it, any more.

        Waits while all parts are in use, as they are until the client has their answers.
        """
        if self._num_unmade and self._free.empty():
            self._num_unmade -= 1
            buffer = Buffer.allocate(self._part_bytes)
        else:
            buffer = self._free.get()
        owner = np.frombuffer(buffer.view[:num_bytes], np.uint8)  # all views of it keep it alive
        self._lent[buffer.address] = weakref.ref(owner, lambda _: self._free.put(buffer))
        return owner.data
