"""The host arena: memory for a copy of a rank's data section, so that training may go on while the copy is written.

Owns the arena's memory and the copy into it. Decides neither what is saved nor when, and writes no files.

Fresh memory is slow: its first touch costs ten times the copy. So the arena is allocated and touched before the first
save and used for every later save. It is as large as this rank's file; an asynchronous save needs no other memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from titan_ckpt.disk.direct import IO_BYTES, num_copy_workers, run_workers
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, SharedBuffer, round_up
from titan_ckpt.formats.native.segments import Places, Segments


class StagingHandle:
    """A running copy into the arena."""

    def __init__(self, segments: Segments, arena: Arena) -> None:
        self._segments: Segments | None = segments
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if segments.has_device_tensors:
            self._event = arena.copy_from_device(segments)
        else:
            self._thread = threading.Thread(target=self._copy, args=(arena,), name="titan_ckpt-staging", daemon=True)
            self._thread.start()

    def _copy(self, arena: Arena) -> None:
        assert self._segments is not None
        try:
            arena.copy_from_host(self._segments)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when the live tensors may change again. Called right before the optimizer step.

        For tensors on a device only the current stream waits, not this thread. Raises: what the copy raised.
        """
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self.finish()

    def finish(self) -> None:
        """Block until the arena holds all bytes. Called by the writing thread. Raises: what the copy raised."""
        if self._event is not None:
            self._event.synchronize()
        if self._thread is not None:
            self._thread.join()
        self._segments = None
        if self._error is not None:
            raise self._error


class Arena:
    """Reusable host memory for one staged save. It is pinned where tensors are on a device."""

    def __init__(self, num_bytes: int, *, pinned: bool, beside: bytes = b"", shared: bool = False) -> None:
        """Allocate and touch the memory.

        `num_bytes`: size of the data section. `beside`: bytes that are put behind it, at `beside_at`. `shared`: another
        process can map the memory.
        """
        self.num_bytes = num_bytes
        self.beside_at = round_up(num_bytes)
        size = self.beside_at + round_up(len(beside))
        self.shared = SharedBuffer.allocate(max(size, ALIGNMENT)) if shared else None
        self.buffer = self.shared.buffer if self.shared else Buffer.allocate(size)
        self.buffer.view[self.beside_at : self.beside_at + len(beside)] = beside
        self._pinned = pinned and self.buffer.pin()
        self._stream: torch.cuda.Stream | None = None
        run_workers(range(0, num_bytes, IO_BYTES), self._touch, num_copy_workers())

    def _touch(self, start: int) -> None:
        self.buffer.tensor[start : min(start + IO_BYTES, self.num_bytes)].zero_()

    def stage(self, places: Places, tensors: Sequence[torch.Tensor]) -> StagingHandle:
        """Start to copy the tensors. They must not change before `wait` of the handle returns."""
        return StagingHandle(Segments(places, tensors), self)

    def copy_from_host(self, segments: Segments) -> None:
        """Copy all segments with several threads."""

        def fill(start: int) -> None:
            segments.fill(start, min(start + IO_BYTES, self.num_bytes), self.buffer, start)

        run_workers(range(0, self.num_bytes, IO_BYTES), fill, num_copy_workers())

    def copy_from_device(self, segments: Segments) -> torch.cuda.Event:
        """Enqueue the copies on a side stream, after the work of the current stream; return the event of their end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            segments.enqueue(self.buffer)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def close(self) -> None:
        """Unpin the pages. The memory is freed with the last view of it."""
        if self._pinned:
            self.buffer.unpin()
            self._pinned = False
        if self.shared is not None:
            os.close(self.shared.fd)
            self.shared = None
