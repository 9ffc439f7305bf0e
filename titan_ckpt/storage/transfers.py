"""Moving parts of one rank's file into memory: only the blocks that hold them, each verified as it comes.

Owns the choice between the page cache and direct reads, and the scatter into tensors. Decides nothing about names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.storage.box import boxes_of_range, element_span, spans
from titan_ckpt.storage.engine import (
    IO_BYTES,
    NUM_WORKERS,
    FileReader,
    bounce_buffer,
    num_copy_workers,
    run_workers,
)
from titan_ckpt.storage.memory import Buffer, bytes_at, is_plain_memory, move_bytes
from titan_ckpt.storage.native_header import RankFile
from titan_ckpt.tensors import Chunk, Shape

Window = tuple[int, int]
"""Bytes [start, stop) of the data section; start is a multiple of the block size."""

MIN_DIRECT_BYTES = 256 << 10
"""Tensors are read without a bounce buffer where a window has that many bytes of each on average."""


class Transfer:
    """Fill `into` with a box of an array of `sizes` that is stored from byte `start` of the data section on.

    `into.shape` is the box's. `first` and `stop`: the bytes of the data section that the box spans. `address`: where
    they go as they are, if the box and its target are both one run of memory; else 0.
    """

    __slots__ = ("address", "box", "dtype", "first", "fqn", "into", "sizes", "start", "stop")

    def __init__(
        self, fqn: str, start: int, sizes: Shape, dtype: torch.dtype, box: Chunk | None, into: torch.Tensor
    ) -> None:
        """`box`: in the stored array's own coordinates; None is all of it."""
        self.fqn, self.start, self.sizes, self.dtype, self.box, self.into = fqn, start, sizes, dtype, box, into
        numel = prod(sizes) if box is None else box.numel
        low, high = (0, numel) if box is None else element_span(sizes, box)
        itemsize = dtype.itemsize
        self.first, self.stop = start + low * itemsize, start + high * itemsize
        as_it_is = into.dtype is dtype and high - low == numel and is_plain_memory(into)
        self.address = into.data_ptr() if as_it_is else 0


