"""Copying bytes of a file from a bounce buffer to the tensors they belong to.

Owns the scatter into memory of any strides, dtype and device. Reads no files and verifies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from titan_ckpt.disk.cuda import upload
from titan_ckpt.disk.memory import Buffer, bytes_at, is_plain_memory, move_bytes
from titan_ckpt.geometry.boxes import boxes_of_range, element_span
from titan_ckpt.geometry.chunks import Chunk, Shape

Window = tuple[int, int]
"""Bytes [start, stop) of the data section, cut between elements."""


class Rows(NamedTuple):
    """Runs of `run` bytes, one every `pitch` bytes of the file, which go one after the other to `address`."""

    address: int
    pitch: int
    run: int


class Transfer:
    """A box of a stored array, and the tensor `into` that it fills, which has the shape of the box.

    `start`: first byte of the array in the data section. `first` and `stop`: the bytes of the data section that the box
    spans. `address`: the target's address if the box and the target are both one run of memory; else 0. `rows`: the
    target's rows if the box takes a run of each row of the array, as a shard of columns does; else None.
    """

    __slots__ = ("_memory", "address", "box", "dtype", "first", "fqn", "into", "rows", "sizes", "start", "stop")

    def __init__(
        self, fqn: str, start: int, sizes: Shape, dtype: torch.dtype, box: Chunk | None, into: torch.Tensor
    ) -> None:
        """`sizes`: shape of the stored array. `box`: in the array's coordinates; None is the whole array."""
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
        self._memory: memoryview | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """Return the target's memory for bytes [start, stop) of the data section. The target has an `address`."""
        if self._memory is None:  # made once, because a view of raw memory costs more than a slice of one
            self._memory = bytes_at(self.address, self.stop - self.first)
        return self._memory[start - self.first : stop - self.first]


def scatter(transfers: Sequence[Transfer], window: Window, bounce: Buffer) -> None:
    """Copy to each target its part of the window, which the bounce buffer holds."""
    start, stop = window
    base = bounce.address - start
    copies = {torch.device("cpu"): bounce.tensor}
    for t in transfers:
        if t.rows is not None:
            _scatter_rows(t.first, t.stop, t.rows, window, bounce)
        elif not t.address:
            if (device := t.into.device) not in copies:  # all of the window at once; casts and strides are made there
                copies[device] = upload(bounce.tensor[: stop - start], device)
            _scatter_box(t, window, copies[device])
        elif t.first >= start and t.stop <= stop:
            move_bytes(t.address, base + t.first, t.stop - t.first)
        else:
            begin, end = max(start, t.first), min(stop, t.stop)
            move_bytes(t.address + begin - t.first, base + begin, end - begin)


def _scatter_rows(first: int, last: int, rows: Rows, window: Window, bounce: Buffer) -> None:
    """Copy the window's part of one run per row: whole runs in one call, and the two that the window cuts off."""
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
def _scatter_box(t: Transfer, window: Window, values: torch.Tensor) -> None:
    """Copy the window's part of a box, with strides and casts, from the window's bytes on the target's device.

    An element is never cut by a window.
    """
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
        source = values[at : at + box.numel * itemsize].view(t.dtype).view(box.sizes)
        t.into[part.within(wanted)].copy_(source[part.within(box)])
