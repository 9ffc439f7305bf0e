"""Where a tensor's values lie: chunks of a global shape, blocks of local memory, lazy tensors.

Owns the geometry of sharded tensors. Knows no files, no names and no process groups beyond a DTensor's own mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, le, sub
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """An axis-aligned box inside a global shape, in elements. A scalar's chunk has no dims and one element."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # tensors by the ten thousand share few shapes
    def whole(shape: Shape) -> Chunk:
        return Chunk((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Chunk) -> Chunk | None:
        """Return the box both cover, in global coordinates, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes)))
        if any(map(le, ends, starts)):
            return None
        return Chunk(starts, tuple(map(sub, ends, starts)))

    def within(self, outer: Chunk) -> tuple[slice, ...]:
        """Return the index of this box inside a block that holds `outer`."""
        return tuple(
            slice(o - base, o - base + n) for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Global shape and dtype of a tensor, wherever it is."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Block(NamedTuple):  # ten thousands of them are ordinary, and a frozen dataclass takes twice as long to make
    """This rank's values of one chunk. `data.shape == chunk.sizes`; aliases the owner's memory where it can."""

    chunk: Chunk
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is computed when it is written: a merged weight, a cast, a dequantised source.

    `blocks()` runs on every rank, in the same order of tensors, so it may be collective when `collective` is set;
    it returns the chunks that this rank holds (replicas included). `like` is a tensor whose chunks they are: it tells
    which ranks hold the same values, so that one writes them; or it is this rank's chunks themselves, which are no
    other rank's. Without it every rank writes what it holds.

    `freeze` returns the tensor as it is now, for its live sources are about to change: `stage` gives what stands for
    each of them. Every rank calls it, in the same order, and what it returns is not collective. Without it the tensor
    can only be written while nothing changes. `in_memory`: the blocks are views of memory, so that they cost nothing
    and may be kept.
    """

    info: TensorInfo
    blocks: Callable[[], Iterable[Block]]
    collective: bool = False
    like: torch.Tensor | tuple[Chunk, ...] | None = None
    freeze: Callable[[Stage], LazyTensor] | None = None
    in_memory: bool = False


Stage = Callable[[torch.Tensor], torch.Tensor | LazyTensor]
"""Live tensor -> what has its values for as long as a background export needs them."""


def info_of(value: torch.Tensor | LazyTensor) -> TensorInfo:
    """Return global shape and dtype; of a DTensor the global shape."""
    return value.info if isinstance(value, LazyTensor) else TensorInfo(tuple(value.shape), value.dtype)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor apart from autograd's graph; the same object where it is already, for DTensors detach slowly."""
    return value.detach() if value.requires_grad else value


def blocks_of(value: torch.Tensor | LazyTensor) -> Iterable[Block]:
    """Return the chunks of the tensor that this rank holds, replicas included; of a live one as views of its memory.

    To be walked once, keeping no block: a lazy tensor may make each when it is asked for.
    """
    if isinstance(value, LazyTensor):
        return value.blocks()
    if not isinstance(value, DTensor):
        return [Block(Chunk.whole(value.shape), plain(value))]
    local = plain(value._local_tensor)  # noqa: SLF001 - to_local() may copy, and to detach a DTensor takes 9 us
    chunks = local_chunks(value)
    if len(chunks) == 1 and (chunk := chunks[0][0]).sizes == local.shape:  # nearly all, and they come by the 10,000
        return [] if 0 in chunk.sizes else [Block(chunk, local)]
    return [Block(chunk, local[index]) for chunk, index in chunks if chunk.numel]


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy this rank's part of the whole `values`, whatever their dtype and device."""
    whole = Chunk.whole(target.shape)
    with torch.no_grad():
        for block in blocks_of(target):
            block.data.copy_(values[block.chunk.within(whole)])


def layout_of(value: torch.Tensor | LazyTensor) -> torch.Tensor | tuple[Chunk, ...] | None:
    """Return what a tensor that is held as this one is has for `like`."""
    return value.like if isinstance(value, LazyTensor) else value


def can_freeze(value: torch.Tensor | LazyTensor) -> bool:
    return not isinstance(value, LazyTensor) or value.freeze is not None


def frozen(value: torch.Tensor | LazyTensor, stage: Stage) -> torch.Tensor | LazyTensor:
    """Return the tensor as it is now; see LazyTensor. Collective where the tensor is."""
    if not isinstance(value, LazyTensor):
        return stage(value)
    assert value.freeze is not None, "can_freeze() comes first"
    return value.freeze(stage)


def cast(value: torch.Tensor | LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in another dtype, converted block by block when it is written."""
    return LazyTensor(
        TensorInfo(info_of(value).shape, dtype),
        lambda: (Block(block.chunk, block.data.to(dtype)) for block in blocks_of(value)),
        collective=isinstance(value, LazyTensor) and value.collective,
        like=layout_of(value),
        freeze=(lambda stage: cast(frozen(value, stage), dtype)) if can_freeze(value) else None,
    )


def local_chunks(value: DTensor) -> Sequence[tuple[Chunk, tuple[slice, ...]]]:
    """Return (global chunk, index into the local tensor) for each contiguous run of rows this rank holds."""
    spec = value._spec  # noqa: SLF001 - the properties of a DTensor look this up one by one
    coordinate = spec.mesh.get_coordinate()  # not to be kept: a process may be another rank of an equal mesh one day
    if coordinate is None:
        return ()
    return _chunks_at(value.shape, spec.placements, spec.mesh.shape, tuple(coordinate))


@functools.lru_cache(maxsize=4096)
def _chunks_at(
    shape: Shape, placements: tuple[Placement, ...], mesh_shape: Shape, coordinate: Shape
) -> tuple[tuple[Chunk, tuple[slice, ...]], ...]:
    """Work out the chunks at one place of a mesh.

    Every placement splits one dim of what the placements before it left, so each dim is a list of runs
    [start, stop) in global coordinates; Shard takes a prefix-balanced piece of the list, _StridedShard first cuts
    what is there in `split_factor` pieces and takes its share of each. One run per dim is the ordinary case.
    """
    runs: list[list[tuple[int, int]]] = [[(0, n)] for n in shape]
    for placement, size, here in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            total = sum(b - a for a, b in runs[placement.dim])
            pieces = _split(0, total, int(placement.split_factor))
            picked = [_split(a, b, size)[here] for a, b in pieces]
            runs[placement.dim] = [r for a, b in picked for r in _take(runs[placement.dim], a, b)]
        elif isinstance(placement, Shard):
            total = sum(b - a for a, b in runs[placement.dim])
            a, b = _split(0, total, size)[here]
            runs[placement.dim] = _take(runs[placement.dim], a, b)
        else:
            raise TypeError(f"cannot checkpoint a DTensor with placement {placement}: reduce it first")
    if not runs:
        return ((Chunk((), ()), ()),)
    return tuple(_product([_merge(r) for r in runs]))


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) like torch.chunk, padding with empty parts."""
    step = -(-(stop - start) // parts)
    return [(min(start + i * step, stop), min(start + (i + 1) * step, stop)) for i in range(parts)]


def _take(runs: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the part [start, stop) of a list of runs, counted along the list."""
    out, position = [], 0
    for a, b in runs:
        lo, hi = max(start, position), min(stop, position + b - a)
        if hi > lo:
            out.append((a + lo - position, a + hi - position))
        position += b - a
    return out


def _merge(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for a, b in runs:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out or [(0, 0)]


def _product(runs: list[list[tuple[int, int]]]) -> Iterator[tuple[Chunk, tuple[slice, ...]]]:
    """Cross the runs of each dim; local coordinates count along each dim's list."""
    head, *rest = runs
    position = 0
    for a, b in head:
        for chunk, index in _product(rest) if rest else [(Chunk((), ()), ())]:
            yield (
                Chunk((a, *chunk.offsets), (b - a, *chunk.sizes)),
                (slice(position, position + b - a), *index),
            )
        position += b - a
