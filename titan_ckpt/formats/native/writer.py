"""Writing this rank's file of a checkpoint, from live memory or from the staging arena.

Owns the plan (which rank writes what, and where in the file) and keeps it between saves. Names no folders and commits
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.disk.direct import bounce_buffer
from titan_ckpt.disk.memory import round_up
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.sharing import Share, divide
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.native.arena import Arena, StagingHandle
from titan_ckpt.formats.native.layout import STORED_DTYPES, Layout, lay_out, rank_file_name
from titan_ckpt.formats.native.rank_file import write_rank_file
from titan_ckpt.formats.native.segments import Places, Segments
from titan_ckpt.formats.native.writer_process import WriterProcess
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import Block, LazyTensor, dtype_name, info_of, local_tensor, sharding_of


@dataclass(frozen=True, slots=True)
class _Plan:
    """The chunks that this rank writes. Entry i of the layout holds `shares[i]`."""

    shares: tuple[Share, ...]
    layout: Layout
    places: Places
    names: tuple[str, ...]
    parts: Mapping[int, tuple[slice, ...]]
    """Index of a share -> its place in the local tensor, for shares that are parts of one."""
    sharded: bool
    """Whether any tensor is a DTensor."""
    replicas: Mapping[tuple[int, ...], tuple[str, ...]]


class NativeWriter:
    """Writes this rank's file of every save. One save at a time; `write_staged` may run in a background thread."""

    def __init__(self, in_process: bool = False) -> None:
        """`in_process`: a process of its own writes staged saves."""
        self._file_name = ""
        self._in_process = in_process
        self._key: list[tuple[str, torch.Size, torch.dtype, tuple[Any, Any] | None]] = []
        self._plan: _Plan | None = None
        self._arena: Arena | None = None
        self._staged: Layout | None = None
        self._process: WriterProcess | None = None

    def plan(self, tensors: Mapping[str, torch.Tensor], coordinator: Coordinator) -> None:
        """Decide what this rank writes. The plan of the last save is kept if no rank's tensors changed. Collective.

        Raises: StateEncodingError naming every tensor that cannot be stored; PeerError if another rank has one.
        """
        stale = self._plan is None or not self._is_as_planned(tensors)
        if any(coordinator.gather("plan/stale", stale)):
            with gc_paused():
                self._make_plan(tensors, coordinator)

    def _is_as_planned(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are the planned tensors. Fast, because every save calls it."""
        if len(tensors) != len(self._key):
            return False
        for (fqn, value), (name, shape, dtype, layout) in zip(tensors.items(), self._key, strict=True):
            if fqn != name or value.dtype is not dtype or value.shape != shape:
                return False
            if isinstance(value, DTensor):
                if layout is None or value.placements != layout[1] or value.device_mesh != layout[0]:
                    return False
            elif layout is not None:
                return False
        return True

    def _make_plan(self, tensors: Mapping[str, torch.Tensor], coordinator: Coordinator) -> None:
        coordinator.together("plan/dtypes", lambda: _check(tensors))
        division = divide(tensors, coordinator)
        shares = tuple(sorted(division.shares, key=lambda s: -s.info.dtype.itemsize))
        elsewhere = {}
        if coordinator.rank == 0:
            own = {share.fqn for share in shares}
            elsewhere = {fqn: info for fqn, info in division.tensors.items() if fqn not in own}
        chunks = [(s.fqn, s.info, s.chunk) for s in shares]
        layout = lay_out(chunks, coordinator.rank, coordinator.world_size, elsewhere)
        self._plan = _Plan(
            shares,
            layout,
            Places.of([(s.info.dtype, s.chunk.sizes) for s in shares]),
            tuple(share.fqn for share in shares),
            {i: share.index for i, share in enumerate(shares) if share.index is not None},
            any(isinstance(value, DTensor) for value in tensors.values()),
            division.replicas,
        )
        self._key = [(fqn, v.shape, v.dtype, _layout(v)) for fqn, v in tensors.items()]
        self._file_name = rank_file_name(coordinator.rank)

    @property
    def replicas(self) -> Mapping[tuple[int, ...], tuple[str, ...]]:
        """Return group of ranks -> the tensors whose values this rank and the others of the group hold in common."""
        return self._planned.replicas

    @property
    def num_bytes(self) -> int:
        """Return the size of this rank's file."""
        return self._planned.layout.num_bytes

    @property
    def _planned(self) -> _Plan:
        assert self._plan is not None, "plan() comes first"
        return self._plan

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[FileRecord]:
        """Write the file from live memory, through one bounce buffer per worker. The file is durable when this returns.

        Raises: OSError; the file is then incomplete and the attempt must be abandoned.
        """
        plan = self._planned
        segments = Segments(plan.places, _bind(plan, tensors))

        @contextmanager
        def pieces(start: int, stop: int) -> Iterator[memoryview]:
            with bounce_buffer() as bounce:
                segments.fill(start, stop, bounce)
                yield bounce.view[: round_up(stop - start)]

        return [self._record(write_rank_file(folder / self._file_name, plan.layout, pieces))]

    def allocate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate the arena for these tensors, so that the first staged save is as fast as the later ones."""
        layout = self._planned.layout
        if self._arena is None or self._staged is not layout:
            self.close()  # give the old memory back before taking the new
            pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
            beside = layout.template if self._in_process else b""
            self._arena = Arena(layout.data_bytes, pinned=pinned, beside=beside, shared=self._in_process)
            self._staged = layout
        if self._process is not None and not self._process.alive:
            self._process.close()
            self._process = None
        if self._in_process and self._process is None:
            assert self._arena.shared is not None
            self._process = WriterProcess(self._arena.shared)

    def begin_staging(self, tensors: Mapping[str, torch.Tensor]) -> StagingHandle:
        """Start to copy the tensors into the arena in the background; they must not change before handle.wait()."""
        self.allocate(tensors)
        assert self._arena is not None
        plan = self._planned
        return self._arena.stage(plan.places, _bind(plan, tensors))

    def staged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
        """Return the planned tensors as the arena holds them: on every rank the chunks that it writes, no replicas.

        They can be read from the end of staging until the next staging starts.
        """
        assert self._arena is not None, "begin_staging() comes first"
        plan, memory = self._planned, self._arena.buffer.tensor
        blocks: dict[str, list[Block]] = {fqn: [] for fqn in tensors}
        for share, start in zip(plan.shares, plan.places.starts, strict=True):
            stored = memory[start : start + share.chunk.numel * share.info.dtype.itemsize]
            data = stored.view(share.info.dtype).view(share.chunk.sizes)
            blocks[share.fqn].append(Block(share.chunk, data))
        return {
            fqn: LazyTensor(
                info_of(value),
                partial(iter, blocks[fqn]),
                like=tuple(b.chunk for b in blocks[fqn]),
                in_memory=True,
                sharding=sharding_of(value),
            )
            for fqn, value in tensors.items()
        }

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the arena."""
        self.begin_staging(tensors).finish()

    def write_staged(self, folder: Path) -> list[FileRecord]:
        """Write the file from the arena, after staging has finished; otherwise as `write`."""
        assert self._arena is not None, "begin_staging() comes first"
        layout, path = self._planned.layout, folder / self._file_name
        if self._process is not None:
            return [self._record(self._process.write(path, layout, self._arena.beside_at))]
        staged = self._arena.buffer.view
        return [self._record(write_rank_file(path, layout, lambda a, b: nullcontext(staged[a : round_up(b)])))]

    def _record(self, digest: str) -> FileRecord:
        return FileRecord(self._file_name, self.num_bytes, digest)

    def close(self) -> None:
        """Release the arena and end the writer process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


def _bind(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the live memory of every planned entry."""
    bound = [tensors[name] for name in plan.names]
    if plan.sharded:
        bound = [local_tensor(value) for value in bound]
    for i, index in plan.parts.items():
        bound[i] = bound[i][index]
    return bound


def _layout(value: torch.Tensor) -> tuple[Any, Any] | None:
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    if faults := [fault for fqn, value in tensors.items() if (fault := _fault(fqn, value))]:
        raise StateEncodingError("; ".join(faults))


def _fault(fqn: str, value: object) -> str | None:
    """Return why the tensor cannot be stored, or None if it can."""
    if not isinstance(value, torch.Tensor):
        return f"{fqn}: expected a tensor, found {type(value).__name__}"
    local = local_tensor(value)
    if local.layout != torch.strided or local.is_meta or is_traceable_wrapper_subclass(local):
        kind = "meta" if local.is_meta else f"{type(local).__name__}, {local.layout}"
        return f"{fqn}: expected a plain tensor with memory of its own, found {kind}; unwrap or materialise it first"
    if local.dtype not in STORED_DTYPES:
        known = ", ".join(dtype_name(dtype) for dtype in STORED_DTYPES)
        return f"{fqn}: {local.dtype} cannot be stored; convert it before saving to one of {known}"
    return None
