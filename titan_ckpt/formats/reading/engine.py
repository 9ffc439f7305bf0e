"""Reading slices of stored tensors: the one engine under every format, for files on a disk and in a bucket.

Owns which bytes are read, whether through the page cache, around it or by requests, and the verification of blocks that
have digests, once, as they are read. Decides nothing about names, and reads no headers.

From the page cache, bytes go straight into tensors that take all of a read; others are copied from a mapping, or from
a small buffer if they are verified first. Around it, bytes go through a bounce buffer, or straight into memory that is
aligned as the file is. A bucket is asked for many bytes at a time, which are copied from the client's memory.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.files import IO_BYTES, Reader
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, bytes_at
from titan_ckpt.disk.workers import bounce_buffer, finish_uploads, num_copy_workers, run_workers
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.reading.shared import Deal, warn_of
from titan_ckpt.formats.reading.slices import Held, Slice, Window, scatter
from titan_ckpt.geometry.chunks import cut, joined
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import read_twice

logger = logging.getLogger(__name__)

RUN_BYTES = IO_BYTES - 2 * ALIGNMENT
"""Bytes of one read that begins anywhere. Extended to whole blocks of a disk, it still fits a bounce buffer."""
_SAMPLED = 8
"""One in so many windows is examined first, to see whether a file is in the page cache."""
_CACHED_BYTES = 512 << 10
"""Bytes that are read and then hashed at a time, so that they still are in the processor's own cache."""
_MOST_MISSING = 0.25
"""If at most this share of the wanted bytes is missing, reading through the page cache is still faster."""
_MIN_STRAIGHT_BYTES = 256 << 10
"""Several tensors are read without a bounce buffer if a read has so many bytes of each on average."""
_MIN_DIRECT_BYTES = 64 << 10
"""A smaller read goes through the page cache, whose read-ahead serves the next read, and is not mapped."""
_MOST_GAP_BYTES = 256 << 10
"""Bytes that nobody wants, between two that one request gets, or between two rows of a shard of columns; asking again
takes longer."""
_MAPPED_BYTES = 16 << 20
"""Bytes that are mapped at a time: so many that what each mapping and each copy costs by itself does not count."""


class Blocks(NamedTuple):
    """Blocks of `size` bytes of a file from `start` to `stop`, and the digest of each by its number."""

    start: int
    stop: int
    size: int
    digest: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class SliceFill:
    """Fills the memory of slices. The sum of two fills what both do, and reads a file once for both."""

    slices: Sequence[tuple[Reader, Blocks | None, Sequence[Slice]]]
    """Open files, whose headers were checked; their blocks if they have digests; what is read of them."""
    what: str = "loading"
    """Title of the progress bar."""
    check: Callable[[], None] | None = None
    """Looks at the values when they are there."""

    def __call__(self) -> tuple[int, int]:
        """Read, verify and fill; return the bytes that were read, and 0.

        Raises: CorruptCheckpointError naming the files, the damaged tensors, and those overwritten in memory so far;
        OSError.
        """
        with gc_paused():
            return self.fill_after(self.sources(), None), 0

    def sources(self) -> list[SliceReader]:
        """Return what reads each file."""
        groups: dict[tuple[int, int], tuple[Reader, Blocks | None, list[Slice], int]] = {}
        for file, blocks, slices in self.slices:
            for part in slices:
                # of its own for each misalignment, so that no read cuts an element
                shift = 0 if blocks is not None else part.misalignment
                groups.setdefault((id(file), shift), (file, blocks, [], shift))[2].append(part)
        return [SliceReader(*group) for group in groups.values()]

    def fill_after(self, sources: Sequence[SliceReader], deal: Deal | None) -> int:
        """Fill, after the bytes that ranks read together; return all bytes. Raises: as a call; ExchangeBroken."""
        with gc_paused():
            total = execute(sources, what=self.what, deal=deal)
        if self.check:
            self.check()
        return total

    def __add__(self, other: SliceFill) -> SliceFill:
        return SliceFill([*self.slices, *other.slices], self.what)


