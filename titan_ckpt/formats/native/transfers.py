"""Moving parts of one rank's file into memory: only the blocks that hold them are read, and each is verified.

Owns the choice between the page cache and direct reads, the verification of each block as it is read, once, and the
scatter of its bytes into memory of any strides, dtype and device. Decides nothing about names.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.cuda import upload
from titan_ckpt.disk.direct import (
    bounce_buffer,
    finish_uploads,
    num_copy_workers,
    run_workers,
)
from titan_ckpt.disk.files import Reader
from titan_ckpt.disk.memory import Buffer, bytes_at, move_bytes
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.native.header import RankFile
from titan_ckpt.geometry.boxes import boxes_of_range, element_span, spans
from titan_ckpt.geometry.chunks import Chunk, Shape, is_plain_memory
from titan_ckpt.stores.bucket import StoreError
from titan_ckpt.stores.second_look import read_twice

logger = logging.getLogger(__name__)

_SAMPLED = 8
"""One in so many windows is examined first, to see whether a file is in the page cache."""
_CACHED_BYTES = 512 << 10
"""Bytes that are read and then hashed at a time, so that they still are in the processor's own cache."""
_MOST_MISSING = 0.25
"""If at most this share of the wanted bytes is missing, reading through the page cache is still faster."""
MIN_DIRECT_BYTES = 256 << 10
"""Tensors are read without a bounce buffer if a block has so many bytes of each on average."""


Window = tuple[int, int]
"""Bytes [start, stop) of the data section, cut between elements."""


