"""Filling from a DCP folder: stored chunks one by one, or, if several ranks want them, from what these read together.

Owns the chunks that are in memory until they are whole. The reader owns their places, and makes tensors of their bytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.formats.reading.shared import Deal, Run, warn_of
from titan_ckpt.geometry.chunks import Block, Entry, cut, joined

if TYPE_CHECKING:
    from titan_ckpt.formats.dcp.dcp import DcpReader

Stored = Entry[tuple[str, int, int]]
"""A chunk or an item; its file, the first byte there, and the bytes that torch.save has made of it."""

ByChunk = Mapping[Stored, Sequence[Block]]
"""Stored chunk -> the requests that want a part of it."""


@dataclass(frozen=True, slots=True)
class DcpFill:
    """Fills the requests of stored chunks."""

    reader: DcpReader
    by_chunk: ByChunk

    def __call__(self) -> tuple[int, int]:
        return self.reader.fill(self.by_chunk), 0

    def sources(self) -> list[ChunkSource]:
        return self.reader.shared(self.by_chunk)

    def fill_after(self, sources: Sequence[ChunkSource], deal: Deal) -> int:
        """Fill from chunks that ranks read together, then from the others; return all bytes."""
        num_bytes = deal.num_bytes
        if num_bytes:
            with progress.shown(f"loading {self.reader.path.name}", num_bytes) as count:
                deal.run(count)
        together = {stored for source in sources for stored in source.together()}
        self.reader.fill({stored: wanting for stored, wanting in self.by_chunk.items() if stored not in together})
        return num_bytes + sum(stop - start for source in sources for start, stop in source.windows)


class ChunkSource:
    """The stored chunks of one file: each is whole in memory before torch makes a tensor of it."""

    is_verified = False

    def __init__(self, reader: DcpReader, name: str, chunks: Sequence[Stored], by_chunk: ByChunk) -> None:
        self._reader, self._name, self._by_chunk = reader, name, by_chunk
        self._path = str(reader.path / name)
        self._chunks = sorted(chunks, key=attrgetter("at"))
        extents = [(start, start + num_bytes) for _, start, num_bytes in map(attrgetter("at"), self._chunks)]
        self._firsts = [start for start, _ in extents]
        self._reach = [*accumulate((stop for _, stop in extents), max)]
        self.runs = self.windows = joined((start, stop) for start, stop in extents if stop > start)
        self._memories: dict[Stored, Buffer] = {}
        self._missing = {stored: stored.at[2] for stored in chunks}
        self._lock = threading.Lock()
        with reader.opened(name) as file:
            self.is_remote, self.is_networked = file.is_remote, file.is_networked
            self.ahead_bytes = file.num_workers * file.request_bytes
            wanted = sum(stop - start for start, stop in self.runs)
            cached = 0 if file.is_remote else sum(file.cached_bytes(start, stop - start) for start, stop in self.runs)
            self.is_cached = cached >= wanted
            self.key = f"{self._path} {file.num_bytes} {file.written_ns}"

    def keep(self, runs: Sequence[Run]) -> None:
        self.windows = [*runs]

    def together(self) -> set[Stored]:
        """Return the chunks that are filled from what ranks have read together."""
        return {stored for stored in self._chunks if stored.at[2] and not self._missing[stored]}

    def cut(self, run: Run, most: int) -> Iterator[Run]:
        return cut(*run, most)

    def fetch(self, window: Run, into: memoryview) -> None:
        with self._reader.opened(self._name) as file:
            file.read_into([into], window[0])

    def put(self, window: Run, data: memoryview, digest: bytes, sender: int) -> None:
        if xxhash.xxh3_128_digest(data) != digest:
            warn_of(sender, self._path, window)
            self.read(window)
        else:
            self._place(window, data)

    def read(self, window: Run) -> None:
        stored = next(self._within(window))
        data = Buffer.allocate(window[1] - window[0]).view
        with self._reader.reading(stored):
            self.fetch(window, data)
        self._place(window, data)

    def _within(self, window: Run) -> Iterator[Stored]:
        """Yield the chunks of which a window has a part."""
        start, stop = window
        first, last = bisect_right(self._reach, start), bisect_left(self._firsts, stop)
        return (stored for stored in self._chunks[first:last] if sum(stored.at[1:]) > start and stored.at[2])

    def _place(self, window: Run, data: memoryview) -> None:
        """Keep bytes until their chunks are whole, then fill the requests of these."""
        start, stop = window
        for stored in self._within(window):
            _, begin, num_bytes = stored.at
            first, last = max(start, begin), min(stop, begin + num_bytes)
            with self._lock:
                if stored not in self._memories:
                    self._memories[stored] = Buffer.allocate(num_bytes)
                memory = self._memories[stored].view
            into = memory[first - begin : last - begin]
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data[first - start : last - start], np.uint8))
            with self._lock:
                self._missing[stored] -= last - first
                is_whole = not self._missing[stored]
            if is_whole:
                self._reader.put_from(self._memories.pop(stored).view, stored, self._by_chunk[stored])