def execute(readers: Sequence[BlockReader], check_only: bool = False) -> None:
    """Do all transfers of all files; or, `check_only`, verify the blocks that hold them and fill nothing.

    Raises: CorruptCheckpointError naming every damaged block, its tensors, and the tensors overwritten so far.
    """
    unreadable: list[str] = []

    def read(item: tuple[BlockReader, Window]) -> None:
        reader, window = item
        progress.advance(window[1] - window[0])
        try:
            reader.read_window(window, check_only)
        except (EOFError, OSError) as error:
            unreadable.append(reader.path)
            raise CorruptCheckpointError(f"{reader.path}: cannot be read as its header says ({error})") from error

    num_workers = num_copy_workers() if all(reader.is_cached for reader in readers) else NUM_WORKERS
    total = sum(stop - start for reader in readers for start, stop in reader.windows)
    cause: CorruptCheckpointError | None = None
    try:
        with progress.shown("verifying" if check_only else "loading", total):
            run_workers(((reader, window) for reader in readers for window in reader.windows), read, num_workers)
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
    """The transfers of one file, cut into windows that hold whole blocks. Threads may read different windows."""

    def __init__(self, file: FileReader, header: RankFile, transfers: Sequence[Transfer], verify: bool) -> None:
        self.path = header.path
        self.bad: list[int] = []
        """Blocks with a wrong digest."""
        self.filled: list[Window] = []
        """Windows of which live memory has something, whole or not."""
        self._file = file
        self._header = header
        self._verify = verify
        self._transfers = sorted(transfers, key=lambda t: t.first)
        self._firsts = [t.first for t in self._transfers]
        self._reach = list(accumulate((t.stop for t in self._transfers), max))
        self.windows = list(self._windows())
        self.is_cached = all(file.is_cached(header.data_start + a, b - a) for a, b in self.windows)

    def _windows(self) -> Iterator[Window]:
        """Yield the pieces to read: runs of the blocks that are wanted, each of at most IO_BYTES."""
        block, end = self._header.block_bytes, self._header.data_bytes
        wanted: set[int] = set()
        for t in self._transfers:
            itemsize = t.dtype.itemsize
            if t.stop - t.first <= 2 * block or t.address:
                wanted.update(range(t.first // block, -(-t.stop // block)))
                continue
            for low, high in spans(t.sizes, t.box or Chunk.whole(t.sizes), block // itemsize):
                wanted.update(range((t.start + low * itemsize) // block, -(-(t.start + high * itemsize) // block)))
        start = stop = -1
        for index in sorted(wanted):
            a, b = index * block, min((index + 1) * block, end)
            if a == stop and b - start <= IO_BYTES:
                stop = b
                continue
            if stop > 0:
                yield start, stop
            start, stop = a, b
        if stop > 0:
            yield start, stop

    def read_window(self, window: Window, check_only: bool) -> None:
        """Read one window, verify its blocks, and fill what it holds of every target.

        Cached bytes go straight into targets that take all of them, so there a wrong block is found after the fact.
        """
        start, stop = window
        here = self._within(window)
        views = self._tiling(here, window) if self.is_cached and not check_only else None
        if views is not None:
            self.filled.append(window)
            self._read_verified(views, start)
            return
        with bounce_buffer() as bounce:
            views = [bounce.view[: stop - start]]
            if self.is_cached:
                good = self._read_verified(views, start)
            else:
                self._file.read_aligned(bounce.view, self._header.data_start + start, stop - start)
                good = not [i for i, block in self._blocks(views, start) if not self._verified(i, block)]
            if good and not check_only:
                self.filled.append(window)
                _scatter(here, window, bounce)

    def _read_verified(self, views: Sequence[memoryview], start: int) -> bool:
        """Fill the views through the page cache, block by block, each hashed while it is in the processor's own."""
        good = True
        for index, block in self._blocks(views, start):
            self._file.read_into(block, self._header.data_start + index * self._header.block_bytes)
            good &= self._verified(index, block)
        return good

    def _within(self, window: Window) -> list[Transfer]:
        start, stop = window
        first, last = bisect_right(self._reach, start), bisect_left(self._firsts, stop)
        return [t for t in self._transfers[first:last] if t.stop > start]

    def _tiling(self, transfers: Sequence[Transfer], window: Window) -> list[memoryview] | None:
        """Return the targets' memory for the window, if they take all of its bytes one after the other."""
        start, stop = window
        if len(transfers) * MIN_DIRECT_BYTES > stop - start:
            return None
        views = []
        position = start
        for t in transfers:
            if not t.address or max(t.first, start) != position:
                return None
            position = min(t.stop, stop)
            begin = max(t.first, start)
            views.append(bytes_at(t.address + begin - t.first, position - begin))
        return views if position == stop else None

    def _blocks(self, views: Sequence[memoryview], start: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Cut views that lie one after the other, from the begin of a block on, into blocks."""
        size = self._header.block_bytes
        index, room, block = start // size, size, []
        for view in views:
            at = 0
            while at < len(view):
                part = view[at : at + room]
                block.append(part)
                at += len(part)
                room -= len(part)
                if not room:
                    yield index, block
                    index, room, block = index + 1, size, []
        if block:
            yield index, block

    def _verified(self, index: int, block: Sequence[memoryview]) -> bool:
        """Compare a block's digest; note it if it is another."""
        if not self._verify:
            return True
        state = xxhash.xxh3_128()
        for view in block:
            state.update(view)
        if state.hexdigest() == self._header.block_digest(index):
            return True
        self.bad.append(index)
        return False

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


def _scatter(transfers: Sequence[Transfer], window: Window, bounce: Buffer) -> None:
    """Copy from the bounce buffer, which holds the window, into each target what the window has of it."""
    start, stop = window
    base = bounce.address - start
    for t in transfers:
        if not t.address:
            _scatter_box(t, window, bounce)
        elif t.first >= start and t.stop <= stop:
            move_bytes(t.address, base + t.first, t.stop - t.first)
        else:
            begin, end = max(start, t.first), min(stop, t.stop)
            move_bytes(t.address + begin - t.first, base + begin, end - begin)


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


def _listed(names: Sequence[str], limit: int = 12) -> str:
    if not names:
        return "no tensor"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor(s): {', '.join(names[:limit])}{more}"
