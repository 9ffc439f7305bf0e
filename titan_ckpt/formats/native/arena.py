"""The host arena: memory for a copy of a rank's data section, so that training may go on while the copy is written.

Owns the arena's memory, the copy into it and the file that is written from it, here or by a writer process. Decides
neither what is saved nor when.

Fresh memory is slow: its first touch costs ten times the copy, and page-locking it as much again. So it is made ready
in a thread and used for every later save. It is as large as this rank's file; an asynchronous save needs no other
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.disk import cuda, kernel
from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, SharedBuffer, round_up
from titan_ckpt.disk.workers import BackgroundCall, Latch, num_copy_workers, run_workers
from titan_ckpt.formats.native.sealed_file import write_rank_file
from titan_ckpt.formats.native.writer import Places, Segments, WritePlan
from titan_ckpt.formats.native.writer_process import WriterProcess
from titan_ckpt.geometry.chunks import Block, LazyTensor, info_of, sharding_of
from titan_ckpt.stores.store import Place

COPY_BYTES = 32 << 20
"""Bytes that are copied from a device before the next look at what is in flight; divides cuda.REGISTERED_BYTES."""

_HOST_BYTES = 32 << 20
"""Bytes that a thread copies in host memory at a time, if there are many times as many. The C library copies so many
around the processor's cache, which takes little more than half the time: the target is not read before it is written.
"""


class StagingHandle:
    """A copy into the arena, in a thread."""

    def __init__(self, segments: Segments, arena: Arena, changed: Callable[[], list[str]]) -> None:
        """Prepare a copy that follows all work which this thread has enqueued on the tensors' devices.

        `changed` returns the names of the tensors that have changed since they were to be copied.
        """
        self._segments: Segments | None = segments
        self._streams = cuda.CopyStreams(segments.devices) if segments.devices else None
        self._changed = changed
        self._verdict: dict[str, list[str]] = {}
        """What `changed` has returned, under one key: the first answer is the one that counts."""
        self._is_waited_for = False
        self._is_issued = Latch()
        self._copying = BackgroundCall(partial(self._copy, arena), "titan_ckpt-staging", late=False, daemon=True)

    def start(self) -> None:
        """Start the copy. Raises: RuntimeError if no thread can be started."""
        self._copying.start()

    def _copy(self, arena: Arena) -> None:
        assert self._segments is not None
        try:
            if self._streams is None:
                arena.copy_from_host(self._segments)
            else:
                self._copy_from_devices(self._segments, self._streams, arena)
            self._look()
        finally:
            self._is_issued.set()

    def _copy_from_devices(self, segments: Segments, streams: cuda.CopyStreams, arena: Arena) -> None:
        """Copy piece by piece; all that is left at once when training waits for it."""
        target = arena.buffer
        streams.enter()
        try:
            for start in range(0, arena.num_bytes, COPY_BYTES):
                segments.enqueue(start, min(start + COPY_BYTES, arena.num_bytes), target, start)
                streams.end_piece(wait=not self._is_waited_for)
            self._is_issued.set()
        finally:
            streams.finish()

    def _look(self) -> None:
        """Note what has changed, unless it is noted: what changes after `wait` has returned has every right to."""
        if not self._verdict:
            self._verdict.setdefault("changed", self._changed())

    def wait(self) -> None:
        """Return when the live tensors may change again. Called right before the optimizer step.

        For tensors on a device only the current stream waits for the copy. If the copy has failed, they may change too:
        the writing thread raises its error, on all ranks.
        """
        self._is_waited_for = True
        self._copying.see_to_start()
        if not self._copying.done:
            self._is_issued.wait()
        if self._streams is not None:
            self._streams.join()
        self._look()  # last: an interrupt before it leaves the look to the copying thread, which is not done yet

    def finish(self) -> list[str]:
        """Block until the arena holds all bytes. Called by the writing thread. Raises: what the copy raised.

        Until then the tensors are kept, also those that nobody else holds: a copy may still read them.
        Return the names of the tensors that changed before they were copied: the copy is that of no step.
        """
        self.join()
        if self._copying.error is not None:
            raise self._copying.error
        return self._verdict["changed"]

    def join(self) -> None:
        """Block until nothing is being copied any more."""
        self._copying.wait()
        self._segments = None


class Arena:
    """Reusable host memory for one staged save. It is page-locked where tensors are on a device."""

    def __init__(
        self, num_bytes: int, *, pinned: bool, beside: bytes = b"", shared: bool = False, room: int = 0
    ) -> None:
        """Map the memory. `prepare` makes it ready; otherwise its first use does.

        `num_bytes`: size of the data section. `beside`: bytes that are put behind it, at `beside_at`. `shared`: another
        process can map the memory. `room`: bytes by which both may grow.
        """
        self.num_bytes = num_bytes
        self.beside_at = round_up(num_bytes)
        size = self.beside_at + round_up(len(beside)) + round_up(room)
        self.shared = SharedBuffer.allocate(max(size, ALIGNMENT)) if shared else None
        self._buffer = self.shared.buffer if self.shared else Buffer.allocate(size)
        self._buffer.view[self.beside_at : self.beside_at + len(beside)] = beside
        self._pinned = False
        self._copying: StagingHandle | None = None
        self._preparing = BackgroundCall(partial(self._prepare, pinned), "titan_ckpt-arena", daemon=True)

    def prepare(self) -> None:
        """Begin to touch and page-lock the memory in a thread."""
        self._preparing.start()

    def _prepare(self, pinned: bool) -> None:
        """Touch the memory, then page-lock it, or take page-locked memory of CUDA's own in its place."""
        run_workers(range(0, self.num_bytes, IO_BYTES), self._touch, num_copy_workers())
        if not pinned:
            return
        self._pinned = cuda.pin(self._buffer)
        if not self._pinned and self.shared is None:  # shared memory has to stay where it is
            self._buffer = cuda.allocate_pinned(len(self._buffer.view)) or self._buffer

    def _touch(self, start: int) -> None:
        self._buffer.tensor[start : min(start + IO_BYTES, self.num_bytes)].zero_()

    @property
    def buffer(self) -> Buffer:
        """Return the memory when it is ready. Raises: what kept it from being so."""
        self._preparing.wait()
        if self._preparing.error is not None:
            raise self._preparing.error
        return self._buffer

    def refit(self, num_bytes: int, beside: bytes) -> bool:
        """Use the memory for another data section and what is beside it, if it is large enough; return whether it is.

        Page-locking as much anew takes seconds. No save may be using the memory.
        """
        if round_up(num_bytes) + round_up(len(beside)) > len(self._buffer.view):
            return False
        self._preparing.wait()
        if self._copying is not None:
            self._copying.join()
        self.num_bytes, self.beside_at = num_bytes, round_up(num_bytes)
        self._buffer.view[self.beside_at : self.beside_at + len(beside)] = beside
        return self._preparing.error is None

    def stage(
        self, places: Places, tensors: Sequence[torch.Tensor], changed: Callable[[], list[str]] = list
    ) -> StagingHandle:
        """Start to copy the tensors. They must not change before `wait` of the handle returns.

        `changed`: see StagingHandle. Raises: RuntimeError if no thread can be started.
        """
        if self._copying is not None:  # a save has failed before it needed the copy
            self._copying.join()
        self._copying = StagingHandle(Segments(places, tensors), self, changed)  # known before it runs
        self._copying.start()
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
        self._preparing.wait()
        if self._copying is not None:
            self._copying.join()
        if self._pinned:
            cuda.unpin(self._buffer)
            self._pinned = False
        shared, self.shared = self.shared, None  # first: closed twice, the number may be that of another file
        if shared is not None:
            kernel.close(shared.fd)


