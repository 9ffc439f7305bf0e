"""Store: a place that holds bytes, as everything above it sees one. A place is a store and a path in it.

Owns the verbs that a checkpoint needs; how they are done is the store's. `titan_ckpt.testing.StoreTests` has the laws.
Knows no checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, Self, TypeVar

from titan_ckpt.disk.files import Reader, Writer
from titan_ckpt.stores.settings import StoreConfig

_Value = TypeVar("_Value")


class Place(Protocol):
    """A file or a folder in some store, by its path. Every `pathlib.Path` is one, on a mounted file system."""

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Self: ...
    def __truediv__(self, name: str, /) -> Self: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def exists(self) -> bool: ...
    def iterdir(self) -> Iterator[Self]: ...
    def glob(self, pattern: str, /) -> Iterator[Self]: ...


class Sealed(Protocol):
    """A file whose head can be made when all of the rest has been seen."""

    num_bytes: int
    start: int
    """Bytes of the head."""

    @property
    def pieces(self) -> Callable[[int, int], AbstractContextManager[memoryview]]:
        """(start, stop) -> these bytes of the rest, in aligned memory, padded to a multiple of the alignment."""

    @property
    def views(self) -> Callable[[int, int], Sequence[memoryview] | None]:
        """(start, stop) -> these bytes in memory that does not change meanwhile; None if they are not there."""

    def see(self, views: Sequence[memoryview], start: int) -> None:
        """Take note of the bytes from `start` of the rest on. Threads call it, each for other bytes."""

    def seal(self) -> bytes:
        """Return the head."""


class Store(ABC):
    """Operations on places of one kind. Errors are OSErrors; those of a server are StoreError."""

    settings: StoreConfig
    is_mounted: ClassVar[bool]
    """Whether every program of this machine sees it as files: folders are renamed, and ranks write into one file."""

    # reading

    @abstractmethod
    def seen(self, place: Any, made: Mapping[str, bytes] | None = None) -> Any:
        """Return a place to read from, whose files are listed once. `made`: content that is not there yet, by name."""

    @abstractmethod
    def afresh(self, place: Any) -> Any:
        """Return a place whose bytes are asked for again from the disk or the server."""

    @abstractmethod
    def open(self, place: Any, *, through_links: bool = False) -> Reader:
        """Open a file for reads at offsets. Raises: FileNotFoundError; OSError."""

    @abstractmethod
    def size(self, place: Any) -> int:
        """Return the size of a file. Raises: FileNotFoundError; OSError."""

    @abstractmethod
    def read_whole(self, place: Any, max_bytes: int, *, through_links: bool = False) -> bytes:
        """Return a small file. Raises: FileNotFoundError; OSError, with EFBIG if it is larger than `max_bytes`."""

    @abstractmethod
    def names_in(self, place: Any) -> list[str]:
        """Return the names directly below a place, sorted; [] if nothing is there."""

    @abstractmethod
    def folder_bytes(self, place: Any) -> int:
        """Return the bytes of all files below a place."""

    @abstractmethod
    def holds(self, folder: Any, name: str) -> bool:
        """Return whether a relative path stays inside of a folder. Raises: ValueError; OSError."""

    @abstractmethod
    def misses(self, place: Any, *, folder: bool = False) -> bool:
        """Return whether it is known, without a request, that nothing is at a place, or no folder."""

    # writing

    @abstractmethod
    def new_file(self, place: Any, about_bytes: int) -> Writer:
        """Create a file that is written from its beginning to its end. Raises: FileExistsError; OSError."""

    @abstractmethod
    def write_sealed(self, place: Any, file: Sealed, num_workers: int) -> None:
        """Write a new durable file whose head is known last. Raises: OSError."""

    @abstractmethod
    def put_new(self, place: Any, data: bytes) -> None:
        """Write a small durable file that must not exist. Raises: FileExistsError; OSError."""

    @abstractmethod
    def put_beside(self, files: Sequence[tuple[Any, bytes]], work: Callable[[], _Value]) -> _Value:
        """Do the work, and put small new files after it or at the same time; return the work's value."""

    @abstractmethod
    def put_companion(self, place: Any, content: bytes | Place) -> None:
        """Write a small file of an export, or a copy of one in any store.

        Raises: ExportError if it reads back otherwise; OSError.
        """

    @abstractmethod
    def remove(self, places: Sequence[Any]) -> None:
        """Delete files; one that is not there is no error."""