class Held:
    """Memory that holds the bytes of the data section from `start` on, until the block or window is scattered.

    `view` is that memory and `address` its first byte. A tensor over it is only made for targets that need one: with
    several threads, each call of torch costs a wait for the interpreter.
    """

    __slots__ = ("_tensor", "address", "start", "view")

    def __init__(self, view: memoryview, address: int, start: int, tensor: torch.Tensor | None = None) -> None:
        self.view, self.address, self.start, self._tensor = view, address, start, tensor

    @classmethod
    def of(cls, bounce: Buffer, start: int) -> Held:
        """Take what was read into a bounce buffer."""
        return cls(bounce.view, bounce.address, start, bounce.tensor)

    @classmethod
    def over(cls, answer: memoryview, start: int) -> Held:
        """Take the memory of a client's answer, which nobody may write to. The caller keeps `answer`."""
        return cls(answer, np.frombuffer(answer, np.uint8).ctypes.data, start)

    def bytes(self, window: Window) -> memoryview:
        return self.view[window[0] - self.start : window[1] - self.start]

    def tensor(self, window: Window) -> torch.Tensor:
        """Return the bytes of the window as uint8 on the CPU."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(bytes_at(self.address, len(self.view)), dtype=torch.uint8)
        return self._tensor[window[0] - self.start : window[1] - self.start]


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


def execute(readers: Sequence[BlockReader], check: progress.Count | None = None) -> None:
    """Do all transfers of all files; or, with `check`, which counts, verify their blocks and write to no tensor.

    Raises: CorruptCheckpointError naming every damaged block, its tensors, and the tensors overwritten so far; OSError
    if the files could not be read, which says nothing about them.
    """
    unreadable: list[str] = []

    def read(item: tuple[BlockReader, Window]) -> None:
        reader, window = item
        count(window[1] - window[0])
        try:
            reader.read_window(window, fill=check is None)
        except CorruptCheckpointError:
            unreadable.append(reader.path)
            raise

    num_workers = max((reader.num_workers for reader in readers), default=1)
    if all(reader.is_cached for reader in readers):
        num_workers = num_copy_workers()
    todo = [(reader, window) for reader in readers for window in reader.windows]
    total = sum(stop - start for _, (start, stop) in todo)
    cause: CorruptCheckpointError | None = None
    try:
        with nullcontext(check) if check else progress.shown("loading", total) as count:
            run_workers(todo, read, min(num_workers, len(todo)))
            finish_uploads()
    except CorruptCheckpointError as error:
        cause = error
    bad = [reader for reader in readers if reader.bad]
    if cause is None and not bad:
        return
    damage = [*([str(cause)] if cause else []), *(reader.damage() for reader in bad)]
    overwritten = list({fqn: None for reader in readers for fqn in reader.names(reader.filled)})
    raise CorruptCheckpointError(
        f"{'; '.join(damage)}. Overwritten in memory so far: {_listed(overwritten)}. "
        "Load another step, or copy the file again from where it is whole",
        unreadable[0] if unreadable else bad[0].path,
        overwritten,
    ) from cause


class BlockReader:
    """The transfers of one file, cut into windows of whole blocks. Several threads may read different windows."""

    def __init__(self, file: Reader, header: RankFile, transfers: Sequence[Transfer]) -> None:
        self.path = header.path
        self.bad: list[int] = []
        """Blocks with a wrong digest, also when they were read again."""
        self.filled: list[Window] = []
        """Blocks that were copied to live memory, completely or in part."""
        self.num_workers = file.num_workers
        self._file = file
        self._header = header
        self._transfers = sorted(transfers, key=lambda t: t.first)
        self._firsts = [t.first for t in self._transfers]
        self._reach = list(accumulate((t.stop for t in self._transfers), max))
        self.windows = list(self._windows(self._wanted()))
        self.is_cached = self._is_cached()

    def _wanted(self) -> list[int]:
        """Return the blocks that hold any part of a transfer, ascending."""
        block = self._header.block_bytes
        wanted: set[int] = set()
        begin = end = 0
        for transfer in self._transfers:
            if begin <= transfer.first and transfer.stop <= end:  # a block may hold thousands of small tensors
                continue
            itemsize = transfer.dtype.itemsize
            if transfer.stop - transfer.first <= 2 * block or transfer.address:
                first, last = transfer.first // block, -(-transfer.stop // block)
                begin, end = first * block, last * block
                wanted.update(range(first, last))
                continue
            for low, high in spans(transfer.sizes, transfer.box or Chunk.whole(transfer.sizes), block // itemsize):
                first, stop = transfer.start + low * itemsize, transfer.start + high * itemsize
                wanted.update(range(first // block, -(-stop // block)))
        return sorted(wanted)

    def _windows(self, blocks: Iterable[int]) -> Iterator[Window]:
        """Join neighbouring blocks to windows of at most IO_BYTES, or of one request to a bucket; or one block.

        Windows end at multiples of that size in the file, as the parts do in which it was uploaded: a bucket reads
        fewer of its own pieces for each request. Source: AWS whitepaper "Best practices design patterns: optimizing
        Amazon S3 performance", byte-range fetches.
        """
        block, end = self._header.block_bytes, self._header.data_bytes
        most_bytes = self._file.request_bytes
        most = max(1, most_bytes // block)
        before = self._header.data_start // block
        first = last = -1
        for index in blocks:
            if index == last and (before + last) % most:
                last += 1
                continue
            if last > first:
                yield first * block, min(last * block, end)
            first, last = index, index + 1
        if last > first:
            yield first * block, min(last * block, end)

    def _is_cached(self) -> bool:
        """Return whether the page cache is the faster way to read the windows.

        The question costs time for every cached page, so all windows are examined only if a sample lacks anything.
        """
        if not self._missing(self.windows[::_SAMPLED]):
            return True
        return self._missing(self.windows) <= _MOST_MISSING * sum(stop - start for start, stop in self.windows)

    def _missing(self, windows: Sequence[Window]) -> int:
        """Return how many bytes of the windows are not in the page cache."""
        base = self._header.data_start
        return sum(max(0, b - a - self._file.cached_bytes(base + a, b - a)) for a, b in windows)

    def read_window(self, window: Window, *, fill: bool) -> None:
        """Read one window, verify each of its blocks, and with `fill` put them into their targets.

        Blocks that are wrong or cannot be read are read again, each by itself.
        Raises: CorruptCheckpointError for a block that cannot be read; OSError as `read_twice`.
        """
        try:
            doubtful = [*(self._filled_window(window) if fill else self._checked_window(window))]
        except StoreError:
            raise
        except (EOFError, OSError) as error:
            logger.warning("%s: %s; reading bytes %d-%d of its values again", self.path, error, *window)
            doubtful = [*self._blocks(window)]
        for block in doubtful:
            self._read_again(block, fill=fill)

    def _read_again(self, block: Window, *, fill: bool) -> None:
        """Read a block past the page cache, or by a new request. If it is right, fill its targets, else note it."""
        start, stop = block
        with bounce_buffer() as bounce:
            offset = self._header.data_start + start
            read_twice(self._file.path, lambda _: self._file.read_again(bounce.view, offset, stop - start))
            read = Held.of(bounce, start)
            if not self._is_right(xxhash.xxh3_128(read.bytes(block)), block):
                self.bad.append(start // self._header.block_bytes)
                return
            logger.warning("%s: bytes from %d on were read again, and are right", self.path, offset)
            if fill:
                self.filled.append(block)
                scatter(self._within(block), block, read)

    def _checked_window(self, window: Window) -> Iterator[Window]:
        """Read a window through the page cache, or from a bucket by one request; yield its wrong blocks."""
        if self._file.is_remote:
            yield from (block for block, _, is_right in self._fetched(self._file, window) if not is_right)
            return
        with bounce_buffer() as bounce:
            for block in self._blocks(window):
                if not self._read_verified([bounce.view[: block[1] - block[0]]], block):
                    yield block

    def _filled_window(self, window: Window) -> Iterator[Window]:
        """Read one window into its targets, and verify each of its blocks on the way; yield the wrong ones.

        A cached block goes straight into targets that take all of it: if it is wrong, that is found after it was
        copied. All others pass a bounce buffer, from which only right blocks are copied; or the memory in which the
        client of a bucket has put them.
        """
        if self._file.is_remote:
            for block, read, is_right in self._fetched(self._file, window):
                if is_right:
                    self.filled.append(block)
                    self._scatter_fetched(block, read)
                else:
                    yield block
            return
        start, stop = window
        with bounce_buffer() as bounce:
            if not self.is_cached:
                self._file.read_aligned(bounce.view, self._header.data_start + start, stop - start)
            for block in self._blocks(window):
                transfers = self._within(block)
                if not self.is_cached:
                    read = Held.of(bounce, start)
                    is_right = self._is_right(xxhash.xxh3_128(read.bytes(block)), block)
                elif (views := self._tiling(transfers, block)) is not None:
                    self.filled.append(block)
                    if not self._read_verified(views, block):
                        yield block
                    continue
                else:
                    read = Held.of(bounce, block[0])
                    is_right = self._read_verified([bounce.view[: block[1] - block[0]]], block)
                if is_right:
                    self.filled.append(block)
                    scatter(transfers, block, read)
                else:
                    yield block

    def _fetched(self, file: Reader, window: Window) -> Iterator[tuple[Window, Held, bool]]:
        """Get a window by one request; yield its blocks, in the memory of the answer, and whether they are right."""
        start, stop = window
        answer = file.view(self._header.data_start + start, stop - start)
        read = Held.over(answer, start)
        for block in self._blocks(window):
            yield block, read, self._is_right(xxhash.xxh3_128(read.bytes(block)), block)

    def _scatter_fetched(self, block: Window, read: Held) -> None:
        transfers = self._within(block)
        if all(t.address or t.into.is_cpu for t in transfers):
            scatter(transfers, block, read)
            return
        with bounce_buffer() as bounce:  # it is page-locked, and lives until a device has read it
            move_bytes(bounce.address, read.address + block[0] - read.start, block[1] - block[0])
            scatter(transfers, block, Held.of(bounce, block[0]))

    def _blocks(self, window: Window) -> Iterator[Window]:
        """Yield the blocks of a window."""
        size = self._header.block_bytes
        return ((start, min(start + size, window[1])) for start in range(*window, size))

    def _read_verified(self, views: Sequence[memoryview], block: Window) -> bool:
        """Fill the views with a block through the page cache; hash each piece while it is in the processor's cache.

        Return whether the block is right.
        """
        offset = self._header.data_start + block[0]
        state = xxhash.xxh3_128()
        for view in views:
            for at in range(0, len(view), _CACHED_BYTES):
                piece = view[at : at + _CACHED_BYTES]
                self._file.read_into([piece], offset)
                state.update(piece)
                offset += len(piece)
        return self._is_right(state, block)

    def _is_right(self, state: xxhash.xxh3_128, block: Window) -> bool:
        """Return whether a block has its digest."""
        return state.hexdigest() == self._header.block_digest(block[0] // self._header.block_bytes)

    def _within(self, window: Window) -> list[Transfer]:
        start, stop = window
        first, last = bisect_right(self._reach, start), bisect_left(self._firsts, stop)
        return [t for t in self._transfers[first:last] if t.stop > start]

    def _tiling(self, transfers: Sequence[Transfer], window: Window) -> list[memoryview] | None:
        """Return the targets' memory if they take all bytes of the window in order, and not many do; else None."""
        start, stop = window
        if len(transfers) * MIN_DIRECT_BYTES > stop - start:
            return None
        views = []
        position = start
        for transfer in transfers:
            if not transfer.address or max(transfer.first, start) != position:
                return None
            views.append(transfer.memory(position, min(transfer.stop, stop)))
            position = min(transfer.stop, stop)
        return views if position == stop else None

    def damage(self) -> str:
        """Describe the blocks with a wrong digest."""
        block, base, end = self._header.block_bytes, self._header.data_start, self._file.num_bytes
        bad = sorted(self.bad)
        where = ", ".join(f"{base + i * block}-{min(base + (i + 1) * block, end) - 1}" for i in bad[:8])
        return (
            f"{self.path}: {len(bad)} block(s) do not have the digest they were written with: bytes {where}"
            f"{', ...' if len(bad) > 8 else ''}; they hold values of "
            f"{_listed(self.names([(i * block, (i + 1) * block) for i in bad]))}"
        )

    def names(self, windows: Sequence[Window]) -> list[str]:
        """Return the fqns whose wanted bytes lie in any of the windows."""
        return list({t.fqn: None for window in windows for t in self._within(window)})


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensor(s): {listed(names, ', ', ' ', most=12)}" if names else "no tensor"


