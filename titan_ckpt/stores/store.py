"""Store: a place that holds bytes, as everything above it sees one. A place is a store and a path in it.

Owns the verbs that a checkpoint needs, and which store a place is in or a text names; the list of known schemes;
`Posix`, the mounted file systems, whose places are `pathlib.Path`s and whose files `disk.posix` alone changes; and what
counts as damage, as a failure that may pass, and as neither: one bad answer is asked for again. How the verbs are done
is the store's; `titan_ckpt.testing.StoreTests` has the laws. Only the place that a URL names needs a client, which is
made here. Credentials are no settings: they come by the provider's own environment and files. Knows no checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

from titan_ckpt.disk import posix
from titan_ckpt.disk.files import IO_BYTES, FileReader, FileWriter, Reader, Writer
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.encoding.paths import Whole, Written, hub_folder, is_uri, require
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError
from titan_ckpt.stores.answers import StoreError

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Place = TypeVar("_Place", bound="Place")
WAITS_SECONDS: Sequence[float] = (0.1, 0.3, 0.9)
"""Pauses before a read that failed is made again; after the last one its error is raised."""
_OF_NAMES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG})
"""Errors that say what is at a path, and not that it could not be read."""
SCHEMES = ("s3", "gs", "az")
"""Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

OTHERS: dict[str, Callable[[str, str, StoreConfig], Any]] = {}
"""Scheme of a URL -> the class of another place for bytes, an ObjectStore made of scheme, name and settings."""

_BUCKET_URL = re.compile(r"([a-z][a-z0-9]*):/{1,2}([^/?#@:\s]+)((?:/[^/?#\x00-\x1f\x7f]+)*)/?")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")


def is_endpoint(text: str) -> bool:
    """Return whether this is the URL of a server, without anything secret."""
    return _ENDPOINT.fullmatch(text) is not None


_Endpoint = Annotated[str, Check("an http(s) URL without user, password or query", is_endpoint)]
_Seconds = Annotated[float, Check("above 0, at most 600 (seconds)", lambda s: 0 < s <= 600)]


@dataclass(frozen=True, slots=True)
class StoreConfig(Checked):
    """[checkpoint.store]: how the buckets of checkpoints, sources and exports are reached. Credentials, and the region
    of an S3 bucket (AWS_REGION), come from the provider's own environment and files.
    """

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "region": "the environment has it: AWS_REGION, by default us-east-1",
        "concurrency": "16 requests of a rank are in flight; it is no setting",
        "part_mib": "a part has 16 MiB, or more in a file of more than 9,000 parts; it is no setting",
    }

    endpoint: _Endpoint | None = None
    """URL of a server other than the provider's own, such as MinIO's; absent: AWS_ENDPOINT_URL or
    AZURE_STORAGE_ENDPOINT, or the provider's."""
    retry_seconds: _Seconds = 120.0
    """A request that has failed for this long is given up, and the save or load fails with the last answer."""
    single_writer: bool = False
    """You promise that one run at a time writes to the folder. Accepts stores without conditional puts, which cannot
    keep a second writer out."""


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


class Posix(Store):
    """The file systems of this machine."""

    settings = StoreConfig()
    is_mounted = True

    def seen(self, place: Path, made: Mapping[str, bytes] | None = None) -> Path:
        return place if os.path.lexists(place) else hub_folder(place)

    def afresh(self, place: Path) -> Path:
        """Let the page cache forget the file. Pages that were changed and not yet written stay: the disk lacks them."""
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # the second read will meet it
            return place
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # not a regular file
            pass
        finally:
            os.close(fd)
        return place

    def open(self, place: Path, *, through_links: bool = False) -> Reader:
        return FileReader(Path(os.path.realpath(place)) if through_links else place)

    def size(self, place: Path) -> int:
        return place.stat().st_size

    def read_whole(self, place: Path, max_bytes: int, *, through_links: bool = False) -> bytes:
        return posix.read_whole(os.path.realpath(place) if through_links else place, max_bytes)

    def names_in(self, place: Path) -> list[str]:
        return posix.list_folder(place)

    def folder_bytes(self, place: Path) -> int:
        """Return the bytes of all files in a folder; those that are gone meanwhile do not count."""
        total = 0
        for parent, _, files in os.walk(place):
            for name in files:
                with contextlib.suppress(OSError):
                    total += Path(parent, name).lstat().st_size
        return total

    def holds(self, folder: Path, name: str) -> bool:
        target = folder / PurePosixPath(name)
        return target.resolve().is_relative_to(folder.resolve()) and not target.is_symlink()

    def misses(self, place: Path, *, folder: bool = False) -> bool:
        return not (place.is_dir() if folder else place.exists())

    def new_file(self, place: Path, about_bytes: int) -> Writer:
        return FileWriter.create(place)

    def write_sealed(self, place: Path, file: Sealed, num_workers: int) -> None:
        """Write the rest while it is in the processor's cache, and then the head. Its entry is not durable yet."""
        end = file.num_bytes - file.start

        with FileWriter.create(place, file.num_bytes) as writer:

            def write_piece(start: int) -> None:
                stop = min(start + IO_BYTES, end)
                with file.pieces(start, stop) as view:
                    file.see([view[: stop - start]], start)
                    writer.write(view, file.start + start)

            run_workers(range(0, end, IO_BYTES), write_piece, num_workers)
            head = file.seal()
            aligned = Buffer.allocate(len(head))
            aligned.view[:] = head
            writer.write(aligned.view, 0)
            writer.finish(file.num_bytes)

    def put_new(self, place: Path, data: bytes) -> None:
        posix.write_file(place, data)

    def put_beside(self, files: Sequence[tuple[Path, bytes]], work: Callable[[], _Value]) -> _Value:
        value = work()
        for place, data in files:
            posix.write_file(place, data)
        return value

    def put_companion(self, place: Path, content: bytes | Place) -> None:
        """Write the content, or copy the bytes of a file, but no metadata; a link becomes a file."""
        if not place.parent.exists():
            posix.mkdir(place.parent)
        if not isinstance(content, bytes) and not (store := store_of(content)).is_mounted:
            # one answer is of one object, and ranges may be of two
            content = store.read_whole(content, store.size(content))
        if isinstance(content, bytes):
            posix.write_file(place, content)
            return
        with contextlib.closing(store_of(content).open(content, through_links=True)) as file:
            posix.write_blocks(place, (file.read(at, IO_BYTES) for at in range(0, file.num_bytes, IO_BYTES)))

    def remove(self, places: Sequence[Path]) -> None:
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                posix.unlink(place)


