"""Dequantized tensors as expressions over stored ones: the stored regions that a box needs, and its values.

Owns the arithmetic, all of it in float32, and the encodings of small floats and packed integers, as tables [256, values
per byte] on the CPU. Knows no files and no format: a method's module builds the expression, open.py evaluates it.
Device and dtype are given everywhere: a builder of a model may import this module, under `torch.device("meta")`.
Source: OCP Microscaling Formats (MX) 1.0 (E2M1, E8M0); compressed-tensors, `pack_quantized/helpers.py` (offsets).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from titan_ckpt.geometry.boxes import element_span
from titan_ckpt.geometry.chunks import Chunk, Shape, TensorInfo

Load = Callable[[str, Chunk], torch.Tensor]
"""(key, box) -> the stored elements, in the dtype and shape that the leaf states. They must not be written to."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = torch.arange(256, device="cpu")


@functools.cache
def floats(dtype: torch.dtype) -> torch.Tensor:
    """Return the value of each byte as a float8 or int8 number."""
    return _BYTES.to(torch.uint8).view(dtype).float().view(256, 1)


def nibbles(values: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Return both values of each byte, given the values [16] of a nibble. The low nibble comes first by default."""
    low, high = values.float()[_BYTES & 15], values.float()[_BYTES >> 4]
    return torch.stack((high, low) if high_first else (low, high), dim=1).contiguous()


EXPONENTS = torch.ldexp(torch.ones_like(_BYTES, dtype=torch.float32), _BYTES - 127).view(256, 1)
"""2 ** (byte - 127): E8M0 scales that are stored as plain bytes. 255, which means NaN, gives 2 ** 128."""
E2M1_PAIRS = nibbles(torch.tensor(_E2M1, device="cpu"))
"""Two FP4 values per byte, the low nibble first."""
INT4_PAIRS = nibbles(torch.tensor([*range(8), *range(-8, 0)], device="cpu"))
"""Two two's complement integers per byte, the low nibble first."""


@functools.cache
def offset_integers(num_bits: int) -> torch.Tensor:
    """Return integers that are stored with half their range added: two per byte for 4 bits, one for 8."""
    if num_bits == 4:
        return nibbles(_BYTES[:16] - 8)
    return (_BYTES - 128).float().view(256, 1)


class Values(ABC):
    """A float32 tensor that is computed box by box."""

    shape: Shape

    @property
    def order(self) -> tuple[int, ...]:
        """Return the dims from the slowest to the fastest in the file: boxes cut in this order read runs of bytes."""
        return tuple(range(len(self.shape)))

    @abstractmethod
    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        """Yield the regions of stored tensors from which the box is computed."""

    @abstractmethod
    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        """Compute the box. The caller may write to the result, which has any strides."""

    def leaves(self) -> Iterator[Leaf]:
        """Yield the stored tensors."""
        return (leaf for leaf, _ in self.needs(Chunk.whole(self.shape)))


@dataclass(frozen=True, eq=False)
class Leaf(Values):
    """A tensor of the file. `stored`: the view of its bytes, which may differ from the file's description."""

    key: str
    stored: TensorInfo


@dataclass(frozen=True, eq=False)
class Numbers(Leaf):
    """Stored numbers that are the values themselves: floats, integers, powers of two."""

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.stored.shape

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield self, box

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        return load(self.key, box).to(torch.float32, copy=True)


@dataclass(frozen=True, eq=False)
class Codes(Leaf):
    """Stored bytes, each with one value or with two along the last dim. The file may pad the last dim.

    `table` [256, 1 or 2] float32: the values of each byte. A lookup is also the fastest way from float8 to float32.
    """

    shape: Shape
    table: torch.Tensor

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield self, self._bytes(box)

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        codes = load(self.key, self._bytes(box)).reshape(-1).long()
        if self.table.shape[1] == 1:
            return self.table.view(256).index_select(0, codes).view(box.sizes)
        # a pair of values is moved as one integer
        pairs = self.table.view(torch.int64).view(256).index_select(0, codes).view(torch.float32)
        first = box.offsets[-1] % 2
        return pairs.view(*box.sizes[:-1], -1)[..., first : first + box.sizes[-1]]

    def _bytes(self, box: Chunk) -> Chunk:
        if self.table.shape[1] == 1:
            return box
        first, stop = box.offsets[-1] // 2, -(-(box.offsets[-1] + box.sizes[-1]) // 2)
        return Chunk((*box.offsets[:-1], first), (*box.sizes[:-1], stop - first))


@dataclass(frozen=True, eq=False)
class Constant(Values):
    """The same value everywhere."""

    shape: Shape
    value: float

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from ()

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        return torch.full(box.sizes, self.value, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class _Computed(Values):
    """Values that are computed element by element from others."""

    values: Values

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.values.shape

    @property
    def order(self) -> tuple[int, ...]:
        return self.values.order


@dataclass(frozen=True, eq=False)
class Scaled(_Computed):
    """(values - zero) * scale + offset, where each block of the tensor has its own scale, zero and offset.

    `block`: size of a block along each dim. The last block of a dim may be cut off by the tensor's end.
    """

    scale: Values
    block: Shape
    zero: Values | None = None
    offset: Values | None = None

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from self.values.needs(box)
        blocks = self._blocks(box)
        for part in (self.scale, self.zero, self.offset):
            if part is not None:
                yield from part.needs(blocks)

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        out = self.values.read(box, load)
        blocks = self._blocks(box)
        spread = _Spread(box, blocks, self.block)
        view = out.view(spread.shape)
        if self.zero is not None:
            view.sub_(spread(self.zero.read(blocks, load)))
        view.mul_(spread(self.scale.read(blocks, load)))
        if self.offset is not None:
            view.add_(spread(self.offset.read(blocks, load)))
        return out

    def _blocks(self, box: Chunk) -> Chunk:
        first = tuple(o // b for o, b in zip(box.offsets, self.block, strict=True))
        stop = (-(-(o + n) // b) for o, n, b in zip(box.offsets, box.sizes, self.block, strict=True))
        return Chunk(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


class _Spread:
    """Spreads one value per block over the elements of a box; by broadcasting if the box has whole blocks."""

    def __init__(self, box: Chunk, blocks: Chunk, block: Shape) -> None:
        self.shape: list[int] = []
        """The box's shape with each dim of several whole blocks split in two."""
        self._blocks_shape: list[int] = []
        self._picks: list[tuple[int, torch.Tensor]] = []
        dims = zip(box.offsets, box.sizes, blocks.offsets, blocks.sizes, block, strict=True)
        for dim, (offset, size, first, count, length) in enumerate(dims):
            if count in (1, size):
                self.shape.append(size)
                self._blocks_shape.append(count)
            elif offset % length == 0 and size % length == 0:
                self.shape += [count, length]
                self._blocks_shape += [count, 1]
            else:
                self.shape.append(size)
                self._blocks_shape.append(size)
                self._picks.append((dim, torch.arange(offset, offset + size) // length - first))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        for dim, index in self._picks:
            values = values.index_select(dim, index)
        return values.reshape(self._blocks_shape)


@dataclass(frozen=True, eq=False)
class Quotient(_Computed):
    """Values divided by one number. `divisor` has as many dims, each of size 1."""

    divisor: Values

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from self.values.needs(box)
        yield from self.divisor.needs(Chunk.whole(self.divisor.shape))

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        return self.values.read(box, load).div_(self.divisor.read(Chunk.whole(self.divisor.shape), load))


@dataclass(frozen=True, eq=False)
class Transposed(Values):
    """Values with permuted dims: dim i is dim `dims[i]` of the values."""

    values: Values
    dims: tuple[int, ...]

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return tuple(self.values.shape[dim] for dim in self.dims)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(self.dims.index(dim) for dim in self.values.order)

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from self.values.needs(self._inner(box))

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        return self.values.read(self._inner(box), load).permute(self.dims)

    def _inner(self, box: Chunk) -> Chunk:
        places = [self.dims.index(dim) for dim in range(len(self.dims))]
        return Chunk(tuple(box.offsets[i] for i in places), tuple(box.sizes[i] for i in places))


@dataclass(frozen=True, eq=False)
class Joined(Values):
    """Values with runs of adjacent dims joined, cut to a shape. Interleaved and padded layouts become a matrix so.

    `runs[i]`: number of dims of the values that make up dim i.
    """

    values: Values
    runs: tuple[int, ...]
    shape: Shape

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from self.values.needs(self._inner(box)[0])

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        inner, skipped = self._inner(box)
        out = self.values.read(inner, load)
        merged, dim = [], 0
        for run in self.runs:
            merged.append(prod(out.shape[dim : dim + run]))
            dim += run
        return out.reshape(merged)[tuple(slice(s, s + n) for s, n in zip(skipped, box.sizes, strict=True))]

    def _inner(self, box: Chunk) -> tuple[Chunk, list[int]]:
        """Return the box of the values that covers this box, and the offsets of this box in it."""
        offsets: list[int] = []
        sizes: list[int] = []
        skipped: list[int] = []
        for run, start, count in zip(self.runs, box.offsets, box.sizes, strict=True):
            rest = self.values.shape[len(sizes) + 1 : len(sizes) + run]
            row = prod(rest)
            first = start // row
            offsets += [first, *(0 for _ in rest)]
            sizes += [-(-(start + count) // row) - first, *rest]
            skipped.append(start - first * row)
        return Chunk(tuple(offsets), tuple(sizes)), skipped


@dataclass(frozen=True, eq=False)
class Unflattened(Values):
    """Values of one dim reshaped to several, in row-major order. A box reads from its first element to its last."""

    values: Values
    shape: Shape

    def needs(self, box: Chunk) -> Iterator[tuple[Leaf, Chunk]]:
        yield from self.values.needs(self._span(box))

    def read(self, box: Chunk, load: Load) -> torch.Tensor:
        strides = torch.empty(self.shape, device="meta").stride()
        return self.values.read(self._span(box), load).contiguous().as_strided(box.sizes, strides)

    def _span(self, box: Chunk) -> Chunk:
        first, stop = element_span(self.shape, box)
        return Chunk((first,), (stop - first,))
