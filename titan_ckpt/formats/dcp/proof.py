"""The proof of a rank's file in a DCP folder: every byte that was written is read back before the folder is published.

Owns the file while it is written, the digests of its content and the comparison. Knows no tensors and talks to no rank.
The file is read around the page cache where possible, several blocks at a time, because the disk is the bottleneck.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import IO, Any, cast

import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.files import IO_BYTES, Writer
from titan_ckpt.disk.workers import bounce_buffer, run_workers
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place


class DigestedFile(io.RawIOBase):
    """A new file to which items are appended and which digests each on its way. A context manager that closes it."""

    def __init__(self, path: Place, expected_bytes: int, before_end: Callable[[], None] = lambda: None) -> None:
        """Create nothing yet. `expected_bytes`: about the size that the file will have.

        `before_end`: called before the file is synced.
        """
        super().__init__()
        self._path = path
        self._expected_bytes = expected_bytes
        self._before_end = before_end
        self._file: Writer | None = None
        self.num_bytes = 0
        self._pieces: list[tuple[str, int, int, bytes]] = []
        """An item, the bytes [first, stop) of the file that it has in one block of IO_BYTES, and their digest."""
        self._item = ""
        self._first = 0
        self._digest = xxhash.xxh3_128()

    def open(self) -> None:
        """Create the file; it may be there only when it is synced. Raises: OSError."""
        self._file = store_of(self._path).new_file(self._path, self._expected_bytes)

    def append(self, item: str, write: Callable[[IO[bytes]], object]) -> int:
        """Let `write` put an item at the end of the file; return its length.

        Raises: what `self.write` raises, such as OSError.
        """
        start = self.num_bytes
        self._item = item
        try:
            write(cast(IO[bytes], self))
        except RuntimeError as error:  # after an error torch.save ends its archive, which fails and hides the error
            if error.__context__ is not None:
                raise error.__context__ from None
            raise
        self._cut()
        return self.num_bytes - start

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes at once, so that torch.save never keeps a tensor in memory twice."""
        view = memoryview(data).cast("B")
        assert self._file is not None, "open() comes first"
        self._file.write(view, self.num_bytes)
        done = 0
        while done < len(view):
            part = view[done : done + IO_BYTES - self.num_bytes % IO_BYTES]
            self._digest.update(part)
            self.num_bytes += len(part)
            done += len(part)
            if self.num_bytes % IO_BYTES == 0:
                self._cut()
        return done

    def _cut(self) -> None:
        """End the piece that is being digested, if it has any bytes."""
        if self._first < self.num_bytes:
            self._pieces.append((self._item, self._first, self.num_bytes, self._digest.digest()))
            self._first = self.num_bytes
            self._digest.reset()

    def sync(self) -> None:
        """Make the file durable; nothing is appended after it. Raises: OSError; what `before_end` raises."""
        if self._file is not None and self.num_bytes:  # nothing refers to an empty file
            self._before_end()
            self._file.finish(self.num_bytes)

    def close(self) -> None:
        """Close the file; one that is not synced is given up. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @gc_paused()
    def prove(self, count: progress.Count) -> None:
        """Read the file back and compare it with what was written. Raises: ExportError naming items that differ."""
        if not self.num_bytes:
            return
        wrong: set[str] = set()
        file = store_of(self._path).open(self._path)

        def compare(pieces: Sequence[tuple[str, int, int, bytes]]) -> None:
            start, stop = pieces[0][1], pieces[-1][2]
            count(stop - start)
            with bounce_buffer() as buffer:
                file.read_blocks(buffer.view[: stop - start], start)
                for item, first, last, digest in pieces:
                    if xxhash.xxh3_128_digest(buffer.view[first - start : last - start]) != digest:
                        wrong.add(item)

        try:
            if file.num_bytes != self.num_bytes:
                raise ExportError(f"{self._path.name} has {file.num_bytes} bytes, and {self.num_bytes} were written")
            blocks = (list(block) for _, block in groupby(self._pieces, lambda piece: piece[1] // IO_BYTES))
            run_workers(blocks, compare, file.num_workers)
        finally:
            file.close()
        if wrong:
            raise ExportError(
                f"{len(wrong)} item(s) of {self._path.name} read back differ from what was written: "
                f"{listed(sorted(wrong), ', ', ' ')}"
            )
