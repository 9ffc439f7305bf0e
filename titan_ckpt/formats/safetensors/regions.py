"""Mappings of regions of a file tensor beside views of memory, in pieces of bounded size in row-major order.

Opens no files and decides nothing about names or dtypes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch

from titan_ckpt.disk.memory import round_up
from titan_ckpt.formats.safetensors.container import Entry
from titan_ckpt.geometry.boxes import element_span
from titan_ckpt.geometry.chunks import Chunk

_MAP_BYTES = 16 << 20
"""Bytes of a file that are mapped at a time."""

MapBytes = Callable[[int, int], memoryview]
"""(offset, num_bytes) -> mapping; the offset is a multiple of the allocation granularity."""


def mapped_boxes(
    entry: Entry, chunk: Chunk, memory: torch.Tensor, map_bytes: MapBytes
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs (strided view of the file, view of the memory) of equal shapes, which together make up the box.

    `memory` has the box's elements in row-major order; it is contiguous, or its shape splits the box's dims. A pair
    spans a bounded piece of the file, whose mapping lives as long as the view. Values at an offset that is not aligned
    to their dtype are yielded as a copy.
    """
    if memory.is_contiguous():
        memory = memory.view(chunk.sizes)
    shape, dtype = entry.info.shape, entry.info.dtype
    strides = torch.empty(shape, device="meta").stride()
    for part, view in _row_blocks(entry, chunk, memory):
        first, stop = element_span(shape, part)
        begin = entry.start + first * dtype.itemsize
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        mapping = map_bytes(begin - skipped, skipped + (stop - first) * dtype.itemsize)
        values = torch.frombuffer(mapping, dtype=torch.uint8)[skipped:]
        if begin % dtype.itemsize:
            values = values.clone()
        box = values.view(dtype).as_strided(part.sizes, strides)
        yield (box if box.shape == view.shape else box.view(view.shape)), view


def _row_blocks(entry: Entry, chunk: Chunk, memory: torch.Tensor) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Cut a box and its memory alike along dim 0."""
    if not memory.dim() or chunk.sizes[0] % memory.shape[0]:
        yield chunk, memory
        return
    row_bytes = entry.info.nbytes // entry.info.shape[0]
    ratio = chunk.sizes[0] // memory.shape[0]
    step = max(1, round_up(_MAP_BYTES // max(row_bytes, 1), ratio) // ratio)
    for start in range(0, memory.shape[0], step):
        part = memory[start : start + step]
        offsets = (chunk.offsets[0] + start * ratio, *chunk.offsets[1:])
        yield Chunk(offsets, (part.shape[0] * ratio, *chunk.sizes[1:])), part
