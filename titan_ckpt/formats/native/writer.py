"""This rank's file of a checkpoint: its plan, which serves every save, and its bytes, gathered from live tensors.

Owns which rank writes what, and where in the file; the gather from many tensors, contiguous or not, on host or device;
and the writing from live memory (arena.py writes from a copy). Names no folders and commits nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from math import prod
from operator import itemgetter
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.disk import cuda
from titan_ckpt.disk.kernel import Buffer, move_bytes, round_up
from titan_ckpt.disk.workers import bounce_buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.sharing import Replicas, Share, divide
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.native.rank_file import STORED_DTYPES, in_file_order, lay_out
from titan_ckpt.formats.native.sealed_file import write_rank_file
from titan_ckpt.formats.safetensors.container import Layout
from titan_ckpt.geometry.boxes import boxes_of_range
from titan_ckpt.geometry.chunks import (
    Chunk,
    TensorInfo,
    as_bytes,
    dtype_name,
    is_made_of_others,
    is_plain_memory,
    local_tensor,
)
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place

_PACKED_BYTES = 256 << 10
"""Device tensors smaller than this are packed before they are copied to the host."""
_PACK_BYTES = 16 << 20
"""Most device memory that one pack takes."""

_MIN_PACK = 4
"""At least so many small neighbours of one dtype and shape are copied in one call."""
_LARGEST_IN_PACK = 64 << 10
"""Bytes. Tensors of this size and more are copied one by one: the overhead of a call is then small."""
_LEAST_VIEWED = 256 << 10
"""Tensors are sent to a bucket from their own memory if they are so large on average; smaller ones are copied."""
_PACKABLE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip
"""Dtypes that torch.stack copies bit for bit."""

Places = tuple[list[int], list[int], list[torch.dtype], list[tuple[int, int]]]
"""Tensors that are laid end to end: the first holds the first byte of each, the next two its bytes and its dtype. The
last has [first, last) of small neighbours of one dtype and shape, which can be copied in one call. All are kept between
saves."""


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
    if local.layout != torch.strided or local.is_meta or is_made_of_others(local):
        kind = "meta" if local.is_meta else f"{type(local).__name__}, {local.layout}"
        return f"{fqn}: expected a plain tensor with memory of its own, found {kind}; unwrap or materialize it first"
    if local.dtype not in STORED_DTYPES:
        known = ", ".join(dtype_name(dtype) for dtype in STORED_DTYPES)
        return f"{fqn}: {local.dtype} cannot be stored; convert it before saving to one of {known}"
    return None


def lay_end_to_end(kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> Places:
    """Return the places of tensors of these (dtype, shape)."""
    sizes = [dtype.itemsize * prod(shape) for dtype, shape in kinds]
    packs, first = [], 0
    for (dtype, _), group in groupby(kinds):
        last = first + sum(1 for _ in group)
        if last - first >= _MIN_PACK and dtype in _PACKABLE and 0 < sizes[first] < _LARGEST_IN_PACK:
            packs.append((first, last))
        first = last
    return [*accumulate(sizes, initial=0)][:-1], sizes, [dtype for dtype, _ in kinds], packs


class Segments:
    """Tensors laid end to end. Keeps them alive. Those of another dtype than their place's are cast piece by piece.

    Holds addresses, which are valid until the tensors' memory is moved or freed: make it anew for every save.
    """

    def __init__(self, places: Places, tensors: Sequence[torch.Tensor]) -> None:
        self._starts, self._sizes, self._dtypes, packs = places
        self._tensors = tensors
        on_host = [tensor.is_cpu for tensor in tensors]
        plain, dtypes = on_host, [tensor.dtype for tensor in tensors]
        if dtypes != self._dtypes:
            plain = [here and own is other for here, own, other in zip(on_host, dtypes, self._dtypes, strict=True)]
        self._elsewhere = [i for i, here in enumerate(on_host) if not here]
        self.devices = list({tensors[i].device: None for i in self._elsewhere if tensors[i].is_cuda})
        """CUDA devices, which copy while this thread goes on. Copies from other devices are waited for one by one."""
        if len(self.devices) > 1:  # worker threads take over the stream of the current device alone
            cuda.settle(self.devices)
        self._packs = [pack for pack in packs if all(plain[slice(*pack)])]
        self._addresses = [0] * len(tensors)
        alone, position = [], 0
        for first, last in (*self._packs, (len(tensors), 0)):
            alone.append(range(position, first))
            position = last
        for i in chain.from_iterable(alone):
            if plain[i] and is_plain_memory(tensors[i]):
                self._addresses[i] = tensors[i].data_ptr()

    def fill(self, start: int, stop: int, target: Buffer, at: int = 0) -> None:
        """Copy bytes [start, stop) of the run to byte `at` of the target. Several threads may fill different parts."""
        self.enqueue(start, stop, target, at)
        if self.devices:
            cuda.settle(self.devices)

    def enqueue(self, start: int, stop: int, target: Buffer, at: int = 0) -> None:
        """Do the same, without waiting for devices: they copy on the current streams, into page-locked memory."""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop)
        for a, b in self._packs[bisect_left(self._packs, first, key=itemgetter(1)) :]:
            if a >= last:
                break
            self._fill_each(first, a, start, stop, target, at)
            first = self._fill_pack(max(a, first), min(b, last), start, stop, target, at)
        self._fill_each(first, last, start, stop, target, at)
        if self._elsewhere:
            self._enqueue_each(start, stop, target, at)

    @torch.no_grad()
    def _fill_pack(self, first: int, last: int, start: int, stop: int, target: Buffer, at: int) -> int:
        """Copy the tensors of a pack that lie within the range in one call, the others one by one; return `last`."""
        begin = first if self._starts[first] >= start else first + 1
        end = last if self._end(last - 1) <= stop else last - 1
        if end > begin:
            tensors = list(self._tensors[begin:end])
            out = target.tensor[at + self._starts[begin] - start : at + self._end(end - 1) - start]
            torch.stack(tensors, out=out.view(tensors[0].dtype).view(end - begin, *tensors[0].shape))
        self._fill_each(first, begin, start, stop, target, at)
        self._fill_each(max(begin, end), last, start, stop, target, at)
        return last

    def views(self, start: int, stop: int) -> list[memoryview] | None:
        """Return the tensors' own memory of bytes [start, stop), or None if not all of it is host memory in few runs.

        The views keep the tensors' memory alive.
        """
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop)
        if (last - first) * _LEAST_VIEWED > stop - start + 2 * _LEAST_VIEWED:
            return None
        views = []
        for i in range(first, last):
            low, tensor = self._starts[i], self._tensors[i]
            begin, end = max(start, low), min(stop, low + self._sizes[i])
            if begin >= end:
                continue
            if tensor.dtype is not self._dtypes[i] or not is_plain_memory(tensor):
                return None
            views.append(as_bytes(tensor).numpy()[begin - low : end - low].data)
        return views

    def _fill_each(self, first: int, last: int, start: int, stop: int, target: Buffer, at: int) -> None:
        starts, sizes, addresses = self._starts, self._sizes, self._addresses
        base = target.address + at - start
        for i in range(first, last):
            low, address = starts[i], addresses[i]
            if address and low >= start and low + sizes[i] <= stop:
                move_bytes(base + low, address, sizes[i])
                continue
            high = min(stop, low + sizes[i])
            begin = max(start, low)
            if high <= begin:
                continue
            if address:
                move_bytes(base + begin, address + begin - low, high - begin)
            elif self._tensors[i].is_cpu:
                self._copy_part(i, begin, high, target.tensor[at + begin - start : at + high - start])

    @torch.no_grad()
    def _enqueue_each(self, start: int, stop: int, target: Buffer, at: int) -> None:
        """Copy the device tensors' bytes of the range.

        Small neighbours are packed on the device first: separate copies would take longer than moving all the bytes.
        """
        packed: list[int] = []
        run = self._elsewhere
        for i in run[bisect_right(run, start, key=self._end) : bisect_left(run, stop, key=self._starts.__getitem__)]:
            low, size = self._starts[i], self._sizes[i]
            begin, end = max(start, low), min(stop, low + size)
            if not size:
                continue
            small = end - begin == size < _PACKED_BYTES
            if packed and not (small and low == self._end(packed[-1]) and self._fits(packed, i)):
                self._enqueue_packed(packed, target, at - start)
                packed = []
            if small:
                packed.append(i)
            else:
                self._copy_part(i, begin, end, target.tensor[at + begin - start : at + end - start])
        if packed:
            self._enqueue_packed(packed, target, at - start)

    def _copy_part(self, i: int, begin: int, end: int, out: torch.Tensor) -> None:
        """Copy bytes [begin, end) of the run, a part of tensor i, to `out`."""
        low, dtype = self._starts[i], self._dtypes[i]
        first, last = (begin - low) // dtype.itemsize, (end - low) // dtype.itemsize
        _copy_range(self._tensors[i].detach(), first, last, out.view(dtype))

    def _end(self, i: int) -> int:
        return self._starts[i] + self._sizes[i]

    def _fits(self, packed: list[int], i: int) -> bool:
        same_device = self._tensors[packed[0]].device == self._tensors[i].device
        return same_device and self._end(i) - self._starts[packed[0]] <= _PACK_BYTES

    def _enqueue_packed(self, packed: list[int], target: Buffer, shift: int) -> None:
        whole = (self._tensors[i].detach().resolve_conj().resolve_neg().to(self._dtypes[i]) for i in packed)
        block = torch.cat([as_bytes(tensor) for tensor in whole])
        target.tensor[shift + self._starts[packed[0]] : shift + self._end(packed[-1])].copy_(
            block, non_blocking=block.is_cuda
        )


def _copy_range(source: torch.Tensor, start: int, stop: int, flat: torch.Tensor) -> None:
    """Copy elements [start, stop) of a tensor, counted in row-major order, into `flat`.

    Works for any strides and device, without a contiguous copy of the source.
    """
    if source.is_contiguous():
        _copy(source.reshape(-1)[start:stop], flat)
        return
    whole, done = Chunk.whole(source.shape), 0
    for box in boxes_of_range(whole.sizes, start, stop):
        _copy(source[box.within(whole)], flat[done : done + box.numel].view(box.sizes))
        done += box.numel


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy values into host memory of their shape and its dtype; from a CUDA device without waiting.

    Conjugation, negation and casts are made on the device: torch would make them here, before the values have come.
    """
    if source.is_cuda:
        out.copy_(source.resolve_conj().resolve_neg().to(out.dtype), non_blocking=True)
    else:
        out.copy_(source)
