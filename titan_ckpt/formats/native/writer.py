"""This rank's file of a checkpoint: its plan, which serves every save, and its writing from live memory or from a copy.

Owns which rank writes what, and where in the file. Names no folders and commits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.disk.kernel import round_up
from titan_ckpt.disk.workers import bounce_buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.sharing import Replicas, Share, divide
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.native.arena import Arena, StagingHandle
from titan_ckpt.formats.native.rank_file import STORED_DTYPES, in_file_order, lay_out, write_rank_file
from titan_ckpt.formats.native.segments import Places, Segments, lay_end_to_end
from titan_ckpt.formats.native.writer_process import WriterProcess
from titan_ckpt.formats.safetensors.container import Layout
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import (
    Block,
    LazyTensor,
    TensorInfo,
    dtype_name,
    info_of,
    local_tensor,
    sharding_of,
)
from titan_ckpt.stores.store import Place


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The file that this rank writes in every save of the same tensors. Entry i of the layout holds `shares[i]`."""

    shares: tuple[Share, ...]
    layout: Layout
    places: Places
    replicas: Replicas
    file_name: str
    _names: Sequence[str]
    """The tensors that the plan is for."""
    _kinds: Sequence[object]
    """Theirs, see `_kinds_of`."""
    _is_sharded: bool
    """Whether any is a DTensor."""
    _casts: Mapping[torch.dtype, torch.dtype]

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all shares in the file."""
        return self.layout.num_bytes - len(self.layout.header)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        coordinator: Coordinator,
        last: WritePlan | None = None,
        buffers: Collection[str] = (),
        casts: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
    ) -> WritePlan:
        """Decide what this rank writes: as by the plan `last`, if no rank's tensors have changed since. Collective.

        `buffers`: as in `divide`. `casts`: dtypes in memory -> those in the file; others are the same in both.

        Raises: StateEncodingError naming every tensor that cannot be stored; PeerError if another rank has one.
        """
        stale = coordinator.anywhere("plan/stale", lambda: last is None or not last.fits(tensors, casts))
        return cls._made(tensors, coordinator, buffers, casts) if stale or last is None else last

    @classmethod
    @gc_paused()
    def _made(
        cls,
        tensors: Mapping[str, torch.Tensor],
        coordinator: Coordinator,
        buffers: Collection[str],
        casts: Mapping[torch.dtype, torch.dtype],
    ) -> WritePlan:
        coordinator.together("plan/dtypes", lambda: _check(tensors))
        divided, infos, replicas = divide(tensors, coordinator, buffers)

        def stored(info: TensorInfo) -> TensorInfo:
            return TensorInfo(info.shape, casts[info.dtype]) if info.dtype in casts else info

        def planned() -> WritePlan:
            cast = [share._replace(info=stored(share.info)) for share in divided] if casts else divided
            shares = tuple(sorted(cast, key=lambda s: in_file_order(s.info, s.chunk)))
            elsewhere = {}
            if coordinator.rank == 0:
                own = {share.name for share in shares}
                elsewhere = {fqn: stored(info) for fqn, info in infos.items() if fqn not in own}
            chunks = [share[:3] for share in shares]
            return cls(
                shares,
                lay_out(chunks, coordinator.rank, coordinator.world_size, elsewhere),
                lay_end_to_end([(s.info.dtype, s.chunk.sizes) for s in shares]),
                replicas,
                rank_file_name(coordinator.rank),
                [*tensors],
                _kinds_of(tensors),
                any(isinstance(value, DTensor) for value in tensors.values()),
                casts,
            )

        return coordinator.together("plan/layout", planned)

    def fits(self, tensors: Mapping[str, torch.Tensor], casts: Mapping[torch.dtype, torch.dtype]) -> bool:
        """Return whether these are the planned tensors. Fast, because every save calls it."""
        return casts == self._casts and [*tensors] == self._names and _kinds_of(tensors) == self._kinds

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the live memory of all shares."""
        bound = [tensors[share.name] for share in self.shares]
        if self._is_sharded:
            bound = [local_tensor(value) for value in bound]
        return [v if s.at is None else v[s.at] for v, s in zip(bound, self.shares, strict=True)]

    def write(self, folder: Place, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
        """Write the file from live memory, through one bounce buffer per worker. The file is durable when this returns.

        Raises: OSError; the file is then incomplete and the attempt must be abandoned.
        """
        segments = Segments(self.places, self.bind(tensors))

        @contextmanager
        def pieces(start: int, stop: int) -> Iterator[memoryview]:
            with bounce_buffer() as bounce:
                segments.fill(start, stop, bounce)
                yield bounce.view[: round_up(stop - start)]

        return self.record(write_rank_file(folder / self.file_name, self.layout, pieces, views=segments.views))

    def record(self, digest: str) -> FileRecord:
        return FileRecord(self.file_name, self.layout.num_bytes, digest)


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


def _kinds_of(tensors: Mapping[str, torch.Tensor]) -> list[object]:
    """Return what plans compare: a DTensor's spec is most often the same object in every save."""
    values = tensors.values()
    return [v._spec if isinstance(v, DTensor) else (v.dtype, v.shape) for v in values]  # noqa: SLF001 - as local_tensor


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    if faults := [fault for fqn, value in tensors.items() if (fault := _fault(fqn, value))]:
        raise StateEncodingError("; ".join(faults))


def _fault(fqn: str, value: object) -> str | None:
    """Return why the tensor cannot be stored, or None if it can."""
    if not isinstance(value, torch.Tensor):
        return f"{fqn}: expected a tensor, found {type(value).__name__}"
    local = local_tensor(value)
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        return f"{fqn}: ranks have not reduced it yet, it is {[*value.placements]}; keep what its full_tensor() returns"
    if local.layout != torch.strided or local.is_meta or is_traceable_wrapper_subclass(local):
        kind = "meta" if local.is_meta else f"{type(local).__name__}, {local.layout}"
        return f"{fqn}: expected a plain tensor with memory of its own, found {kind}; unwrap or materialize it first"
    if local.dtype not in STORED_DTYPES:
        known = ", ".join(dtype_name(dtype) for dtype in STORED_DTYPES)
        return f"{fqn}: {local.dtype} cannot be stored; convert it before saving to one of {known}"
    return None
