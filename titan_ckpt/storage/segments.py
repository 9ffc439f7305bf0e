"""Live tensors as one run of bytes: where each part of a file's data section lies in memory now, and copying it out.

Owns the gather from many tensors, contiguous or not, host or device. Knows no files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

from titan_ckpt.storage.memory import Buffer, is_plain_memory, move_bytes

_PACKED_BYTES = 256 << 10
"""Device tensors below this size are packed."""
_PACK_BYTES = 16 << 20
"""What a pack may take on the device."""


class Segments:
    """Tensors laid end to end: `starts[i]` is where tensor i begins, in bytes. Keeps the tensors alive.

    Holds addresses, so it is only good until the tensors' memory is moved or freed: make it anew for every save.
    """

    def __init__(self, starts: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._addresses: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self.has_device_tensors = False
        for start, tensor in zip(starts, tensors, strict=True):
            size = tensor.nbytes
            if size:
                plain = is_plain_memory(tensor)
                self._starts.append(start)
                self._sizes.append(size)
                self._addresses.append(tensor.data_ptr() if plain else 0)
                self._tensors.append(tensor)
                if not plain and tensor.device.type != "cpu":
                    self.has_device_tensors = True

    def fill(self, start: int, stop: int, target: Buffer, at: int = 0) -> None:
        """Copy bytes [start, stop) of the run to byte `at` of the target. Threads may fill different parts."""
        starts, sizes, addresses = self._starts, self._sizes, self._addresses
        first = max(0, bisect_right(starts, start) - 1)
        last = bisect_left(starts, stop)
        base = target.address + at - start
        for i in range(first, last):
            low, address = starts[i], addresses[i]
            if address and low >= start and low + sizes[i] <= stop:
                move_bytes(base + low, address, sizes[i])
                continue
            high = min(stop, low + sizes[i])
            begin = max(start, low)
            if high <= begin:
                continue
            if address:
                move_bytes(base + begin, address + begin - low, high - begin)
            else:
                out = target.tensor[at + begin - start : at + high - start]
                copy_elements(self._tensors[i], begin - low, high - low, out)

    @torch.no_grad()
    def enqueue(self, target: Buffer) -> None:
        """Copy everything to the target's begin, device tensors on the current stream without waiting for it.

        Small neighbours are packed on the device first: a copy of its own for each would take longer than all bytes.
        """
        packed: list[int] = []
        for i, tensor in enumerate(self._tensors):
            small = not tensor.is_cpu and self._sizes[i] < _PACKED_BYTES
            if packed and not (small and self._starts[i] == self._end(packed[-1]) and self._packs(packed, i)):
                self._enqueue_packed(packed, target)
                packed = []
            if small:
                packed.append(i)
            elif self._addresses[i]:
                move_bytes(target.address + self._starts[i], self._addresses[i], self._sizes[i])
            else:
                out = target.tensor[self._starts[i] : self._end(i)].view(tensor.dtype).view(tensor.shape)
                out.copy_(tensor.detach(), non_blocking=True)
        if packed:
            self._enqueue_packed(packed, target)

    def _end(self, i: int) -> int:
        return self._starts[i] + self._sizes[i]

    def _packs(self, packed: list[int], i: int) -> bool:
        same_device = self._tensors[packed[0]].device == self._tensors[i].device
        return same_device and self._end(i) - self._starts[packed[0]] <= _PACK_BYTES

    def _enqueue_packed(self, packed: list[int], target: Buffer) -> None:
        values = [self._tensors[i].detach().resolve_conj().resolve_neg().reshape(-1) for i in packed]
        block = torch.cat([value.contiguous().view(torch.uint8) for value in values])
        target.tensor[self._starts[packed[0]] : self._end(packed[-1])].copy_(block, non_blocking=True)


@torch.no_grad()
def copy_elements(source: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy bytes [start, stop) of a tensor, counted in row-major order of its elements, into `out` (uint8).

    Works for any strides and device without a contiguous copy of the source; cuts only between elements.
    """
    itemsize = source.dtype.itemsize
    flat = out.view(source.dtype)
    _copy_range(source.detach(), start // itemsize, stop // itemsize, flat)


def _copy_range(source: torch.Tensor, start: int, stop: int, flat: torch.Tensor) -> None:
    if start == stop:
        return
    if source.is_contiguous():
        flat.copy_(source.reshape(-1)[start:stop])
        return
    row = source[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        _copy_range(source[last], start - last * row, stop - last * row, flat)
        return
    head = first * row - start
    if head:
        _copy_range(source[first - 1], row - head, row, flat[:head])
    body = (last - first) * row
    if body:
        flat[head : head + body].view(last - first, *source.shape[1:]).copy_(source[first:last])
    if head + body < stop - start:
        _copy_range(source[last], 0, stop - last * row, flat[head + body :])
