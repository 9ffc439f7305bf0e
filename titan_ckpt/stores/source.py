"""Folders that are read, on a mounted file system or in a bucket: the few questions that readers of files ask of both.

Owns ListedPath. Knows no formats and changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from titan_ckpt.disk import posix
from titan_ckpt.disk.direct import FileReader, run_workers
from titan_ckpt.stores.bucket import BucketPath, StoreError
from titan_ckpt.stores.object_reader import HEAD_BYTES, ObjectReader


@dataclass(frozen=True, slots=True)
class ListedPath(BucketPath):
    """A place in a bucket, and what one listing found there: whether a file exists is asked often, and sends nothing.

    It has the methods of a Path that readers use.
    """

    sizes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Key of each object -> its bytes."""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def is_file(self) -> bool:
        return self.key in self.sizes

    def is_dir(self) -> bool:
        return any(key.startswith(f"{self.key}/" if self.key else "") for key in self.sizes)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ListedPath]:
        """Yield what is directly below this place."""
        prefix = f"{self.key}/" if self.key else ""
        names = {key.removeprefix(prefix).partition("/")[0] for key in self.sizes if key.startswith(prefix)}
        return (self / name for name in sorted(names))

    def glob(self, pattern: str) -> Iterator[ListedPath]:
        """Yield what has such a name below this place, as deep as the pattern."""
        folder, _, name = pattern.rpartition("/")
        return (path for path in (self / folder if folder else self).iterdir() if fnmatchcase(path.name, name))

    @property
    def num_bytes(self) -> int:
        """Return the size of the object. Raises: FileNotFoundError."""
        if self.key not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return self.sizes[self.key]


Source = Path | ListedPath
"""A file or a folder that is read."""


def listed(place: BucketPath) -> ListedPath:
    """List what is below a place by one request, or beside it if it is an object itself. Raises: StoreError."""
    if isinstance(place, ListedPath):
        return place
    facts = place.bucket.list_objects(place.key)
    if not facts and "." in place.name:
        facts = place.bucket.list_files(place.parent.key)
    return ListedPath(place.bucket, place.key, sizes={f.key: f.num_bytes for f in facts})


def fetched(place: BucketPath, files: Iterable[BucketPath]) -> BucketPath:
    """Return the place as one that knows the heads of these files, which are asked for at the same time.

    A small file is all head. One that is not there is left to whoever reads it. Raises: StoreError.
    """
    heads: dict[str, tuple[bytes, int]] = {}

    def fetch(file: BucketPath) -> None:
        with contextlib.suppress(FileNotFoundError):
            heads[file.key] = file.read_head(HEAD_BYTES)

    todo = list(dict.fromkeys(files))
    run_workers(todo, fetch, min(len(todo), place.bucket.settings.concurrency))
    return BucketPath(place.bucket, place.key, heads)


def open_file(path: Source) -> FileReader | ObjectReader:
    """Open a file for reads at offsets. Raises: FileNotFoundError; OSError, also for a symbolic link."""
    return ObjectReader(path) if isinstance(path, ListedPath) else FileReader(path)


def num_bytes_of(path: Source) -> int:
    """Return the size of a file. Raises: FileNotFoundError; OSError."""
    return path.num_bytes if isinstance(path, ListedPath) else path.stat().st_size


def read_whole(path: Source, max_bytes: int, *, through_links: bool = False) -> bytes:
    """Return a small file. Raises: FileNotFoundError; OSError, with EFBIG if it is larger than `max_bytes`."""
    if isinstance(path, ListedPath):
        return path.read(max_bytes)
    return posix.read_whole(os.path.realpath(path) if through_links else path, max_bytes)


__all__ = ["ListedPath", "Source", "StoreError", "fetched", "listed", "num_bytes_of", "open_file", "read_whole"]
