"""ObjectStore: a Store of objects that are written once, as buckets have them. Knows no protocol of a provider.

Owns BucketPath. A subclass brings the requests; whatever it holds, a checkpoint is kept in it in the same way.
A method imports the modules that move many bytes, because they import torch.
"""

from __future__ import annotations

import contextlib
import errno
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import Self, TypeVar

from titan_ckpt.disk.files import IO_BYTES, Reader, Writer
from titan_ckpt.disk.workers import meanwhile, num_copy_workers, run_workers
from titan_ckpt.errors import ExportError
from titan_ckpt.stores.store import Place, Sealed, Store, StoreConfig, store_of

MAX_SMALL_BYTES = 32 * 2**20
"""Limit of an object that is read whole without another: a manifest may have as many."""
_MOST_PARTS = 9_000
_PATIENCE_SECONDS = 2.0
"""Work that fails waits so long for the small files beside it, so that none of them arrives later."""
_Value = TypeVar("_Value")
Version = Mapping[str, str]
"""The ETag, and on GCS the generation, which differ between two contents of one object."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """One line of a listing."""

    key: str
    num_bytes: int
    version: Version
    unix_seconds: float
    """When it was put, by the store's clock."""


class ObjectStore(Store):
    """Objects, named by key; every error names the object by its URL. Threads may share it."""

    is_mounted = False
    concurrency = 16
    """Requests that one rank has in flight: with parts of 16 MiB they fill a fast link, and take 256 MiB."""
    part_mib = 16

    def __init__(self, scheme: str, name: str, settings: StoreConfig) -> None:
        """Make a client; nothing is sent."""
        self.scheme = scheme
        self.name = name
        self.settings = settings

    def part_bytes(self, num_bytes: int) -> int:
        """Return the size of the parts of a file of `num_bytes`, larger for a large one, as a store takes 10,000."""
        return max(self.part_mib << 20, -(-num_bytes // _MOST_PARTS >> 20) + 1 << 20)

    def url(self, key: str) -> str:
        """Return the URL of an object."""
        return f"{self.scheme}://{self.name}/{key}" if key else f"{self.scheme}://{self.name}"

    def __repr__(self) -> str:
        return f"Bucket({self.url('')!r})"

    @abstractmethod
    def create(self, key: str, data: bytes) -> Version:
        """Put an object that must not exist; return its version, as far as it is known.

        `data` is unlike what anyone else would put, as an attempt's id makes it: where an answer was lost, the object
        is read back, and is this call's own if it holds the same bytes.
        Raises: FileExistsError; StoreError, after which the object may exist or come to exist.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes, version: Version) -> None:
        """Put an object over the content of that version only; otherwise as `create`.

        Raises: also StoreError if nobody has changed that content, and the store refuses all the same.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Put an object over what is there. Raises: StoreError."""

    @abstractmethod
    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        """Put a large object in requests of `part_bytes`.

        `parts` are views of memory, which holds another part as soon as nobody has a view of the one before: let go of
        a part when it is put, and have at most `concurrency` requests in flight.
        Raises: StoreError; what `parts` raises. There is no object then.
        """

    @abstractmethod
    def read(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> tuple[bytes, Version]:
        """Return a small object and its version.

        Raises: FileNotFoundError; StoreError; OSError with EFBIG if it is larger, before its bytes are sent.
        """

    @abstractmethod
    def read_head(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        """Return the first bytes of an object, and its size. Raises: FileNotFoundError; StoreError."""

    @abstractmethod
    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop). Raises: FileNotFoundError; EOFError if the object is shorter; StoreError."""

    @abstractmethod
    def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """Return the objects below `prefix`, which ends where a name does, by key. Raises: StoreError."""

    def list_files(self, prefix: str) -> list[ObjectFacts]:
        """Return the objects directly below `prefix`, by key. Raises: StoreError."""
        return [f for f in self.list_objects(prefix) if "/" not in f.key.removeprefix(f"{prefix}/" if prefix else "")]

    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, also of what only has objects below it. Raises: StoreError."""
        before = f"{prefix}/" if prefix else ""
        return sorted({f.key.removeprefix(before).partition("/")[0] for f in self.list_objects(prefix)})

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error. Raises: StoreError."""

    def content(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """Return a small object, None if it is not there. Raises: as `read`."""
        with contextlib.suppress(FileNotFoundError):
            return self.read(key, max_bytes)[0]
        return None

    def seen(self, place: BucketPath, made: Mapping[str, bytes] | None = None) -> BucketPath:
        """List what is below a place by one request, or beside it if it is an object itself. Raises: StoreError."""
        place = place.listed()
        if not made:
            return place
        heads = {(place / name).key: (content, len(content)) for name, content in made.items()}
        return replace(place, heads=heads, sizes={**place.sizes_below(), **{k: size for k, (_, size) in heads.items()}})

    def fetched(self, place: BucketPath, files: Iterable[BucketPath]) -> BucketPath:
        """Return the place as one that knows the heads of these files, which are asked for at the same time.

        A small file is all head. One that is not there is left to whoever reads it. Raises: StoreError.
        """
        from titan_ckpt.stores.object_files import HEAD_BYTES

        heads: dict[str, tuple[bytes, int]] = {}

        def fetch(file: BucketPath) -> None:
            with contextlib.suppress(FileNotFoundError):
                heads[file.key] = file.read_head(HEAD_BYTES)

        todo = list(dict.fromkeys(files))
        run_workers(todo, fetch, min(len(todo), self.concurrency))
        return BucketPath(self, place.key, heads)

    def afresh(self, place: BucketPath) -> BucketPath:
        return replace(place, heads={})

    def open(self, place: BucketPath, *, through_links: bool = False) -> Reader:
        from titan_ckpt.stores.object_files import ObjectReader

        return ObjectReader(place)

    def size(self, place: BucketPath) -> int:
        sizes = place.sizes_below()
        if place.key not in sizes:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place))
        return sizes[place.key]

    def read_whole(self, place: BucketPath, max_bytes: int, *, through_links: bool = False) -> bytes:
        return place.read(max_bytes)

    def names_in(self, place: BucketPath) -> list[str]:
        return self.list_names(place.key) if place.sizes is None else [path.name for path in place.iterdir()]

    def folder_bytes(self, place: BucketPath) -> int:
        prefix = f"{place.key}/" if place.key else ""
        return sum(size for key, size in place.sizes_below().items() if key.startswith(prefix))

    def holds(self, folder: BucketPath, name: str) -> bool:
        path = PurePosixPath(name)
        return not path.is_absolute() and ".." not in path.parts

    def misses(self, place: BucketPath, *, folder: bool = False) -> bool:
        return False

    def new_file(self, place: BucketPath, about_bytes: int) -> Writer:
        from titan_ckpt.stores.object_files import ObjectWriter

        return ObjectWriter(place, about_bytes)

    def write_sealed(self, place: BucketPath, file: Sealed, num_workers: int) -> None:
        """Upload the head and then the rest, which is therefore seen first.

        A part is sent from the memory that it is in, or from a copy: there are fewer copies than parts in flight,
        because the requests and what sees the bytes take some memory, too.
        """
        import numpy as np

        from titan_ckpt.stores.object_files import PartMemory

        end = file.num_bytes - file.start

        def copied(start: int, part: memoryview) -> memoryview:
            for at in range(0, len(part), IO_BYTES):
                target = np.frombuffer(part[at : at + IO_BYTES], np.uint8)
                with file.pieces(start + at, start + at + len(target)) as view:
                    np.copyto(target, np.frombuffer(view[: len(target)], np.uint8))  # without the interpreter
            return part

        def see(start: int) -> None:
            stop = min(start + IO_BYTES, end)
            if (live := file.views(start, stop)) is not None:
                file.see(live, start)
                return
            with file.pieces(start, stop) as view:
                file.see([view[: stop - start]], start)

        run_workers(range(0, end, IO_BYTES), see, num_copy_workers())
        head = file.seal()
        part_bytes = self.part_bytes(file.num_bytes)
        copies = PartMemory(part_bytes, max(1, self.concurrency - 1))

        def parts() -> Iterator[memoryview]:
            yield memoryview(head)
            start = 0
            while start < end:
                stop = min(start + part_bytes - (file.start + start) % part_bytes, end)
                live = file.views(start, stop)
                yield from live if live is not None else [copied(start, copies.take(stop - start))]
                start = stop

        self.upload(place.key, parts(), part_bytes)

    def put_new(self, place: BucketPath, data: bytes) -> None:
        self.create(place.key, data)

    def put_beside(self, files: Sequence[tuple[BucketPath, bytes]], work: Callable[[], _Value]) -> _Value:
        """Put the files while the work is done.

        If the work fails, requests that take long, because they are retried, may still be under way when this raises.
        """
        puts = partial(run_workers, files, lambda file: self.put_new(*file), len(files))
        with meanwhile(puts, patience=_PATIENCE_SECONDS):
            return work()

    def put_companion(self, place: BucketPath, content: bytes | Place) -> None:
        if isinstance(content, bytes):
            data = content
        else:
            store = store_of(content)
            data = store.read_whole(content, store.size(content), through_links=True)
        self.put(place.key, data)
        if place.read(len(data)) != data:
            raise ExportError(f"{place} read back differs from what was written")

    def remove(self, places: Sequence[BucketPath]) -> None:
        self.delete([place.key for place in places])


@dataclass(frozen=True, slots=True)
class BucketPath:
    """A place in a bucket: an object, or what objects have before a slash. Its text is its URL.

    It has the methods of a Path that readers use, and no __fspath__: nothing takes it for a local file.
    """

    bucket: ObjectStore
    key: str
    heads: Mapping[str, tuple[bytes, int]] = field(default_factory=dict, compare=False, repr=False)
    """Key -> first bytes and size of objects that are there, and do not change: reads of these bytes send nothing."""
    sizes: Mapping[str, int] | None = field(default=None, compare=False, repr=False)
    """Key -> bytes of the objects that one listing found: whether a file exists is asked often, and sends nothing."""

    def __truediv__(self, name: str) -> Self:
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """Return what is after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        return replace(self, key=self.key.rpartition("/")[0])

    def __str__(self) -> str:
        return self.bucket.url(self.key)

    def read(self, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Return the whole object. Raises: as ObjectStore.read."""
        head, num_bytes = self.heads.get(self.key, (b"", -1))
        return head if len(head) == num_bytes <= max_bytes else self.bucket.read(self.key, max_bytes)[0]

    def read_head(self, num_bytes: int) -> tuple[bytes, int]:
        """Return the object's first bytes, about so many, and its size. Raises: FileNotFoundError; StoreError."""
        return self.heads.get(self.key) or self.bucket.read_head(self.key, num_bytes)

    def listed(self) -> BucketPath:
        """Return the place with what one listing finds below it, or beside it if it is an object."""
        if self.sizes is not None:
            return self
        facts = self.bucket.list_objects(self.key)
        if not facts and "." in self.name:
            facts = self.bucket.list_files(self.parent.key)
        return replace(self, sizes={f.key: f.num_bytes for f in facts})

    def sizes_below(self) -> Mapping[str, int]:
        """Return the sizes of a listing, which is made now if there is none yet. Raises: StoreError."""
        return self.listed().sizes or {}

    def is_file(self) -> bool:
        return self.key in self.sizes_below()

    def is_dir(self) -> bool:
        return any(key.startswith(f"{self.key}/" if self.key else "") for key in self.sizes_below())

    def exists(self) -> bool:
        here = self.listed()
        return here.is_file() or here.is_dir()

    def iterdir(self) -> Iterator[Self]:
        """Yield what is directly below this place."""
        prefix = f"{self.key}/" if self.key else ""
        names = {key.removeprefix(prefix).partition("/")[0] for key in self.sizes_below() if key.startswith(prefix)}
        return (self / name for name in sorted(names))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield what has such a name below this place, as deep as the pattern."""
        folder, _, name = pattern.rpartition("/")
        return (path for path in (self / folder if folder else self).iterdir() if fnmatchcase(path.name, name))


def object_path(place: Place) -> BucketPath:
    """Return a place that is in an ObjectStore as what it is."""
    assert isinstance(place, BucketPath), place
    return place
