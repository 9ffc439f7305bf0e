"""Reader and Writer: a file that is read or written at offsets, wherever its bytes are. Knows no formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self


class Reader(ABC):
    """A file that does not change. Threads may share it. Too short a file raises EOFError."""

    path: Any
    num_bytes: int
    written_ns: int = 0
    """When it was last written, by its file system; 0 for an object."""
    num_workers: int
    """Reads that are worth having in flight."""
    request_bytes: int
    """Bytes to ask for at a time where many are wanted."""
    is_remote: ClassVar[bool]
    """Whether each read is a request, so that runs near each other are worth one, and nothing is in a page cache."""

    @property
    def is_networked(self) -> bool:
        """Return whether it is on a file system that hosts mount over a network."""
        return False

    @abstractmethod
    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `offset` on; fewer if the file ends."""

    @abstractmethod
    def read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order with the bytes from `offset` on."""

    @abstractmethod
    def read_aligned(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the aligned buffer's first `num_bytes`; it has room for `num_bytes` rounded up."""

    @abstractmethod
    def read_again(self, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Do as `read_aligned`, and ask the disk or the server, whatever is in memory."""

    @abstractmethod
    def read_blocks(self, view: memoryview, offset: int) -> None:
        """Fill a view whose memory address and offset are equal modulo ALIGNMENT."""

    @abstractmethod
    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes in a mapping, or in memory of the client that got them. Nobody may write to them."""

    def release(self, view: memoryview) -> None:  # noqa: B027
        """Give up what `view` has returned; nobody uses it any more."""

    def fetch(self, offset: int, num_bytes: int) -> None:  # noqa: B027
        """Get bytes that are then read by pieces, if each piece would be a request. For one thread."""

    def cached_bytes(self, offset: int, num_bytes: int) -> int:
        """Return how many of these bytes are in this machine's page cache."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the file; idempotent."""


class Writer(ABC):
    """A file that is written at offsets, in any order. Threads may write at the same time.

    A context manager that closes it. A new file that is closed before it is finished is given up.
    """

    @property
    def is_direct(self) -> bool:
        """Return whether whole blocks bypass the page cache, and so must be aligned in memory as in the file."""
        return False

    @property
    def is_reserved(self) -> bool:
        """Return whether all its space is reserved, so that it may be mapped and stored to. Raises: OSError."""
        return False

    def map(self, offset: int, num_bytes: int) -> memoryview:
        """Return memory that is this part of the file, if it `is_reserved`. Raises: OSError."""
        raise NotImplementedError

    @abstractmethod
    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes, or copy them to be written by `finish`. Raises: OSError of this or an earlier write."""

    def flush(self) -> None:  # noqa: B027
        """Write what was put off. Raises: OSError."""

    @abstractmethod
    def finish(self, num_bytes: int) -> None:
        """Make the file durable. Its `num_bytes` are all written, and no others. Raises: OSError; EOFError."""

    @abstractmethod
    def close(self) -> None:
        """Release the file; idempotent. Raises: OSError, when a network file system reports a late error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
