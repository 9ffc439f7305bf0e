"""ObjectReader: one object in a bucket, read at offsets as `disk.files.FileReader` reads a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from titan_ckpt.disk.files import IO_BYTES, Reader
from titan_ckpt.disk.workers import run_workers

if TYPE_CHECKING:
    from titan_ckpt.stores.objects import BucketPath

HEAD_BYTES = 1 << 20
"""The first request gets the size and so many bytes: the header of most files."""
_REQUEST_BYTES = 16 << 20
"""A server reads whole blocks of its own, and pays for each request; larger answers only take more memory."""


class ObjectReader(Reader):
    """An object that does not change, read by ranges. Threads may share it."""

    is_remote = True
    path: BucketPath

    def __init__(self, path: BucketPath) -> None:
        """Read the object's head. Raises: FileNotFoundError; StoreError."""
        self.path = path
        self.num_workers = path.bucket.concurrency
        self.request_bytes = min(_REQUEST_BYTES, path.bucket.part_mib << 20)
        """Bytes to ask for at a time where many are wanted."""
        self._head, self.num_bytes = path.read_head(HEAD_BYTES)
        self._fetched = 0, memoryview(self._head)
        """Offset and content of what is in memory."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `offset` on; fewer if the object ends. Raises: EOFError; StoreError."""
        stop = min(offset + num_bytes, self.num_bytes)
        known = self._head[offset:stop]
        if offset + len(known) >= stop:
            return known
        return known + self.path.bucket.read_range(self.path.key, offset + len(known), stop)

    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the buffer's first `num_bytes`, by one request. Raises: EOFError; StoreError."""
        data = self.view(offset, num_bytes)
        np.copyto(np.frombuffer(buffer[:num_bytes], np.uint8), np.frombuffer(data, np.uint8))  # without the interpreter

    def read_again(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Do as `read_aligned`, by a new request whatever is in memory."""
        data = self.path.bucket.read_range(self.path.key, offset, offset + num_bytes)
        buffer[:num_bytes] = data

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes in the client's memory, by one request. Raises: EOFError; StoreError."""
        if offset + num_bytes > self.num_bytes:
            raise EOFError(f"{self.path} ends at byte {self.num_bytes}")
        first, fetched = self._fetched
        if first <= offset and offset + num_bytes <= first + len(fetched):
            return fetched[offset - first :][:num_bytes]
        return self.path.bucket.read_range(self.path.key, offset, offset + num_bytes)

    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order, by one request for each. Raises: as `read_aligned`."""
        for view in views:
            if len(view):
                self.read_aligned(view, offset, len(view))
                offset += len(view)

    def fetch(self, offset: int, num_bytes: int) -> None:
        """Get these bytes, and what follows them if they are few; later reads of them send nothing. For one thread.

        Raises: EOFError; StoreError.
        """
        first, fetched = self._fetched
        if first <= offset and offset + num_bytes <= first + len(fetched):
            return
        self._fetched = 0, memoryview(b"")
        memory = np.empty(min(max(num_bytes, IO_BYTES), self.num_bytes - offset), np.uint8).data
        parts = [(memory[at : at + IO_BYTES], offset + at) for at in range(0, len(memory), IO_BYTES)]
        run_workers(parts, lambda part: self.read_blocks(*part), min(self.num_workers, len(parts)))
        self._fetched = offset, memory

    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill the view, by one request. Raises: as `read_aligned`."""
        self.read_aligned(view, offset, len(view))

    def close(self) -> None:
        """Forget what was read."""
        self._head, self._fetched = b"", (0, memoryview(b""))