POSIX = Posix()


def store_of(place: Place) -> Store:
    """Return the store that a place is in."""
    store: Store = getattr(place, "bucket", POSIX)
    return store


def local_path(place: Place) -> Path | None:
    """Return the path by which other programs and libraries open a place; None where they cannot."""
    return place if isinstance(place, Path) else None


EXPECTED_PLACE = "a path on a mounted file system, or s3://bucket/key, gs://bucket/key or az://container/key"

FolderOrBucket = Annotated[
    str,
    Check("a string that is not empty", str.strip),
    Whole,
    Check(EXPECTED_PLACE, lambda text: not _is_unknown(text)),
    Written,
]
"""The type of a setting that names a folder, or a place in a bucket."""


def require_places(paths: Mapping[str, str | os.PathLike[str]]) -> None:
    """Check arguments that may name a bucket by their names. Raises: ConfigError listing all that are refused."""
    require(paths, EXPECTED_PLACE, _is_unknown)


def _is_unknown(text: str | os.PathLike[str]) -> bool:
    return is_uri(text) and split_url(text) is None


def split_url(text: str | os.PathLike[str]) -> tuple[str, str, str] | None:
    """Return (scheme, bucket, key) of a bucket's URL, None for any other text; key "" is the bucket itself.

    Reads also what pathlib makes of a URL: Path("s3://bucket/run") is "s3:/bucket/run".
    """
    match = _BUCKET_URL.fullmatch(os.fspath(text))
    if match is None or match[1] not in (*SCHEMES, *OTHERS) or any(part in (".", "..") for part in match[3].split("/")):
        return None
    return match[1], match[2], match[3].strip("/")


def open_location(
    text: str | os.PathLike[str], base_folder: str | Path = ".", settings: StoreConfig | None = None
) -> Place:
    """Return the place that a text names: in a bucket if it is a bucket's URL, else relative to a folder.

    Sends nothing. Raises: ConfigError if the client cannot be made.
    """
    parts = split_url(text)
    if parts is None:
        return Path(base_folder) / text
    from titan_ckpt.stores.bucket import Bucket
    from titan_ckpt.stores.objects import BucketPath

    scheme, name, key = parts
    return BucketPath(OTHERS.get(scheme, Bucket)(scheme, name, settings or StoreConfig()), key)


def open_source(text: str, settings: StoreConfig, revision: str | None = None) -> Place:
    """Return the place of weights to load: as `open_location` does, and the snapshot of a model's id (`hub_folder`).

    Raises: ConfigError if the client cannot be made; CheckpointNotFoundError for a revision that was not downloaded.
    """
    return open_location(hub_folder(text, revision) if split_url(text) is None else text, settings=settings)


def may_pass(error: BaseException) -> bool:
    """Return whether an error says nothing about the file, such as ESTALE, ENOMEM or EACCES.

    A bucket's client has asked again for `checkpoint.store.retry_seconds` before its error is raised.
    """
    if not isinstance(error, OSError) or isinstance(error, CheckpointError | StoreError):
        return False
    return error.errno is not None and error.errno != errno.EIO and error.errno not in _OF_NAMES


def read_twice(path: _Place, read: Callable[[_Place], _Value], waits: Sequence[float] | None = None) -> _Value:
    """Return `read(path)`. What it finds damaged counts as damaged if it is so again when the disk or bucket is asked.

    `read` raises CorruptCheckpointError for wrong bytes, and opens the file itself. After an error that may pass it is
    called again after `waits`, by default WAITS_SECONDS.
    Raises: CorruptCheckpointError, also for a file that ends too early and for EIO; any other OSError as it is.
    """
    left = [*(WAITS_SECONDS if waits is None else waits)]
    doubt: Exception | None = None
    while True:
        try:
            value = read(path)
        except StoreError:
            raise
        except (CorruptCheckpointError, EOFError, OSError) as error:
            if may_pass(error) and left:
                logger.warning("%s: %s; reading it again in %g s", path, error, left[0])
                time.sleep(left.pop(0))
                continue
            if not isinstance(error, CorruptCheckpointError | EOFError) and error.errno != errno.EIO:
                raise
            if doubt is None:
                doubt, path = error, store_of(path).afresh(path)
                continue
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                f"{path}: cannot be read ({error}). Load another step, or copy the file again from where it is whole",
                str(path),
            ) from error
        if doubt is not None:
            logger.warning("%s was read a second time, which went well; the first time: %s", path, doubt)
        return value
