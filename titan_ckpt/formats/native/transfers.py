"""Moving parts of one rank's file into memory: only the blocks that hold them are read, and each is verified.

Owns the choice between the page cache and direct reads, and when a block is verified. Decides nothing about names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.direct import (
    IO_BYTES,
    NUM_WORKERS,
    FileReader,
    bounce_buffer,
    num_copy_workers,
    run_workers,
)
from titan_ckpt.disk.memory import Buffer, bytes_at
from titan_ckpt.disk.page_cache import Witness
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.native.header import RankFile
from titan_ckpt.formats.native.scatter import Transfer, Window, scatter
from titan_ckpt.geometry.boxes import spans
from titan_ckpt.geometry.chunks import Chunk

BlockRun = tuple[int, int]
"""Blocks [first, last) of a file's data section."""

_SAMPLED = 8
"""One in so many windows is examined first, to see whether a file is in the page cache."""
_MOST_MISSING = 0.25
"""If at most this share of the wanted bytes is missing, reading through the page cache is still faster."""
MIN_DIRECT_BYTES = 256 << 10
"""Tensors are read without a bounce buffer if a window has so many bytes of each on average."""


def runs_of(blocks: Iterable[int]) -> Iterator[BlockRun]:
    """Join ascending block numbers to runs."""
    first = last = -1
    for index in blocks:
        if index != last:
            if last > first:
                yield first, last
            first = index
        last = index + 1
    if last > first:
        yield first, last


