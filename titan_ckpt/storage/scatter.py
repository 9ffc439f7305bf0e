"""The way of a file's bytes into tensors: out of a buffer that holds some of them, to where each belongs.

Owns the scatter into memory of any strides, dtype and device. Reads no files and verifies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from titan_ckpt.storage.box import boxes_of_range, element_span
from titan_ckpt.storage.memory import Buffer, bytes_at, is_plain_memory, move_bytes
from titan_ckpt.tensors import Chunk, Shape

Window = tuple[int, int]
"""Bytes [start, stop) of the data section, cut between elements."""


class Rows(NamedTuple):
    """One run of bytes every `pitch` bytes of the file, put one after the other from `address` on."""

    address: int
    pitch: int
    run: int


class Transfer:
    """Fill `into` with a box of an array of `sizes` that is stored from byte `start` of the data section on.

    `into.shape` is the box's. `first` and `stop`: the bytes of the data section that the box spans. `address`: where
    they go as they are, if the box and its target are both one run of memory; else 0. `rows`: how they go where the box
    is a run of each row of the array, as of a shard of columns; else None.
    """

    __slots__ = ("address", "box", "dtype", "first", "fqn", "into", "rows", "sizes", "start", "stop")

    def __init__(
        self, fqn: str, start: int, sizes: Shape, dtype: torch.dtype, box: Chunk | None, into: torch.Tensor
    ) -> None:
        """`box`: in the stored array's own coordinates; None is all of it."""
        self.fqn, self.start, self.sizes, self.dtype, self.box, self.into = fqn, start, sizes, dtype, box, into
        itemsize = dtype.itemsize
        if box is None:
            self.first, self.stop = start, start + prod(sizes) * itemsize
            is_run = True
        else:
            low, high = element_span(sizes, box)
            self.first, self.stop = start + low * itemsize, start + high * itemsize
            is_run = high - low == box.numel
        address = into.data_ptr() if into.dtype is dtype and is_plain_memory(into) else 0
        self.address = address if is_run else 0
        self.rows = None
        if address and not is_run and box is not None and box.sizes[2:] == tuple(sizes[2:]):
            pitch = prod(sizes[1:]) * itemsize
            self.rows = Rows(address, pitch, pitch // sizes[1] * box.sizes[1])


def scatter(transfers: Sequence[Transfer], window: Window, bounce: Buffer) -> None:
    """Copy from the bounce buffer, which holds the window, into each target what the window has of it."""
    start, stop = window
    base = bounce.address - start
    for t in transfers:
        if t.rows is not None:
            _scatter_rows(t.first, t.stop, t.rows, window, bounce)
        elif not t.address:
            _scatter_box(t, window, bounce)
        elif t.first >= start and t.stop <= stop:
            move_bytes(t.address, base + t.first, t.stop - t.first)
        else:
            begin, end = max(start, t.first), min(stop, t.stop)
            move_bytes(t.address + begin - t.first, base + begin, end - begin)


def _scatter_rows(first: int, last: int, rows: Rows, window: Window, bounce: Buffer) -> None:
    """Copy what the window holds of one run a row: whole runs in one call, and what the window cuts off of two."""
    start, stop = window
    address, pitch, run = rows
    begin, end = max(start, first), min(stop, last)
    row, at = divmod(begin - first, pitch)
    if at:
        if at < run:
            move_bytes(address + row * run + at, bounce.address + begin - start, min(run - at, end - begin))
        row += 1
    cut, rest = divmod(end - first, pitch)
    count = cut - row + (rest >= run)
    if count > 0:
        source = np.ndarray((count, run), np.uint8, bounce.view, first + row * pitch - start, (pitch, 1))
        np.copyto(np.ndarray((count, run), np.uint8, bytes_at(address + row * run, count * run)), source)
    if 0 < rest < run and cut >= row:
        move_bytes(address + cut * run, bounce.address + first + cut * pitch - start, rest)


@torch.no_grad()
def _scatter_box(t: Transfer, window: Window, bounce: Buffer) -> None:
    """Copy, arranging and casting, what the window holds of a box; elements never straddle a window."""
    start, stop = window
    itemsize = t.dtype.itemsize
    low = (max(start, t.first) - t.start) // itemsize
    high = (min(stop, t.stop) - t.start) // itemsize
    wanted = t.box or Chunk.whole(t.sizes)
    for box in boxes_of_range(t.sizes, low, high):
        part = box.intersect(wanted)
        if part is None:
            continue
        at = t.start + element_span(t.sizes, box)[0] * itemsize - start
        source = bounce.tensor[at : at + box.numel * itemsize].view(t.dtype).view(box.sizes)
        t.into[part.within(wanted)].copy_(source[part.within(box)])