def execute(
    readers: Sequence[SliceReader],
    check: progress.Count | None = None,
    what: str = "loading",
    deal: Deal | None = None,
) -> int:
    """Fill all slices of all files; or, with `check`, which counts, verify their blocks and write to no tensor.

    Return the number of bytes.

    `deal`: bytes that ranks read together, which come before the windows of the readers.

    Raises: CorruptCheckpointError naming every damaged block, its tensors, and the tensors overwritten so far; OSError
    if the files could not be read, which says nothing about them.
    """

    def read(item: tuple[SliceReader, Window]) -> None:
        reader, window = item
        count(window[1] - window[0])
        reader.read_window(window, fill=check is None)

    num_workers = max((reader.num_workers for reader in readers if not reader.is_cached), default=num_copy_workers())
    todo = [(reader, window) for reader in readers for window in reader.windows]
    total = sum(stop - start for _, (start, stop) in todo) + (deal.num_bytes if deal else 0)
    cause: CorruptCheckpointError | None = None
    try:
        with nullcontext(check) if check else progress.shown(what, total) as count:
            if deal:
                deal.run(count)
            run_workers(todo, read, min(num_workers, len(todo)))
            finish_uploads()
    except CorruptCheckpointError as error:
        cause = error
    bad = [reader for reader in readers if reader.bad]
    if cause is None and not bad:
        return total
    damage = [*([str(cause)] if cause else []), *(reader.damage() for reader in bad)]
    overwritten = list({name: None for reader in readers for name in reader.names(reader.filled)})
    steps = any(reader.is_verified for reader in readers)
    raise CorruptCheckpointError(
        f"{'; '.join(damage)}. Overwritten in memory so far: {_listed(overwritten)}. "
        f"{'Load another step, or copy' if steps else 'Copy'} the file again from where it is whole",
        cause.path if cause else bad[0].path,
        overwritten,
    ) from cause