def execute(readers: Sequence[BlockReader], check_only: bool = False) -> None:
    """Do all transfers of all files; or, with `check_only`, verify each file's `to_check` and write to no tensor.

    Raises: CorruptCheckpointError naming every damaged block, its tensors, and the tensors overwritten so far.
    """
    unreadable: list[str] = []

    def read(item: tuple[BlockReader, Window]) -> None:
        reader, window = item
        progress.advance(window[1] - window[0])
        try:
            if check_only:
                reader.check_window(window)
            else:
                reader.read_window(window)
        except (EOFError, OSError) as error:
            unreadable.append(reader.path)
            raise CorruptCheckpointError(f"{reader.path}: cannot be read as its header says ({error})") from error

    num_workers = num_copy_workers() if all(reader.is_cached for reader in readers) else NUM_WORKERS
    todo = [(reader, window) for reader in readers for window in (reader.to_check if check_only else reader.windows)]
    total = sum(stop - start for _, (start, stop) in todo)
    cause: CorruptCheckpointError | None = None
    try:
        with progress.shown("verifying" if check_only else "loading", total):
            run_workers(todo, read, num_workers)
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

    def __init__(self, file: FileReader, header: RankFile, transfers: Sequence[Transfer]) -> None:
        self.path = header.path
        self.bad: list[int] = []
        """Blocks with a wrong digest."""
        self.filled: list[Window] = []
        """Windows that were copied to live memory, completely or in part."""
        self._file = file
        self._header = header
        self._transfers = sorted(transfers, key=lambda t: t.first)
        self._firsts = [t.first for t in self._transfers]
        self._reach = list(accumulate((t.stop for t in self._transfers), max))
        self.block_runs = list(self._wanted())
        self.windows = list(self._windows(self.block_runs))
        self._holes, self.is_cached = self._survey()
        self.to_check = self.windows if self.is_cached else []
        """Windows that this rank verifies before any tensor is filled; shared_check.py divides them among the ranks of
        a host."""
        self._witness: Witness | None = None
        self._checked = False

    def _wanted(self) -> Iterator[BlockRun]:
        """Return runs of the blocks that hold any part of a transfer."""
        block = self._header.block_bytes
        wanted: set[int] = set()
        begin = end = 0
        for t in self._transfers:
            if begin <= t.first and t.stop <= end:  # a block may hold thousands of small tensors
                continue
            itemsize = t.dtype.itemsize
            if t.stop - t.first <= 2 * block or t.address:
                first, last = t.first // block, -(-t.stop // block)
                begin, end = first * block, last * block
                wanted.update(range(first, last))
                continue
            for low, high in spans(t.sizes, t.box or Chunk.whole(t.sizes), block // itemsize):
                wanted.update(range((t.start + low * itemsize) // block, -(-(t.start + high * itemsize) // block)))
        return runs_of(sorted(wanted))

    def _windows(self, runs: Iterable[BlockRun]) -> Iterator[Window]:
        """Yield the windows to read: each at most IO_BYTES long, or one block."""
        block, end = self._header.block_bytes, self._header.data_bytes
        step = max(1, IO_BYTES // block)
        for first, last in runs:
            for index in range(first, last, step):
                yield index * block, min(min(index + step, last) * block, end)

    def _survey(self) -> tuple[list[Window], bool]:
        """Return the windows that are not completely cached, and whether the page cache is the faster way.

        The question costs time for every cached page, so all windows are examined only if a sample lacks anything.
        """
        if not self._missing(self.windows[::_SAMPLED]):
            return [], True
        missing = self._missing(self.windows)
        total = sum(stop - start for start, stop in self.windows)
        return list(missing), sum(missing.values()) <= _MOST_MISSING * total

    def _missing(self, windows: Sequence[Window]) -> dict[Window, int]:
        """Return the windows that are not completely cached, each with the number of bytes that are missing."""
        base = self._header.data_start
        lacking = {(a, b): b - a - self._file.cached_bytes(base + a, b - a) for a, b in windows}
        return {window: lacks for window, lacks in lacking.items() if lacks > 0}

    @property
    def identity(self) -> str:
        """Return a name of the file that is unique on this host."""
        return self._file.identity

    def prepare(self) -> None:
        """Read the missing parts of a cached file into the page cache, and start to watch it for changes."""
        if not self.to_check:
            return
        with bounce_buffer() as bounce, suppress(EOFError, OSError):  # the check will report them
            for start, stop in self._holes:
                self._file.read_into([bounce.view[: stop - start]], self._header.data_start + start)
        self._witness = self._file.witness()

    def divide(self, runs: Iterable[BlockRun]) -> None:
        """Verify only these blocks; other ranks verify the rest."""
        self.to_check = list(self._windows(runs))

    def check_window(self, window: Window) -> None:
        """Verify the blocks of a window, which is read through the page cache."""
        start, stop = window
        with bounce_buffer() as bounce:
            for at in range(start, stop, self._header.block_bytes):
                # all use the start of the buffer, which stays in the processor's cache
                block = bounce.view[: min(self._header.block_bytes, stop - at)]
                self._read_verified([block], at)

    def trust(self) -> None:
        """Note that this rank or others have verified all blocks, which counts as long as the witness holds."""
        self._checked = True

    def read_window(self, window: Window) -> None:
        """Read one window into its targets; verify its blocks unless they are unchanged since they were verified.

        Cached bytes go straight into targets that take all of them; a wrong block is then found after it was copied.
        """
        transfers = self._within(window)
        if self._is_trusted():
            self.filled.append(window)
            self._copy(transfers, window)
            if self._is_trusted():
                return
        start, stop = window
        views = self._tiling(transfers, window) if self.is_cached else None
        if views is not None:
            self.filled.append(window)
            self._read_verified(views, start)
            return
        with bounce_buffer() as bounce:
            if self.is_cached:
                good = self._read_verified([bounce.view[: stop - start]], start)
            else:
                good = self._read_around_cache(window, bounce)
            if good:
                self.filled.append(window)
                scatter(transfers, window, bounce)

    def _is_trusted(self) -> bool:
        """Return whether every block still is what it was when it was verified."""
        return self._checked and self._witness is not None and self._witness.holds()

    def _copy(self, transfers: list[Transfer], window: Window) -> None:
        """Fill targets from the page cache, verifying nothing."""
        offset, num_bytes = self._header.data_start + window[0], window[1] - window[0]
        if (views := self._tiling(transfers, window)) is not None:
            self._file.read_into(views, offset)
            return
        with bounce_buffer() as bounce:
            self._file.read_into([bounce.view[:num_bytes]], offset)
            scatter(transfers, window, bounce)

    def close(self) -> None:
        """End the watch; idempotent."""
        if self._witness is not None:
            self._witness.close()

    def _read_verified(self, views: Sequence[memoryview], start: int) -> bool:
        """Fill the views through the page cache, hashing each block while it is in the processor's cache.

        Return whether all blocks are right.
        """
        good = True
        for index, block in self._blocks(views, start):
            self._file.read_into(block, self._header.data_start + index * self._header.block_bytes)
            good &= self._verified(index, block)
        return good

    def _read_around_cache(self, window: Window, bounce: Buffer) -> bool:
        start, stop = window
        self._file.read_aligned(bounce.view, self._header.data_start + start, stop - start)
        blocks = self._blocks([bounce.view[: stop - start]], start)
        return not [i for i, block in blocks if not self._verified(i, block)]

    def _within(self, window: Window) -> list[Transfer]:
        start, stop = window
        first, last = bisect_right(self._reach, start), bisect_left(self._firsts, stop)
        return [t for t in self._transfers[first:last] if t.stop > start]

    def _tiling(self, transfers: Sequence[Transfer], window: Window) -> list[memoryview] | None:
        """Return the targets' memory for the window if they take all its bytes in order, else None."""
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
        """Cut views into blocks. The views follow each other; the first starts at a block."""
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
        """Return whether a block has its digest; note the block if it has not."""
        if len(block) == 1:
            digest = xxhash.xxh3_128_hexdigest(block[0])
        else:
            state = xxhash.xxh3_128()
            for view in block:
                state.update(view)
            digest = state.hexdigest()
        if digest == self._header.block_digest(index):
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


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensor(s): {listed(names, ', ', ' ', most=12)}" if names else "no tensor"
