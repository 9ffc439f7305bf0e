"""Boxes of a row-major array as runs of its bytes. Pure geometry: no memory and no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

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


def overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that overlap, if any do.

    It looks along the dim that is cut most. If the cuts go through the whole tensor, as those of a mesh do, each column
    is searched by itself along the other dims; otherwise a sweep compares chunks that reach past each other.
    """
    if len(chunks) < 2:
        return None
    if len(chunks) == 2 or not chunks[0].sizes:
        first, second = chunks[:2]
        return None if first.intersect(second) is None else (first, second)
    dim = max(range(len(chunks[0].sizes)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    chunks = sorted(chunks, key=lambda c: c.offsets[dim])
    columns: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        columns.setdefault((chunk.offsets[dim], chunk.sizes[dim]), []).append(chunk)
    if len(columns) > 1 and all(start + size <= after for (start, size), (after, _) in pairwise(columns)):
        return next((pair for column in columns.values() if (pair := overlap(column))), None)
    reach: list[Chunk] = []
    for chunk in chunks:
        reach = [other for other in reach if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        for other in reach:
            if chunk.intersect(other) is not None:
                return other, chunk
        reach.append(chunk)
    return None
