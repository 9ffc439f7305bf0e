"""The division of a save among the ranks: replicas are divided so that ranks write about equal bytes and nothing twice.

Owns the division of a state dict over ranks. Knows no files and moves no values.

Every rank computes the division from the same facts, so ranks exchange only these: each rank's list of names, shapes
and layouts, or only its digest if ranks have equal lists, as they mostly do.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.geometry.chunks import Chunk, Entry, Shape, TensorInfo, describe, local_chunks

MIN_PART_BYTES = 1 << 20
"""Replicas divide a chunk into parts of at least this many bytes; one rank writes a smaller chunk alone."""

_PRIME = (1 << 61) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""An odd number without a pattern: 2**64 over the golden ratio."""

Index = tuple[slice, ...]

Share = Entry[Index | None]
"""A chunk that this rank writes, and its index in the local tensor; None selects all of it."""

Replicas = Mapping[tuple[int, ...], tuple[str, ...]]
"""Ranks that hold the same values, this rank included -> the names of these tensors."""


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that hold a tensor, and how. `meshes` are disjoint and of one shape; each has a whole copy."""

    info: TensorInfo
    mesh_shape: tuple[int, ...] | None
    placements: tuple[str, ...]
    ranks: tuple[int, ...]
    meshes: tuple[tuple[int, ...], ...]


def divide(
    tensors: Mapping[str, torch.Tensor], coordinator: Coordinator, buffers: Collection[str] = ()
) -> tuple[list[Share], dict[str, TensorInfo], Replicas]:
    """Divide the tensors of all ranks: return this rank's shares, every tensor by name, and the replicas. Collective.

    `buffers`: names of tensors whose replicas may differ. The lowest rank that holds a chunk of one writes it.

    1. Every rank lists its names and layouts and posts the list's digest. 2. The lowest rank of each distinct digest
    posts its list. 3. Every rank computes its own shares. 4. All check that the shares make up the tensors.
    Raises: StateEncodingError (on all ranks as PeerError) if ranks disagree about a tensor.
    """
    own_list = describe(tensors)
    lists = coordinator.gather_distinct("plan/lists", lambda: {"list": own_list})["list"]

    def sums() -> tuple[tuple[list[Share], dict[str, TensorInfo], Replicas], list[int]]:
        holders = _merge(lists)
        sharing = _Sharing(coordinator.rank, holders, buffers)
        shares = sharing.shares(tensors, own_list["kind_of"])
        replicas = {ranks: tuple(sorted(names)) for ranks, names in sharing.replicated.items()}
        infos = {fqn: h.info for fqn, h in holders.items()}
        return (shares, infos, replicas), tally(share[:3] for share in shares)

    division, of_ranks = coordinator.exchange("plan/tally", sums)
    actual = [sum(num_bytes for num_bytes, _ in of_ranks), sum(marks for _, marks in of_ranks) % _PRIME]
    expected = tally((fqn, info, Chunk.whole(info.shape)) for fqn, info in division[1].items())
    if actual[0] != expected[0]:
        raise StateEncodingError(
            f"the shards of all ranks hold {actual[0]} bytes, their tensors {expected[0]}: ranks list different "
            "shards. Every rank of a DTensor's mesh must list it"
        )
    if actual != expected:
        raise StateEncodingError(
            "the shards of all ranks overlap, and leave as much out: ranks of a mesh take themselves for one another. "
            "Make meshes and DTensors anew after a process group was"
        )
    return division


def tally(parts: Iterable[tuple[str, TensorInfo, Chunk]]) -> list[int]:
    """Return two sums over parts of tensors that must equal those over the whole tensors: bytes, and elements' marks.

    The mark of the element at (i, j, ...) of a tensor is w * x**i * y**j * ... modulo a prime, so what a box adds has a
    closed form, and parts that overlap or leave holes add up to the whole's sum by chance only (1 in 2**61 / elements).
    Source: polynomial identity testing (Schwartz 1980, Zippel 1979).
    """
    num_bytes = marks = 0
    for fqn, info, chunk in parts:
        num_bytes += chunk.numel * info.dtype.itemsize
        marks += (1 + zlib.crc32(fqn.encode())) * _mark(chunk.offsets, chunk.sizes)
    return [num_bytes, marks % _PRIME]


@functools.lru_cache(maxsize=4096)
def _mark(offsets: Shape, sizes: Shape) -> int:
    """Return what a box adds to the marks of a tensor without a name."""
    dims = enumerate(zip(offsets, sizes, strict=True), 1)
    powers = ((pow(dim * _GOLDEN, n, _PRIME) for n in (at, at + size)) for dim, (at, size) in dims)
    return math.prod(end - start for start, end in powers) % _PRIME


def _merge(lists: Mapping[tuple[int, ...], dict[str, Any]]) -> dict[str, _Holders]:
    """Return the holders of each tensor of the checkpoint. If layouts differ, that of the lowest rank counts.

    Tensors of one kind share one object, until a second list adds holders to one of them.
    Raises: StateEncodingError if ranks disagree about shape or dtype.
    """
    holders: dict[str, _Holders] = {}
    faults = []
    for ranks, listed in sorted(lists.items()):
        meshes = [(tuple(shape), tuple(members)) for shape, members in listed["meshes"]]
        kinds = [_holders_of_kind(row, meshes, ranks) for row in listed["kinds"]]
        if not holders:
            holders = {fqn: kinds[kind] for fqn, kind in zip(listed["names"], listed["kind_of"], strict=True)}
            continue
        for fqn, kind in zip(listed["names"], listed["kind_of"], strict=True):
            known, more = holders.get(fqn), kinds[kind]
            if known is None:
                holders[fqn] = more
            elif known.info != more.info:
                faults.append(f"{fqn}: rank {known.ranks[0]} has {known.info}, rank {ranks[0]} has {more.info}")
            elif known.mesh_shape == more.mesh_shape and known.placements == more.placements:
                others = tuple(mesh for mesh in more.meshes if mesh not in known.meshes)
                holders[fqn] = replace(known, ranks=known.ranks + more.ranks, meshes=known.meshes + others)
    if faults:
        raise StateEncodingError("ranks disagree about tensors of the same name: " + "; ".join(faults))
    return holders


def _holders_of_kind(
    row: Sequence[Any], meshes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], ranks: tuple[int, ...]
) -> _Holders:
    dtype, shape, mesh, placements = row
    mesh_shape, members = meshes[mesh] if mesh >= 0 else (None, ())
    return _Holders(TensorInfo(tuple(shape), getattr(torch, dtype)), mesh_shape, tuple(placements), ranks, (members,))


class _Sharing:
    """Computes one rank's shares. All replicas process a chunk in the same order with the same loads."""

    def __init__(self, rank: int, holders: Mapping[str, _Holders], buffers: Collection[str]) -> None:
        self._rank = rank
        self._buffers = buffers
        self._holders = holders
        self._loads: dict[tuple[int, ...], list[int]] = {}
        """Ranks that hold the same chunks -> the number of bytes that each was given so far."""
        self._at: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.replicated: dict[tuple[int, ...], list[str]] = {}

    def shares(self, tensors: Mapping[str, torch.Tensor], kind_of: Sequence[int]) -> list[Share]:
        """Return this rank's shares in the order of its state dict; `kind_of`: each tensor's kind, from `describe`."""
        shares: dict[str, list[Share]] = {}
        divided = []
        alone: dict[tuple[int, int], list[tuple[Chunk, Index | None]] | None] = {}
        for (fqn, value), kind in zip(tensors.items(), kind_of, strict=True):
            holders = self._holders[fqn]
            key = kind, id(holders)  # tensors of a kind mostly share their holders, and then also the result
            if key not in alone:
                alone[key] = self._alone(value, holders)
            if (chunks := alone[key]) is None:
                divided.append(fqn)
            shares[fqn] = [Entry(fqn, holders.info, chunk, index) for chunk, index in chunks or ()]
        for fqn in sorted(divided):
            shares[fqn] = list(self._shares_of(fqn, tensors[fqn]))
        return [share for of_tensor in shares.values() for share in of_tensor]

    def _alone(self, value: torch.Tensor, holders: _Holders) -> list[tuple[Chunk, Index | None]] | None:
        """Return the chunks that this rank holds of a tensor if no other rank holds them; else None."""
        if self._rank not in holders.ranks or not value.numel():
            return None
        chunks = _chunks_of(value)
        return chunks if not chunks or len(self._replicas_of(value, holders)) == 1 else None

    def _shares_of(self, fqn: str, value: torch.Tensor) -> Iterator[Share]:
        """Yield this rank's part of a tensor whose chunks several ranks hold."""
        holders = self._holders[fqn]
        if self._rank not in holders.ranks:
            return
        if not value.numel():
            if self._rank == min(holders.ranks):
                yield Entry(fqn, holders.info, Chunk.whole(value.shape), None)
            return
        replicas = self._replicas_of(value, holders)
        self.replicated.setdefault(replicas, []).append(fqn)
        for chunk, index in _chunks_of(value):
            nbytes = chunk.numel * value.dtype.itemsize
            dim = _dim_to_cut(chunk, min(len(replicas), nbytes // MIN_PART_BYTES))
            most_parts = 1 if fqn in self._buffers or not chunk.sizes else chunk.sizes[dim]
            writers = self._hand_out(replicas, nbytes, most_parts, to_first=fqn in self._buffers)
            if len(writers) > 1 and self._rank in writers:
                yield Entry(fqn, holders.info, *_part(chunk, index, dim, writers.index(self._rank), len(writers)))
            elif self._rank in writers:
                yield Entry(fqn, holders.info, chunk, index)

    def _hand_out(self, ranks: tuple[int, ...], nbytes: int, max_parts: int, *, to_first: bool) -> list[int]:
        """Return the ranks that write a chunk, one per equal part: the least loaded ones, lower ranks first.

        `to_first`: the lowest rank, as DDP takes its buffers for those of all.
        """
        loads = self._loads[ranks]
        count = max(1, min(len(ranks), nbytes // MIN_PART_BYTES, max_parts))
        chosen = [0] if to_first else sorted(range(len(ranks)), key=loads.__getitem__)[:count]
        for i in chosen:
            loads[i] += nbytes // count
        return [ranks[i] for i in chosen]

    def _replicas_of(self, value: torch.Tensor, holders: _Holders) -> tuple[int, ...]:
        """Return the ranks at this rank's coordinate along the sharded axes, in every mesh with a copy."""
        if not isinstance(value, DTensor):
            return self._sharing_out([holders.ranks])
        assert holders.mesh_shape is not None
        copied = tuple(isinstance(placement, Replicate) for placement in value.placements)
        key = (value.device_mesh, copied, *(holders.meshes if len(holders.meshes) > 1 else ()))
        if key not in self._at:
            coordinate = value.device_mesh.get_coordinate()
            assert coordinate is not None
            index = tuple(slice(None) if every else c for every, c in zip(copied, coordinate, strict=True))
            groups = [torch.tensor(ranks).view(holders.mesh_shape)[index].flatten() for ranks in holders.meshes]
            self._at[key] = self._sharing_out([tuple(ranks.tolist()) for ranks in groups])
        return self._at[key]

    def _sharing_out(self, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
        ranks = tuple(sorted(rank for group in groups for rank in group))
        self._loads.setdefault(ranks, [0] * len(ranks))
        return ranks


def _chunks_of(value: torch.Tensor) -> list[tuple[Chunk, Index | None]]:
    """Return the chunks that this rank holds of a tensor; the index is None if the chunk is all of the local tensor."""
    if not isinstance(value, DTensor):
        return [(Chunk.whole(value.shape), None)]
    held: list[tuple[Chunk, Index | None]] = [(chunk, index) for chunk, index in local_chunks(value) if chunk.numel]
    return held if len(held) > 1 else [(chunk, None) for chunk, _ in held]


def _dim_to_cut(chunk: Chunk, parts: int) -> int:
    """Return the first dim with an index for every part, so that parts stay runs of memory; else the longest dim."""
    for dim, size in enumerate(chunk.sizes):
        if size >= parts:
            return dim
    return max(range(len(chunk.sizes)), key=chunk.sizes.__getitem__, default=0)


def _part(chunk: Chunk, index: Index | None, dim: int, part: int, parts: int) -> tuple[Chunk, Index]:
    """Return one of `parts` equal parts of a chunk along a dim, with its index into the local tensor."""
    size = chunk.sizes[dim]
    a, b = part * size // parts, (part + 1) * size // parts
    offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + a, *chunk.offsets[dim + 1 :])
    sizes = (*chunk.sizes[:dim], b - a, *chunk.sizes[dim + 1 :])
    whole = index or tuple(slice(0, n) for n in chunk.sizes)
    start = whole[dim].start
    return Chunk(offsets, sizes), (*whole[:dim], slice(start + a, start + b), *whole[dim + 1 :])
