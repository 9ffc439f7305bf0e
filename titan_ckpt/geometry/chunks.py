"""The place of a tensor's values: chunks of a global shape, blocks of local memory, lazy tensors.

Owns the geometry of sharded tensors. Knows no files and no process groups beyond a DTensor's own mesh.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, le, sub
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_ckpt.errors import ExportError

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Shape = tuple[int, ...]
At = TypeVar("At")
_BEYOND_FLOAT16 = 65520.0
"""The smallest number that float16 rounds to infinity."""


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
        """Return the box that both cover, in global coordinates, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes)))
        if any(map(le, ends, starts)):
            return None
        return Chunk(starts, tuple(map(sub, ends, starts)))

    def seen_from(self, origin: Shape) -> Chunk:
        """Return this box with offsets from a place, which may be inside of it."""
        return Chunk(tuple(map(sub, self.offsets, origin)), self.sizes)

    def within(self, outer: Chunk) -> tuple[slice, ...]:
        """Return the index of this box inside a block that holds `outer`."""
        return tuple(
            slice(o - base, o - base + n) for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Global shape and dtype of a tensor, in memory or in a file."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32; `getattr(torch, name)` is the way back."""
    return str(dtype).removeprefix("torch.")


class Entry(NamedTuple, Generic[At]):
    """A chunk of a tensor, and where its values are: from which byte of a file on, or by which index in memory."""

    name: str
    info: TensorInfo
    chunk: Chunk
    at: At


class Block(NamedTuple):  # made by the ten thousand, and a frozen dataclass takes twice as long to make
    """This rank's values of one chunk. `data.shape == chunk.sizes`; aliases the owner's memory where it can.

    With the `key` of a file tensor: memory that a load fills with its values, or an export writes there. `data` may
    then be any strided view; in row-major order its elements are those of the chunk. Values whose dtype is not the
    file's are cast; the planner has decided before whether they may be.
    """

    chunk: Chunk
    data: torch.Tensor
    key: str = ""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is computed when it is written: a merged weight, a cast, a dequantized source.

    `blocks()` runs on every rank, in the same order of tensors, so it may be collective when `collective` is set; it
    returns the chunks that this rank holds (replicas included). `like` is a tensor with the same chunks, which tells
    which ranks hold the same values, so that one of them writes; or it is this rank's chunks themselves, which no other
    rank holds. Without it every rank writes all that it holds.

    `freeze` returns the tensor with its present values, before its live sources change: `stage` maps each source to a
    stand-in. Every rank calls it, in the same order, and its result is not collective. Without it the tensor can only
    be written while nothing changes. `in_memory`: the blocks are views of memory, so they cost nothing and may be kept.
    `sharding`: the mesh over which the tensor is sharded, for blocks in memory.
    """

    info: TensorInfo
    blocks: Callable[[], Iterable[Block]]
    collective: bool = False
    like: torch.Tensor | tuple[Chunk, ...] | None = None
    freeze: Callable[[Stage], LazyTensor] | None = None
    in_memory: bool = False
    sharding: DTensorSpec | None = None


Stage = Callable[[torch.Tensor], torch.Tensor | LazyTensor]
"""Live tensor -> a tensor that keeps its values for as long as a background export needs them."""


def info_of(value: torch.Tensor | LazyTensor) -> TensorInfo:
    """Return the global shape and dtype."""
    return value.info if isinstance(value, LazyTensor) else TensorInfo(tuple(value.shape), value.dtype)


def sharding_of(value: torch.Tensor | LazyTensor) -> DTensorSpec | None:
    """Return the mesh over which a tensor is sharded; None if it is not, or its blocks are computed."""
    if isinstance(value, DTensor):
        return value._spec  # noqa: SLF001 - as local_chunks
    return value.sharding if isinstance(value, LazyTensor) else None


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as JSON: their names, and for each the index of its kind (dtype, shape, mesh, placements)."""
    meshes: dict[DeviceMesh, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of = []
    for value in tensors.values():
        layout = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
        kind_of.append(kinds.setdefault((value.dtype, value.shape, layout), len(kinds)))
    rows = []
    for dtype, shape, layout in kinds:
        mesh, placements = layout or (None, ())
        index = -1 if mesh is None else meshes.setdefault(mesh, len(meshes))
        rows.append([dtype_name(dtype), list(shape), index, [repr(p) for p in placements]])
    listed = [[list(m.mesh.shape), m.mesh.flatten().tolist()] for m in meshes]
    return {"meshes": listed, "kinds": rows, "names": list(tensors), "kind_of": kind_of}


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor. It is not `to_local()`, which records an autograd node and may copy."""
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001


def is_made_of_others(value: object) -> bool:
    """Return whether this rank's part of a tensor is made of other tensors."""
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):  # the usual case, and a hot path
        return False
    return is_traceable_wrapper_subclass(local_tensor(value))


def sharded_as(layout: DTensor, local: torch.Tensor, shape: Shape | None = None) -> DTensor:
    """Return a DTensor of these local values, placed as `layout` is. `shape`: of all values, if it is not the same."""
    size = layout.shape if shape is None else torch.Size(shape)
    stride = layout.stride() if shape is None else torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, layout.device_mesh, layout.placements, run_check=False, shape=size, stride=stride)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached from autograd; the same object if it already is, because DTensors detach slowly."""
    return value.detach() if value.requires_grad else value


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's values as a flat tensor of bytes, in row-major order; a view if they lie so in memory.

    A contiguous tensor may have any stride in a dim of size 1, such as a slice `p[::11]` of one element, and not every
    stride can be viewed as bytes.
    """
    flat = value.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are one run of bytes in host memory, in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def blocks_of(value: torch.Tensor | LazyTensor) -> Iterable[Block]:
    """Return the blocks of the tensor that this rank holds, replicas included; those of a live tensor are views.

    Iterate once and keep no block: a lazy tensor may compute each block on demand.
    """
    if isinstance(value, LazyTensor):
        return value.blocks()
    if not isinstance(value, DTensor):
        return [Block(Chunk.whole(value.shape), plain(value))]
    local = plain(value._local_tensor)  # noqa: SLF001 - a hot path, and detaching the DTensor takes 9 us
    chunks = local_chunks(value)
    if len(chunks) == 1 and (chunk := chunks[0][0]).sizes == local.shape:  # the usual case, and a hot path
        return [] if 0 in chunk.sizes else [Block(chunk, local)]
    return [Block(chunk, local[index]) for chunk, index in chunks if chunk.numel]


