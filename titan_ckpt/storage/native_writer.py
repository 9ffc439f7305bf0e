"""Writing this rank's file of a checkpoint, straight from live memory or from the staging arena.

Owns the plan (who writes what, where in the file) and keeps it between saves. Names no folders and commits nothing.
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

from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.manifest import FileRecord
from titan_ckpt.ownership import Share, divide
from titan_ckpt.staging import Arena, StagingHandle
from titan_ckpt.storage.engine import bounce_buffer, collector_held
from titan_ckpt.storage.memory import round_up
from titan_ckpt.storage.native_layout import STORED_DTYPES, Layout, lay_out
from titan_ckpt.storage.rank_file_writer import write_rank_file
from titan_ckpt.storage.segments import Places, Segments
from titan_ckpt.storage.writer_process import WriterProcess
from titan_ckpt.tensors import Block, LazyTensor, info_of


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file inside a checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank writes. `layout.entries[i]` holds `shares[i]`."""

    shares: tuple[Share, ...]
    layout: Layout
    places: Places
    names: tuple[str, ...]
    parts: Mapping[int, tuple[slice, ...]]
    """Which shares are parts of their local tensor."""
    sharded: bool
    """Whether any tensor is a DTensor."""
    replicas: Mapping[tuple[int, ...], tuple[str, ...]]


class NativeWriter:
    """Writes one rank's file, again and again. One save at a time; `write_staged` may run in a background thread."""

    def __init__(self, file_name: str | None = None, in_process: bool = False) -> None:
        """`file_name`: by default rank_file_name of this rank. `in_process`: another process writes staged saves."""
        self._file_name = file_name
        self._in_process = in_process
        self._key: list[tuple[str, torch.Size, torch.dtype, tuple[Any, Any] | None]] = []
        self._plan: _Plan | None = None
        self._arena: Arena | None = None
        self._staged: Layout | None = None
        self._process: WriterProcess | None = None

    def plan(self, tensors: Mapping[str, torch.Tensor], coordinator: Coordinator) -> None:
        """Decide what this rank writes; keep the plan of the last save if no rank's tensors changed. Collective.

        Raises: StateEncodingError naming every tensor that cannot be stored; PeerError where another rank has one.
        """
        stale = self._plan is None or not self._is_as_planned(tensors)
        if any(coordinator.gather("plan/stale", stale)):
            with collector_held():
                self._make_plan(tensors, coordinator)

    def _is_as_planned(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Compare with what the plan was made from; quick, because every save does it."""
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
        faults = [fault for fqn, value in tensors.items() if (fault := _fault(fqn, value))]
        error = StateEncodingError("; ".join(faults)) if faults else None
        coordinator.barrier("plan/dtypes", error)
        division = divide(tensors, coordinator)
        shares = tuple(sorted(division.shares, key=lambda s: -s.info.dtype.itemsize))
        elsewhere = {}
        if coordinator.rank == 0:
            here = {share.fqn for share in shares}
            elsewhere = {fqn: info for fqn, info in division.tensors.items() if fqn not in here}
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
        self._file_name = self._file_name or rank_file_name(coordinator.rank)

    @property
    def replicas(self) -> Mapping[tuple[int, ...], tuple[str, ...]]:
        """Return the groups of ranks that hold the same values as this one, and of which tensors."""
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
        """Write the file from live memory, through one bounce buffer per worker; durable when it returns.

        Raises: OSError; the file is then incomplete and the attempt must be abandoned.
        """
        plan = self._planned
        segments = Segments(plan.places, _bind(plan, tensors))

        @contextmanager
        def pieces(start: int, stop: int) -> Iterator[memoryview]:
            with bounce_buffer() as bounce:
                segments.fill(start, stop, bounce)
                yield bounce.view[: round_up(stop - start)]

        return [self._record(write_rank_file(self._path(folder), plan.layout, pieces))]

    def allocate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the arena for these tensors ready, so that the first staged save is as quick as the later ones."""
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
        """Begin to copy the tensors into the arena, in the background; they must not change before handle.wait()."""
        self.allocate(tensors)
        assert self._arena is not None
        plan = self._planned
        return self._arena.stage(plan.places, _bind(plan, tensors))

    def staged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
        """Return what the arena holds of the planned tensors: every rank its own chunks of each, and no replica.

        Good to read once staging is finished, until the next one begins.
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
                info_of(value), partial(iter, blocks[fqn]), like=tuple(b.chunk for b in blocks[fqn]), in_memory=True
            )
            for fqn, value in tensors.items()
        }

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the arena."""
        self.begin_staging(tensors).finish()

    def write_staged(self, folder: Path) -> list[FileRecord]:
        """Write the file from the arena, whose staging is finished; durable when it returns. Raises: as `write`."""
        assert self._arena is not None, "begin_staging() comes first"
        layout, path = self._planned.layout, self._path(folder)
        if self._process is not None:
            return [self._record(self._process.write(path, layout, self._arena.beside_at))]
        staged = self._arena.buffer.view
        return [self._record(write_rank_file(path, layout, lambda a, b: nullcontext(staged[a : round_up(b)])))]

    def _path(self, folder: Path) -> Path:
        assert self._file_name is not None
        return folder / self._file_name

    def _record(self, digest: str) -> FileRecord:
        assert self._file_name is not None
        return FileRecord(self._file_name, self.num_bytes, digest)

    def close(self) -> None:
        """Give the arena back, and end the writer process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


def _bind(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Find the live memory of every planned entry."""
    bound = [tensors[name] for name in plan.names]
    if plan.sharded:
        bound = [_local(value) for value in bound]
    for i, index in plan.parts.items():
        bound[i] = bound[i][index]
    return bound


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory; `to_local()` would record an autograd node per tensor."""
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001


def _layout(value: torch.Tensor) -> tuple[Any, Any] | None:
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _fault(fqn: str, value: object) -> str | None:
    """Say why the tensor cannot be stored, if it cannot."""
    if not isinstance(value, torch.Tensor):
        return f"{fqn}: expected a tensor, found {type(value).__name__}"
    local = _local(value)
    if local.layout != torch.strided or local.is_meta or is_traceable_wrapper_subclass(local):
        kind = "meta" if local.is_meta else f"{type(local).__name__}, {local.layout}"
        return f"{fqn}: expected a plain tensor with memory of its own, found {kind}; unwrap or materialise it first"
    if local.dtype not in STORED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        return f"{fqn}: {local.dtype} cannot be stored; convert it before saving to one of {known}"
    return None