class StagedFile:
    """Memory for a copy of the planned tensors, from which the file is written. One save uses it at a time."""

    def __init__(
        self,
        plan: WritePlan,
        *,
        pinned: bool = False,
        in_process: bool = False,
        timeout_seconds: float = 1800.0,
        room: int = 0,
    ) -> None:
        """Map the memory. `pinned`: tensors are on a device. `in_process`: another process writes.

        `timeout_seconds`: as of WriterProcess. `room`: bytes by which the file of another plan may be larger.
        """
        self.plan = plan
        self._timeout_seconds = timeout_seconds
        beside = plan.layout.header if in_process else b""
        self._arena = Arena(plan.data_bytes, pinned=pinned, beside=beside, shared=in_process, room=room)
        self._process: WriterProcess | None = None

    def prepare(self) -> None:
        """Begin to make the memory ready, in the background."""
        self._arena.prepare()

    def refit(self, plan: WritePlan) -> bool:
        """Use the memory for another plan if it is large enough, and return whether it is. No save may be using it."""
        beside = plan.layout.header if self._arena.shared is not None else b""
        if not self._arena.refit(plan.data_bytes, beside):
            return False
        self.plan = plan
        return True

    def begin(self, tensors: Mapping[str, torch.Tensor], changed: Callable[[], list[str]] = list) -> StagingHandle:
        """Start to copy the tensors in the background; they must not change before `wait` of the handle.

        `changed` returns the names of those that have changed all the same.
        """
        if self._process is not None and not self._process.is_idle:
            self._process.close()
            self._process = None
        if self._arena.shared is not None and self._process is None:
            self._process = WriterProcess(self._arena.shared, self._timeout_seconds)
        return self._arena.stage(self.plan.places, self.plan.bind(tensors), changed)

    def tensors(self, live: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
        """Return copies of the live tensors, none of them cast: on every rank the chunks that it writes, no replicas.

        They can be read from the end of staging until the next staging starts.
        """
        memory = self._arena.buffer.tensor
        blocks: dict[str, list[Block]] = {fqn: [] for fqn in live}
        for share, start in zip(self.plan.shares, self.plan.places[0], strict=True):
            stored = memory[start : start + share.chunk.numel * share.info.dtype.itemsize]
            data = stored.view(share.info.dtype).view(share.chunk.sizes)
            blocks[share.name].append(Block(share.chunk, data))
        return {
            fqn: LazyTensor(
                info_of(value),
                partial(iter, blocks[fqn]),
                like=tuple(b.chunk for b in blocks[fqn]),
                in_memory=True,
                sharding=sharding_of(value),
            )
            for fqn, value in live.items()
        }

    def write(self, folder: Place) -> FileRecord:
        """Write the file, after staging has finished; otherwise as `WritePlan.write`."""
        plan, path, staged = self.plan, folder / self.plan.file_name, self._arena.buffer.view
        if self._process is not None:
            return plan.record(self._process.write(path, plan.layout, self._arena.beside_at))
        return plan.record(
            write_rank_file(
                path, plan.layout, lambda a, b: nullcontext(staged[a : round_up(b)]), views=lambda a, b: [staged[a:b]]
            )
        )

    def close(self) -> None:
        """End the writer process, and release the memory."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._arena.close()
