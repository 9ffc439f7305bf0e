"""Boxes of a row-major array as runs of its bytes. Pure geometry: no memory and no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import add

from titan_ckpt.geometry.chunks import Chunk, Shape


def element_span(sizes: Shape, box: Chunk) -> tuple[int, int]:
    """Return the first element of the box and the one after its last, in row-major order of the array `sizes`."""
    first = last = 0
    for size, offset, count in zip(sizes, box.offsets, box.sizes, strict=True):
        first = first * size + offset
        last = last * size + offset + count - 1
    return first, last + 1


def is_run(sizes: Shape, box: Chunk) -> bool:
    """Return whether the box is one run of elements."""
    first, stop = element_span(sizes, box)
    return stop - first == box.numel


def spans(sizes: Shape, box: Chunk, max_gap: int) -> Iterator[tuple[int, int]]:
    """Yield runs of elements, in order, that cover the box and skip gaps of more than `max_gap` elements."""
    cut = 0  # dims before this one are iterated row by row
    for dim in range(len(sizes)):
        first, stop = element_span(sizes[dim + 1 :], Chunk(box.offsets[dim + 1 :], box.sizes[dim + 1 :]))
        if box.sizes[dim] > 1 and prod(sizes[dim + 1 :]) - (stop - first) > max_gap:
            cut = dim + 1
    first, stop = element_span(sizes[cut:], Chunk(box.offsets[cut:], box.sizes[cut:]))
    stride = prod(sizes[cut:])
    for rows in product(*(range(o, o + n) for o, n in zip(box.offsets[:cut], box.sizes[:cut], strict=True))):
        row = 0
        for size, index in zip(sizes, rows, strict=False):
            row = row * size + index
        yield row * stride + first, row * stride + stop


def boxes_of_range(sizes: Shape, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the boxes, in order, that make up elements [start, stop) of a row-major array."""
    if start >= stop:
        return
    if not sizes:
        yield Chunk((), ())
        return
    stride = prod(sizes[1:])
    first, last = -(-start // stride), stop // stride
    whole = Chunk.whole(sizes[1:])
    if first > last:  # within one row
        yield from _in_row(last, sizes, start - last * stride, stop - last * stride)
        return
    if start < first * stride:
        yield from _in_row(first - 1, sizes, start - (first - 1) * stride, stride)
    if first < last:
        yield Chunk((first, *whole.offsets), (last - first, *whole.sizes))
    if last * stride < stop:
        yield from _in_row(last, sizes, 0, stop - last * stride)


def _in_row(row: int, sizes: Shape, start: int, stop: int) -> Iterator[Chunk]:
    for box in boxes_of_range(sizes[1:], start, stop):
        yield Chunk((row, *box.offsets), (1, *box.sizes))


def hull(chunks: Sequence[Chunk]) -> Chunk:
    """Return the smallest box that holds all of these."""
    starts = [min(offsets) for offsets in zip(*(chunk.offsets for chunk in chunks), strict=True)]
    ends = zip(*(map(add, chunk.offsets, chunk.sizes) for chunk in chunks), strict=True)
    return Chunk(tuple(starts), tuple(max(end) - start for start, end in zip(starts, ends, strict=True)))


def boxes(chunk: Chunk, max_elements: int) -> Iterator[Chunk]:
    """Cut a box into boxes of at most `max_elements`, in row-major order of its elements."""
    dim, row = 0, chunk.numel
    while row > max_elements:
        row //= chunk.sizes[dim]
        dim += 1
    if dim == 0:
        yield chunk
        return
    dim -= 1  # the first dim along which a row fits
    step = max_elements // row
    offsets, sizes = chunk.offsets, chunk.sizes
    for fixed in product(*(range(o, o + n) for o, n in zip(offsets[:dim], sizes[:dim], strict=True))):
        for start in range(0, sizes[dim], step):
            place = (*fixed, offsets[dim] + start, *offsets[dim + 1 :])
            yield Chunk(place, (*(1 for _ in fixed), min(step, sizes[dim] - start), *sizes[dim + 1 :]))


def overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that overlap, if any do.

    Chunks on two sides of a cut through all of them are not compared, and each side is cut further. Where no cut is
    left, a sweep compares the chunks that reach past each other along one dim.
    """
    pending = [[chunk for chunk in chunks if chunk.numel]]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        dims = sorted(range(len(group[0].sizes)), key=lambda d: -len({chunk.offsets[d] for chunk in group}))
        sides = next((sides for dim in dims if len(sides := _sides(group, dim)) > 1), None)
        if sides is not None:
            pending += sides
        elif pair := _swept(group, dims):
            return pair
    return None


def _sides(chunks: Sequence[Chunk], dim: int) -> list[list[Chunk]]:
    """Return the chunks between every two neighbouring cuts that go through all of them across a dim."""
    sides: list[list[Chunk]] = []
    reach = None
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        if reach is None or chunk.offsets[dim] >= reach:
            sides.append([])
        sides[-1].append(chunk)
        reach = max(reach or 0, chunk.offsets[dim] + chunk.sizes[dim])
    return sides


def _swept(chunks: Sequence[Chunk], dims: Sequence[int]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that overlap, by a sweep along the first of the dims."""
    if not dims:
        return chunks[0], chunks[1]
    dim, reach = dims[0], list[Chunk]()
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        reach = [other for other in reach if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        for other in reach:
            if chunk.intersect(other) is not None:
                return other, chunk
        reach.append(chunk)
    return None