class SliceReader:
    """The slices of one file, cut into windows that are one read each. Several threads may read different windows.

    With digests a window has whole blocks; without, it has the bytes that slices want.
    """

    def __init__(self, file: Reader, blocks: Blocks | None, slices: Sequence[Slice], shift: int = 0) -> None:
        """`shift`: the misalignment of all slices."""
        self._file, self._blocks = file, blocks
        self.path = str(self._file.path)
        self.is_verified = self._blocks is not None
        self.bad: list[Window] = []
        """Blocks with a wrong digest, also when they were read again."""
        self.filled: list[Window] = []
        """Blocks that were copied to live memory, completely or in part."""
        self.num_workers, self.is_remote = self._file.num_workers, self._file.is_remote
        self.ahead_bytes = self.num_workers * self._file.request_bytes
        self._slices = sorted((part for part in slices if part.stop > part.first), key=lambda part: part.first)
        self._firsts = [part.first for part in self._slices]
        self._reach = list(accumulate((part.stop for part in self._slices), max))
        self._most = RUN_BYTES if self._blocks is None and not self._file.is_remote else self._file.request_bytes
        self._block = RUN_BYTES if self._blocks is None else self._blocks.size
        self._base = shift if self._blocks is None else self._blocks.start % self._block
        """A byte of the file at which blocks and windows may be cut; others are a multiple of their size apart."""
        self._most = max(self._most, self._block)
        self.runs = joined(self._wanted(), _MOST_GAP_BYTES if self._blocks is None and self._file.is_remote else 0)
        """Wanted bytes, those near each other joined."""
        self.keep(self.runs)
        self.is_cached = self._is_cached()
        if self._blocks is None and self.is_cached and all(part.into.is_cpu for part in self._slices):
            self._block = self._most = _MAPPED_BYTES  # no bounce buffer has to hold it
            self.keep(self.runs)

    def keep(self, runs: Sequence[Window]) -> None:
        """Set the windows to these runs, each cut into what is one read."""
        self.windows = [window for run in runs for window in self.cut(run, self._most)]

    def cut(self, run: Window, most: int) -> Iterator[Window]:
        """Cut a run at multiples of a size in the file, as the parts are cut in which it was uploaded.

        So a bucket reads fewer of its own pieces for each request. Source: AWS whitepaper "Best practices design
        patterns: optimizing Amazon S3 performance", byte-range fetches.
        """
        if self._blocks is not None:
            most = max(most - most % self._block, self._block)
        return cut(*run, most, self._base)

    def _wanted(self) -> Iterator[Window]:
        """Yield the bytes that hold any part of a slice, in whole blocks if they have digests."""
        begin = end = 0
        for part in self._slices:
            if begin <= part.first and part.stop <= end:  # a block may hold thousands of small tensors
                continue
            if self._blocks is None:
                yield from part.byte_spans(_MOST_GAP_BYTES)
                continue
            base, block, last = self._blocks.start, self._block, self._blocks.stop
            for first, stop in part.byte_spans(block):
                begin, end = first - (first - base) % block, min(stop + (base - stop) % block, last)
                yield begin, end

    def _blocks_of(self, window: Window) -> Iterator[Window]:
        return cut(*window, self._block, self._base)

    def _is_cached(self) -> bool:
        """Return whether the page cache is the faster way to read the windows.

        The question costs time for every cached page, so all windows are examined only if a sample lacks anything. One
        answer for the file, because mixing both ways is slower.
        """
        if self._file.is_remote:
            return False
        if not self._missing(self.windows[::_SAMPLED]):
            return True
        return self._missing(self.windows) <= _MOST_MISSING * sum(stop - start for start, stop in self.windows)

    def _missing(self, windows: Sequence[Window]) -> int:
        """Return how many bytes of the windows are not in the page cache."""
        return sum(max(0, stop - start - self._file.cached_bytes(start, stop - start)) for start, stop in windows)

    @property
    def is_networked(self) -> bool:
        return self._file.is_networked

    @property
    def key(self) -> str:
        """Return what names these bytes on every rank: the file and its blocks, and where it may be cut.

        Hosts may have files of their own under one path, whose sizes are equal, but not their times.
        """
        file = f"{self.path} {self._file.num_bytes} {self._file.written_ns}"
        return f"{file} {self._blocks is not None and self._block} {self._base}"

    def fetch(self, window: Window, into: memoryview) -> None:
        """Read a window for all ranks that want it into aligned memory, and verify it; fill no target.

        Raises: CorruptCheckpointError for a wrong block; EOFError; OSError.
        """
        start = window[0]
        if self.is_cached or start % ALIGNMENT:
            self._file.read_into([into], start)
        else:
            self._file.read_blocks(into, start)
        read = Buffer.over(into), start
        for block in self._blocks_of(window) if self.is_verified else ():
            if not self._is_right(read, block):
                raise CorruptCheckpointError(f"{self.path}: bytes from {block[0]} on are wrong", self.path)

    def put(self, window: Window, data: memoryview, digest: bytes, sender: int) -> None:
        """Verify a window that a rank has read, and fill its targets. What is wrong is read here.

        Blocks have their own digests; a window without them has the digest that the sender took of it.
        Raises: as `read_window`.
        """
        read = Buffer.over(data), window[0]
        is_right = self._blocks is not None or xxhash.xxh3_128_digest(data) == digest
        for block in cut(*window, RUN_BYTES if self._blocks is None else self._block, self._base):
            if is_right and self._is_right(read, block):
                self._scatter(block, read)
            else:
                warn_of(sender, self.path, block)
                self._read_again(block, fill=True)

    def read(self, window: Window) -> None:
        """Read a window that nobody has sent. Raises: as `read_window`."""
        for part in self.cut(window, self._most):
            self.read_window(part, fill=True)

    def read_window(self, window: Window, *, fill: bool) -> None:
        """Read one window, verify each of its blocks, and with `fill` put them into their targets.

        Blocks that are wrong or cannot be read are read again, each by itself.
        Raises: CorruptCheckpointError for a block that cannot be read; OSError as `read_twice`.
        """
        try:
            if self._blocks is not None and not self._file.is_remote and (self.is_cached or not fill):
                doubtful = [*self._verified_on_the_way(window, fill=fill)]
            elif self._blocks is None and self._read_straight(window):
                doubtful = []
            else:
                doubtful = [*self._held_and_verified(window, fill=fill)]
        except StoreError:
            raise
        except (EOFError, OSError) as error:
            if self._blocks is None and isinstance(error, EOFError):
                raise CorruptCheckpointError(f"{error}: it was cut short while it was open", self.path) from error
            logger.warning("%s: %s; reading bytes %d-%d again", self.path, error, *window)
            doubtful = [*cut(*window, RUN_BYTES if self._blocks is None else self._block, self._base)]
        for block in doubtful:
            self._read_again(block, fill=fill)

    def _read_again(self, block: Window, *, fill: bool) -> None:
        """Read a block past the page cache, or by a new request. If it is right, fill its targets, else note it."""
        start, stop = block
        first = start - start % ALIGNMENT
        with bounce_buffer() as bounce:
            read_twice(self._file.path, lambda _: self._file.read_again(bounce.view, first, stop - first))
            read = bounce, first
            if not self._is_right(read, block):
                self.bad.append(block)
                return
            found = "" if self._blocks is None else ", and are right"
            logger.warning("%s: bytes from %d on were read again%s", self.path, start, found)
            if fill:
                self._scatter(block, read)

    def _verified_on_the_way(self, window: Window, *, fill: bool) -> Iterator[Window]:
        """Read a window through the page cache and verify each block while it is in the processor's; yield wrong ones.

        A block goes straight into targets that take all of it: if it is wrong, that is found after it was copied. All
        others pass a bounce buffer, from which only right blocks are copied.
        """
        with bounce_buffer() as bounce:
            for block in self._blocks_of(window):
                views = self._tiling(block) if fill else None
                if views is not None:
                    self.filled.append(block)
                if not self._read_verified(views or [bounce.view[: block[1] - block[0]]], block):
                    yield block
                elif fill and views is None:
                    self._scatter(block, (bounce, block[0]))

    def _held_and_verified(self, window: Window, *, fill: bool) -> Iterator[Window]:
        """Read a window into memory beside its targets; yield the wrong blocks, of which nothing is copied."""
        with self._held(window) as read:
            for block in self._blocks_of(window):
                if not self._is_right(read, block):
                    yield block
                elif fill:
                    self._scatter(block, read)

    @contextmanager
    def _held(self, window: Window) -> Iterator[Held]:
        """Read a window into a client's memory, a mapping or a bounce buffer."""
        start, stop = window
        is_small = stop - start < _MIN_DIRECT_BYTES
        if self._file.is_remote or (self.is_cached and not is_small):
            view = self._file.view(start, stop - start)
            yield Buffer.over(view), start
            self._file.release(view)
            return
        with bounce_buffer() as bounce:
            if is_small:
                first = start
                self._file.read_into([bounce.view[: stop - start]], start)
            else:
                first = start - start % ALIGNMENT
                self._file.read_aligned(bounce.view, first, stop - first)
            yield bounce, first

    def _read_straight(self, window: Window) -> bool:
        """Read a window without digests straight into its targets, if they take all of it; return whether they do.

        Around the page cache, one run of memory that is aligned as the file is.
        """
        start, stop = window
        views = None if self._file.is_remote else self._tiling(window)
        if views is None:
            return False
        if self.is_cached or stop - start < _MIN_DIRECT_BYTES:
            self.filled.append(window)
            self._file.read_into(views, start)
            return True
        slices = self._within(window)
        shift = slices[0].address - slices[0].first
        if (shift % ALIGNMENT) or any(part.address - part.first != shift for part in slices):
            return False
        self.filled.append(window)
        self._file.read_blocks(bytes_at(shift + start, stop - start), start)
        return True

    def _scatter(self, block: Window, read: Held) -> None:
        self.filled.append(block)
        scatter(self._within(block), block, read)

    def _read_verified(self, views: Sequence[memoryview], block: Window) -> bool:
        """Fill the views with a block through the page cache; hash each piece while it is in the processor's cache.

        Return whether the block is right.
        """
        offset = block[0]
        state = xxhash.xxh3_128()
        for view in views:
            for at in range(0, len(view), _CACHED_BYTES):
                piece = view[at : at + _CACHED_BYTES]
                self._file.read_into([piece], offset)
                state.update(piece)
                offset += len(piece)
        return self._has_digest(state, block)

    def _is_right(self, read: Held, block: Window) -> bool:
        """Return whether a block that was read has its digest, or needs none."""
        (memory, first), (start, stop) = read, block
        return self._blocks is None or self._has_digest(
            xxhash.xxh3_128(memory.view[start - first : stop - first]), block
        )

    def _has_digest(self, state: xxhash.xxh3_128, block: Window) -> bool:
        assert self._blocks is not None
        return state.hexdigest() == self._blocks.digest((block[0] - self._blocks.start) // self._block)

    def _within(self, window: Window) -> list[Slice]:
        start, stop = window
        first, last = bisect_right(self._reach, start), bisect_left(self._firsts, stop)
        return [part for part in self._slices[first:last] if part.stop > start]

    def _tiling(self, window: Window) -> list[memoryview] | None:
        """Return the targets' memory if they take all bytes of the window in order, and not many do; else None."""
        start, stop = window
        slices = self._within(window)
        if len(slices) > 1 and len(slices) * _MIN_STRAIGHT_BYTES > stop - start:
            return None
        views = []
        position = start
        for part in slices:
            if not (part.address and part.is_run) or max(part.first, start) != position:
                return None
            views.append(part.memory(position, min(part.stop, stop)))
            position = min(part.stop, stop)
        return views if position == stop else None

    def damage(self) -> str:
        """Describe the blocks with a wrong digest."""
        bad = sorted(self.bad)
        where = ", ".join(f"{start}-{stop - 1}" for start, stop in bad[:8])
        return (
            f"{self.path}: {len(bad)} block(s) do not have the digest they were written with: bytes {where}"
            f"{', ...' if len(bad) > 8 else ''}; they hold values of {_listed(self.names(bad))}"
        )

    def names(self, windows: Sequence[Window]) -> list[str]:
        """Return the names of tensors whose wanted bytes lie in any of the windows."""
        return list({part.name: None for window in windows for part in self._within(window)})


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensor(s): {listed(names, ', ', ' ', most=12)}" if names else "no tensor"
