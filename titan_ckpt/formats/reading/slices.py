"""Slice: a box of a stored tensor, its bytes in a file, and the memory that it fills. Scatter: bytes into such memory.

Owns the copies into memory of any shape, strides, dtype and device. Opens no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch

from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import Buffer, bytes_at, move_bytes
from titan_ckpt.disk.workers import bounce_buffer, upload
from titan_ckpt.geometry.boxes import boxes, boxes_of_range, element_span, spans
from titan_ckpt.geometry.chunks import Chunk, Shape, is_plain_memory

_HOST = torch.device("cpu")

Window = tuple[int, int]
"""Bytes [start, stop) of a file, cut between elements."""


Held = tuple[Buffer, int]
"""Memory, and the byte of a file that it begins with. A bounce buffer, which is page-locked, lives until a device has
read it; another's memory only until it is scattered."""


class Slice:
    """A box of a stored tensor, and the tensor `into` that it fills: in row-major order it has the box's elements.

    `start`: first byte of the stored tensor in the file. `first` and `stop`: the bytes of the file that the box spans.
    `is_run`: whether it has all of them. `address`: the target's address if bytes go there one after the other, else 0:
    all from `first` on, or, of a shard of columns, `run` bytes every `pitch` bytes.
    """

    __slots__ = (
        "_memory", "address", "box", "chunk", "dtype", "first", "into", "is_run", "name", "pitch", "run", "sizes",
        "start", "stop",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        start: int,
        sizes: Shape,
        dtype: torch.dtype,
        box: Chunk | None,
        into: torch.Tensor,
        chunk: Chunk | None = None,
    ) -> None:
        """`sizes`: shape of the stored tensor. `box`: in the tensor's coordinates; None is the whole tensor.

        `chunk`: a box around this one, perhaps of other stored tensors too, of which `into` has the elements instead.
        """
        self.chunk = chunk
        self.name, self.start, self.sizes, self.dtype, self.box, self.into = name, start, sizes, dtype, box, into
        itemsize = dtype.itemsize
        if box is None:
            self.first, self.stop = start, start + prod(sizes) * itemsize
            self.is_run = True
        else:
            low, high = element_span(sizes, box)
            self.first, self.stop = start + low * itemsize, start + high * itemsize
            self.is_run = high - low == box.numel
        self.address = into.data_ptr() if chunk is None and into.dtype is dtype and is_plain_memory(into) else 0
        if not self.is_run and self.address:
            assert box is not None
            self.pitch = prod(sizes[1:]) * itemsize
            self.run = self.pitch // sizes[1] * box.sizes[1]
            if box.sizes[2:] != tuple(sizes[2:]):  # runs of several lengths apart
                self.address = 0
        self._memory: memoryview | None = None

    @property
    def misalignment(self) -> int:
        """Return by how many bytes the file's elements are off their alignment, if elements and not bytes are copied.

        Programs of others write tensors at odd offsets.
        """
        return 0 if self.address else self.start % self.dtype.itemsize

    def memory(self, start: int, stop: int) -> memoryview:
        """Return the target's memory for bytes [start, stop) of the file. The box is a run with an `address`."""
        if self._memory is None:  # made once, because a view of raw memory costs more than a slice of one
            self._memory = bytes_at(self.address, self.stop - self.first)
        return self._memory[start - self.first : stop - self.first]

    def byte_spans(self, max_gap: int) -> Iterator[Window]:
        """Yield bytes of the file, in order, that hold the box, without gaps of more than `max_gap` bytes."""
        if self.is_run or self.stop - self.first <= 2 * max_gap:
            yield self.first, self.stop
            return
        assert self.box is not None
        itemsize = self.dtype.itemsize
        for low, high in spans(self.sizes, self.box, max_gap // itemsize):
            yield self.start + low * itemsize, self.start + high * itemsize


def scatter(slices: Sequence[Slice], window: Window, read: Held) -> None:
    """Copy to each target its part of the window, which `read` holds."""
    start, stop = window
    memory, first = read
    base = memory.address - first
    copies: dict[torch.device, torch.Tensor] = {}
    for part in slices:
        if not part.address:
            device = part.into.device if part.is_run else _HOST  # of columns, a device gets only what it takes
            if device not in copies:  # all of the window at once; casts and strides are made there
                copies[device] = _on(device, memory, start - first, stop - first)
            _scatter_box(part, window, copies[device])
        elif not part.is_run:
            _scatter_rows(part, window, read)
        elif part.first >= start and part.stop <= stop:
            move_bytes(part.address, base + part.first, part.stop - part.first)
        else:
            begin, end = max(start, part.first), min(stop, part.stop)
            move_bytes(part.address + begin - part.first, base + begin, end - begin)


def _on(device: torch.device, memory: Buffer, start: int, stop: int) -> torch.Tensor:
    """Return these bytes of memory as uint8; if they fit a bounce buffer, on any device."""
    values = memory.tensor[start:stop]
    if device.type == "cpu":
        return values
    if memory.is_own:
        return upload(values, device)
    with bounce_buffer() as bounce:
        return upload(bounce.tensor[: len(values)].copy_(values), device)


def _scatter_rows(part: Slice, window: Window, read: Held) -> None:
    """Copy the window's part of one run per row: whole runs in one call, and the two that the window cuts off."""
    start, stop = window
    first, address, pitch, run = part.first, part.address, part.pitch, part.run
    memory, at_first = read
    base = memory.address - at_first
    begin, end = max(start, first), min(stop, part.stop)
    row, at = divmod(begin - first, pitch)
    if at:
        if at < run:
            move_bytes(address + row * run + at, base + begin, min(run - at, end - begin))
        row += 1
    cut, rest = divmod(end - first, pitch)
    count = cut - row + (rest >= run)
    if count > 0:
        source = np.ndarray((count, run), np.uint8, memory.view, first + row * pitch - at_first, (pitch, 1))
        np.copyto(np.ndarray((count, run), np.uint8, bytes_at(address + row * run, count * run)), source)
    if 0 < rest < run and cut >= row:
        move_bytes(address + cut * run, base + first + cut * pitch, rest)


def _scatter_box(part: Slice, window: Window, values: torch.Tensor) -> None:
    """Copy the window's part of a box, with strides and casts, from the window's bytes in any memory.

    An element is never cut by a window.
    """
    start, stop = window
    itemsize = part.dtype.itemsize
    begin, end = max(start, part.first), min(stop, part.stop)

    def elements(at: int, numel: int) -> torch.Tensor:
        source = values[at - start : at - start + numel * itemsize]
        if source.storage_offset() % itemsize or source.data_ptr() % itemsize:  # a view is aligned
            source = source.clone()
        return source.view(part.dtype)

    if part.is_run and part.chunk is None and part.into.is_contiguous():  # one copy, where boxes may be up to five
        first, numel = (begin - part.first) // itemsize, (end - begin) // itemsize
        with torch.no_grad():
            _copy(part.into.view(-1)[first : first + numel], elements(begin, numel))
        return
    wanted = part.box or Chunk.whole(part.sizes)
    for box in boxes_of_range(part.sizes, (begin - part.start) // itemsize, (end - part.start) // itemsize):
        inner = box.intersect(wanted)
        if inner is not None:
            at = part.start + element_span(part.sizes, box)[0] * itemsize
            put(part.into, part.chunk or wanted, inner, elements(at, box.numel).view(box.sizes)[inner.within(box)])


@torch.no_grad()
def put(into: torch.Tensor, chunk: Chunk, part: Chunk, values: torch.Tensor) -> None:
    """Copy the values of a part of a chunk to memory whose elements, in row-major order, are those of the chunk.

    The memory has any shape, strides, dtype and device; the values are on the host or on that device.
    """
    if into.shape != chunk.sizes and into.is_contiguous():
        into = into.view(chunk.sizes)
    if into.shape == chunk.sizes:
        _copy(into[part.within(chunk)], values)
        return
    whole, flat, done = Chunk.whole(into.shape), values.reshape(-1), 0
    for first, stop in spans(chunk.sizes, part.seen_from(chunk.offsets), 0):
        for box in boxes_of_range(tuple(into.shape), first, stop):
            _copy(into[box.within(whole)], flat[done : done + box.numel].view(box.sizes))
            done += box.numel


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape. A device gets host memory through page-locked buffers and casts it."""
    if into.is_cpu or not values.is_cpu:
        into.copy_(values)
        return
    most = IO_BYTES // values.dtype.itemsize
    for target, window in zip(windows(into, most), windows(values, most), strict=True):
        with bounce_buffer() as buffer:
            row = buffer.tensor[: window.nbytes].view(values.dtype).view(window.shape).copy_(window)
            target.copy_(upload(row, target.device))


def windows(view: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Cut a view into subviews of at most `max_elements`, in row-major order of its elements."""
    whole = Chunk.whole(view.shape)
    return (view[box.within(whole)] for box in boxes(whole, max_elements))