def run_through(blocks: Callable[[], Iterable[object]]) -> None:
    """Take part in the collectives that compute blocks, which this rank needs no more. Errors are passed over."""
    with contextlib.suppress(Exception):
        for _ in blocks():
            pass


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy this rank's part of the whole tensor `values`, of any dtype and device, into `target`."""
    whole = Chunk.whole(target.shape)
    with torch.no_grad():
        for block in blocks_of(target):
            block.data.copy_(values[block.chunk.within(whole)])


def computed(value: torch.Tensor | LazyTensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a lazy tensor in memory that is sharded like `like`. Collective if the lazy tensor is."""
    if isinstance(value, torch.Tensor):
        return value
    out = torch.empty_like(like, dtype=value.info.dtype, requires_grad=False)
    places = dict(local_chunks(out)) if isinstance(out, DTensor) else {Chunk.whole(out.shape): ()}
    for block in value.blocks():
        local_tensor(out)[places[block.chunk]] = block.data
    return out


def layout_of(value: torch.Tensor | LazyTensor) -> torch.Tensor | tuple[Chunk, ...] | None:
    """Return the `like` of a lazy tensor with the same chunks as this tensor."""
    return value.like if isinstance(value, LazyTensor) else value


def can_freeze(value: torch.Tensor | LazyTensor) -> bool:
    return not isinstance(value, LazyTensor) or value.freeze is not None


def frozen(value: torch.Tensor | LazyTensor, stage: Stage) -> torch.Tensor | LazyTensor:
    """Return the tensor with its present values (see LazyTensor). Collective if the tensor is."""
    if not isinstance(value, LazyTensor):
        return stage(value)
    assert value.freeze is not None, "can_freeze() comes first"
    return value.freeze(stage)


def cast(value: torch.Tensor | LazyTensor, dtype: torch.dtype, name: str) -> LazyTensor:
    """Return the tensor cast to `dtype`, block by block, when it is written; then values beyond its range are found."""

    def blocks() -> Iterator[Block]:
        for block in blocks_of(value):
            require_range(name, block.data, dtype)
            yield Block(block.chunk, block.data.to(dtype))

    return LazyTensor(
        TensorInfo(info_of(value).shape, dtype),
        blocks,
        collective=isinstance(value, LazyTensor) and value.collective,
        like=layout_of(value),
        freeze=(lambda stage: cast(frozen(value, stage), dtype, name)) if can_freeze(value) else None,
    )


def require_range(name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise an ExportError if a cast to float16, whose range is the smallest, would make finite values infinite."""
    if dtype is not torch.float16 or values.dtype is torch.float16 or not values.numel():
        return
    low, high = values.aminmax()
    largest = max(-float(low), float(high))
    if not math.isfinite(largest):
        largest = float(values.nan_to_num(0, 0, 0).abs().max())
    if largest >= _BEYOND_FLOAT16:
        raise ExportError(
            f"{name}: its largest value is {largest:g}, and float16 ends at 65504, so it would be stored as infinite: "
            "choose bfloat16 or float32"
        )


def local_chunks(value: DTensor) -> Sequence[tuple[Chunk, tuple[slice, ...]]]:
    """Return (global chunk, index into the local tensor) for each contiguous run of rows this rank holds."""
    spec = value._spec  # noqa: SLF001 - the properties of a DTensor look this up one by one
    coordinate = spec.mesh.get_coordinate()  # not cached: a process may later have a different rank in an equal mesh
    if coordinate is None:
        return ()
    return chunks_at(value.shape, spec.placements, spec.mesh.shape, tuple(coordinate))


def shard_sizes(value: DTensor) -> set[int]:
    """Return the numbers of elements that the ranks of the tensor's mesh hold."""
    shape, placements, mesh_shape = value.shape, value.placements, value.device_mesh.shape
    places = itertools.product(*map(range, mesh_shape))
    return {sum(c.numel for c, _ in chunks_at(shape, placements, mesh_shape, place)) for place in places}


@functools.lru_cache(maxsize=4096)
def chunks_at(
    shape: Shape, placements: tuple[Placement, ...], mesh_shape: Shape, coordinate: Shape
) -> tuple[tuple[Chunk, tuple[slice, ...]], ...]:
    """Return the chunks at one coordinate of a mesh.

    Every placement splits one dim of the part that earlier placements left, so each dim is a list of runs
    [start, stop) in global coordinates. _StridedShard cuts the list into `split_factor` pieces and takes its share of
    each; Shard does the same with one piece. One run per dim is the usual case.
    """
    runs: list[list[tuple[int, int]]] = [[(0, n)] for n in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise TypeError(f"cannot checkpoint a DTensor with placement {placement}: reduce it first")
        held = runs[placement.dim]
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        pieces = _split(0, sum(b - a for a, b in held), factor)
        shares = [_split(a, b, size)[index] for a, b in pieces]
        runs[placement.dim] = [run for a, b in shares for run in _take(held, a, b)]
    if not runs:
        return ((Chunk((), ()), ()),)
    return tuple(_product([joined(r) or [(0, 0)] for r in runs]))


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) like torch.chunk, padded with empty parts."""
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


def cut(start: int, stop: int, most: int, base: int = 0) -> Iterator[tuple[int, int]]:
    """Cut a run at places that are a multiple of `most` away from `base`."""
    while stop - start > most:
        end = start + most - (start - base) % most
        yield start, end
        start = end
    if stop > start:
        yield start, stop


def joined(runs: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Return runs [start, stop) in order, as one those with at most `gap` between them."""
    made: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if made and made[-1][1] + gap >= start:
            start, before = made.pop()
            stop = max(stop, before)
        made.append((start, stop))
    return made


def _product(runs: list[list[tuple[int, int]]]) -> Iterator[tuple[Chunk, tuple[slice, ...]]]:
    """Cross the runs of each dim; local coordinates count along each dim's list."""
    head, *rest = runs
    position = 0
    for a, b in head:
        for chunk, index in _product(rest) if rest else [(Chunk((), ()), ())]:
            local = slice(position, position + b - a)
            yield Chunk((a, *chunk.offsets), (b - a, *chunk.sizes)), (local, *index)
        position += b - a