def scatter(transfers: Sequence[Transfer], window: Window, read: Held) -> None:
    """Copy to each target its part of the window, which `read` holds."""
    start, stop = window
    base = read.address - read.start
    copies: dict[torch.device, torch.Tensor] = {}
    for transfer in transfers:
        if transfer.rows is not None:
            _scatter_rows(transfer.first, transfer.stop, transfer.rows, window, read)
        elif not transfer.address:
            device = transfer.into.device
            if device not in copies:  # all of the window at once; casts and strides are made there
                values = read.tensor(window)
                copies[device] = values if device.type == "cpu" else upload(values, device)
            _scatter_box(transfer, window, copies[device])
        elif transfer.first >= start and transfer.stop <= stop:
            move_bytes(transfer.address, base + transfer.first, transfer.stop - transfer.first)
        else:
            begin, end = max(start, transfer.first), min(stop, transfer.stop)
            move_bytes(transfer.address + begin - transfer.first, base + begin, end - begin)


def _scatter_rows(first: int, last: int, rows: Rows, window: Window, read: Held) -> None:
    """Copy the window's part of one run per row: whole runs in one call, and the two that the window cuts off."""
    start, stop = window
    address, pitch, run = rows
    base = read.address - read.start
    begin, end = max(start, first), min(stop, last)
    row, at = divmod(begin - first, pitch)
    if at:
        if at < run:
            move_bytes(address + row * run + at, base + begin, min(run - at, end - begin))
        row += 1
    cut, rest = divmod(end - first, pitch)
    count = cut - row + (rest >= run)
    if count > 0:
        source = np.ndarray((count, run), np.uint8, read.view, first + row * pitch - read.start, (pitch, 1))
        np.copyto(np.ndarray((count, run), np.uint8, bytes_at(address + row * run, count * run)), source)
    if 0 < rest < run and cut >= row:
        move_bytes(address + cut * run, base + first + cut * pitch, rest)


@torch.no_grad()
def _scatter_box(transfer: Transfer, window: Window, values: torch.Tensor) -> None:
    """Copy the window's part of a box, with strides and casts, from the window's bytes on the target's device.

    An element is never cut by a window.
    """
    start, stop = window
    itemsize = transfer.dtype.itemsize
    low = (max(start, transfer.first) - transfer.start) // itemsize
    high = (min(stop, transfer.stop) - transfer.start) // itemsize
    wanted = transfer.box or Chunk.whole(transfer.sizes)
    for box in boxes_of_range(transfer.sizes, low, high):
        part = box.intersect(wanted)
        if part is None:
            continue
        at = transfer.start + element_span(transfer.sizes, box)[0] * itemsize - start
        source = values[at : at + box.numel * itemsize].view(transfer.dtype).view(box.sizes)
        transfer.into[part.within(wanted)].copy_(source[part.within(box)])
