"""The host arena: memory for a copy of a rank's data section, so that training may go on while the copy is written.

Owns the arena's memory and the copy into it. Decides neither what is saved nor when, and writes no files.

Fresh memory is slow: its first touch costs ten times the copy, and page-locking it as much again. So it is made ready
in a thread and used for every later save. It is as large as this rank's file; an asynchronous save needs no other
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from titan_ckpt.disk import cuda, descriptors
from titan_ckpt.disk.direct import IO_BYTES, num_copy_workers, run_workers
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, SharedBuffer, round_up
from titan_ckpt.formats.native.segments import Places, Segments

COPY_BYTES = 32 << 20
"""Bytes that are copied from a device before the next look at what is in flight; divides cuda.REGISTERED_BYTES."""


_HOST_BYTES = 32 << 20
"""Bytes that a thread copies in host memory at a time, if there are many times as many. The C library copies so many
around the processor's cache, which takes little more than half the time: the target is not read before it is written.
"""


class StagingHandle:
    """A running copy into the arena."""

    def __init__(self, segments: Segments, arena: Arena) -> None:
        """Start the copy, after all work that this thread has enqueued on the tensors' devices."""
        self._segments: Segments | None = segments
        self._streams = cuda.CopyStreams(segments.devices) if segments.devices else None
        self._is_waited_for = threading.Event()
        self._is_issued = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, args=(arena,), name="titan_ckpt-staging", daemon=True)
        self._thread.start()

    def _copy(self, arena: Arena) -> None:
        assert self._segments is not None
        try:
            if self._streams is None:
                arena.copy_from_host(self._segments)
            else:
                self._copy_from_devices(self._segments, self._streams, arena)
        except BaseException as error:
            self._error = error
        finally:
            self._is_issued.set()

    def _copy_from_devices(self, segments: Segments, streams: cuda.CopyStreams, arena: Arena) -> None:
        """Copy piece by piece; all that is left at once when training waits for it."""
        target = arena.buffer
        streams.enter()
        try:
            for start in range(0, arena.num_bytes, COPY_BYTES):
                segments.enqueue(start, min(start + COPY_BYTES, arena.num_bytes), target, start)
                streams.end_piece(wait=not self._is_waited_for.is_set())
            self._is_issued.set()
        finally:
            streams.finish()

    def wait(self) -> None:
        """Return when the live tensors may change again. Called right before the optimizer step.

        For tensors on a device only the current stream waits for the copy. Raises: what the copy raised.
        """
        self._is_waited_for.set()
        self._is_issued.wait()
        if self._error is not None:
            raise self._error
        if self._streams is not None:
            self._streams.join()

    def finish(self) -> None:
        """Block until the arena holds all bytes. Called by the writing thread. Raises: what the copy raised.

        Until then the tensors are kept, also those that nobody else holds: a copy may still read them.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Block until nothing is being copied any more."""
        self._thread.join()
        self._segments = None


class Arena:
    """Reusable host memory for one staged save. It is page-locked where tensors are on a device."""

    def __init__(self, num_bytes: int, *, pinned: bool, beside: bytes = b"", shared: bool = False) -> None:
        """Map the memory, and begin to touch and page-lock it in a thread.

        `num_bytes`: size of the data section. `beside`: bytes that are put behind it, at `beside_at`. `shared`: another
        process can map the memory.
        """
        self.num_bytes = num_bytes
        self.beside_at = round_up(num_bytes)
        size = self.beside_at + round_up(len(beside))
        self.shared = SharedBuffer.allocate(max(size, ALIGNMENT)) if shared else None
        self._buffer = self.shared.buffer if self.shared else Buffer.allocate(size)
        self._buffer.view[self.beside_at : self.beside_at + len(beside)] = beside
        self._pinned = False
        self._copying: StagingHandle | None = None
        self._as_here = cuda.as_here()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._prepare, args=(pinned,), name="titan_ckpt-arena", daemon=True)
        self._thread.start()

    def _prepare(self, pinned: bool) -> None:
        """Touch the memory, then page-lock it, or take page-locked memory of CUDA's own in its place."""
        try:
            self._as_here()
            run_workers(range(0, self.num_bytes, IO_BYTES), self._touch, num_copy_workers())
            if not pinned:
                return
            self._pinned = cuda.pin(self._buffer)
            if not self._pinned and self.shared is None:  # shared memory has to stay where it is
                self._buffer = cuda.allocate_pinned(len(self._buffer.view)) or self._buffer
        except BaseException as error:
            self._error = error

    def _touch(self, start: int) -> None:
        self._buffer.tensor[start : min(start + IO_BYTES, self.num_bytes)].zero_()

    @property
    def buffer(self) -> Buffer:
        """Return the memory when it is ready. Raises: what kept it from being so."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._buffer

    def stage(self, places: Places, tensors: Sequence[torch.Tensor]) -> StagingHandle:
        """Start to copy the tensors. They must not change before `wait` of the handle returns."""
        if self._copying is not None:  # a save has failed before it needed the copy
            self._copying.join()
        self._copying = StagingHandle(Segments(places, tensors), self)
        return self._copying

    def copy_from_host(self, segments: Segments) -> None:
        """Copy all segments with several threads."""
        target = self.buffer
        step = _HOST_BYTES if self.num_bytes >= 8 * _HOST_BYTES else IO_BYTES

        def fill(start: int) -> None:
            segments.fill(start, min(start + step, self.num_bytes), target, start)

        run_workers(range(0, self.num_bytes, step), fill, num_copy_workers())

    def close(self) -> None:
        """Unlock the pages when no copy is under way. The memory is freed with the last view of it."""
        self._thread.join()
        if self._copying is not None:
            self._copying.join()
        if self._pinned:
            cuda.unpin(self._buffer)
            self._pinned = False
        if self.shared is not None:
            descriptors.close(self.shared.fd)
            self.shared = None
