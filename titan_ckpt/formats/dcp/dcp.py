"""Reading the torch.distributed.checkpoint format: folders of `dcp.save` and torchtitan.

writer.py writes them. Nothing in them is trusted: `.metadata` is read as data (metadata.py), every item is loaded
with `weights_only`, and a path that leaves the folder is refused.
Source: torch/distributed/checkpoint/{metadata,filesystem,planner_helpers}.py.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from titan_ckpt import progress
from titan_ckpt.disk.files import IO_BYTES, Reader
from titan_ckpt.disk.kernel import ALIGNMENT, advise, round_up
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.filling import ByChunk, ChunkSource, DcpFill, Stored
from titan_ckpt.formats.dcp.metadata import METADATA, read_metadata, saved_paths, storage_table
from titan_ckpt.formats.reading.slices import put
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Block, Chunk, Entry, TensorInfo, info_of
from titan_ckpt.geometry.requests import Fill, TensorReader
from titan_ckpt.stores.store import Place, store_of

_ITEM = TensorInfo((), torch.uint8)
"""In place of the shape and dtype of what is no tensor."""


class DcpReader(TensorReader):
    """A DCP folder. `tensors` lists its tensors; `item(name)` returns an item that is no tensor."""

    format = "dcp"
    path: Place
    paths: dict[str, tuple[str, ...]]
    """Name -> the keys by which the value was nested when it was saved, as far as the folder says so."""

    def __init__(self, path: Place) -> None:
        """Read the metadata. Raises: CorruptCheckpointError for anything but plain, contained metadata."""
        self._begin(path, METADATA)
        metadata = read_metadata(path / METADATA)
        self._sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                for chunk in entry.chunks:
                    self._sizes[name, tuple(chunk.offsets)] = tuple(chunk.sizes)
        self.paths = saved_paths(metadata)
        for file in {info.relative_path for info in storage_table(metadata).values()}:
            self._require_contained(file)
        for index, info in storage_table(metadata).items():
            stored = self._stored(index, info)
            if index.fqn in self._tensors:
                self._chunks.setdefault(index.fqn, []).append(stored)
            else:
                self.items[index.fqn] = stored

    def _begin(self, path: Place, table: str) -> None:
        """Bind to a folder before its table of places is read."""
        self.path = path
        self._table = path / table
        self._tensors: dict[str, TensorInfo] = {}
        self._chunks: dict[str, list[Stored]] = {}
        self.items: dict[str, Stored] = {}
        """The place of each item that is no tensor."""
        self.paths = {}
        self._checked: set[str] = set()
        self._objects: dict[str, Reader] = {}
        self._unread: tuple[Stored, Any] | None = None
        """The last chunk, if it was read in part: the next request is likely to be for the rest of it."""

    def stored_chunks(self) -> dict[str, list[Chunk]]:
        """Return the parts in which the folder holds each tensor."""
        return {name: [stored.chunk for stored in parts] for name, parts in self._chunks.items()}

    def item(self, name: str) -> Any:
        """Return an item that is no tensor. Raises: CorruptCheckpointError if it is more than plain data; KeyError."""
        return self._load(self.items[name])

    def plan(self, requests: Sequence[Block]) -> Fill:
        """Find the stored chunks of every request, and look at the sizes of their files.

        Raises: CorruptCheckpointError for chunks that overlap, leave a hole or are cut off. The function that fills
        the requests, one stored chunk at a time, raises it for values that are not what the metadata says.
        """
        for key in {request.key for request in requests} - self._checked:
            self._require_disjoint(key)
        by_chunk: dict[Stored, list[Block]] = {}
        for request in requests:
            covered = 0
            for stored in self._chunks.get(request.key, []):
                part = stored.chunk.intersect(request.chunk)
                if part is not None:
                    by_chunk.setdefault(stored, []).append(request)
                    covered += part.numel
            if covered != request.chunk.numel:
                raise CorruptCheckpointError(
                    f"{self.path}: {covered} of {request.chunk.numel} elements of {request.key} at "
                    f"{request.chunk.offsets} are stored: was a rank's file left out?",
                    str(self.path),
                )
        self._require_whole(by_chunk)
        # in the order of the files: where reads are requests, one of them gets items near each other
        return DcpFill(self, {stored: by_chunk[stored] for stored in sorted(by_chunk, key=attrgetter("at"))})

    def shared(self, by_chunk: ByChunk) -> list[ChunkSource]:
        """Return what of each file several ranks may read together."""
        of_files: dict[str, list[Stored]] = {}
        for stored in by_chunk:
            of_files.setdefault(stored.at[0], []).append(stored)
        return [ChunkSource(self, name, chunks, by_chunk) for name, chunks in of_files.items()]

    def fill(self, by_chunk: ByChunk) -> int:
        """Fill requests, one stored chunk at a time; return the bytes of the chunks in their files."""
        total = sum(stored.chunk.numel * stored.info.dtype.itemsize for stored in by_chunk)
        with progress.shown(f"loading {self.path.name}", total) as count:
            self._fill_each(by_chunk, count)
        return sum(num_bytes for _, _, num_bytes in map(attrgetter("at"), by_chunk))

    def _fill_each(self, by_chunk: ByChunk, count: progress.Count) -> None:
        for stored, wanting in by_chunk.items():
            if self._unread is None or self._unread[0] is not stored:
                self._unread = None  # before the next chunk is loaded
                self._unread = stored, self._load(stored)
            data = self._unread[1]
            self._put(stored, data, wanting)
            if sum(part.numel for r in wanting if (part := stored.chunk.intersect(r.chunk))) >= stored.chunk.numel:
                self._unread = None
            count(data.nbytes)
            del data

    def put_from(self, memory: memoryview, stored: Stored, wanting: Sequence[Block]) -> None:
        """Fill requests from a stored chunk in memory of `Buffer`, whose pages are freed while torch copies the values.

        Raises: CorruptCheckpointError.
        """
        freed: list[tuple[int, int]] = []

        def read_into(views: list[memoryview], offset: int) -> None:
            for at in range(0, len(views[0]), IO_BYTES):
                view, start = views[0][at : at + IO_BYTES], offset + at
                stop = start + len(view)
                if any(start < last and first < stop for first, last in freed):
                    raise EOFError("torch has read the same values twice")
                view[:] = memory[start:stop]
                if len(view) == IO_BYTES:
                    freed.append((round_up(start), stop - stop % ALIGNMENT))
                    advise(memory[slice(*freed[-1])], mmap.MADV_DONTNEED)

        with self.reading(stored):
            data = _loaded(_Part(read_into, 0, stored.at[2]))
        self._put(stored, data, wanting)

    def _put(self, stored: Stored, data: Any, wanting: Sequence[Block]) -> None:
        plain = type(data) is torch.Tensor and data.layout is torch.strided and data.device.type == "cpu"
        expected = TensorInfo(stored.chunk.sizes, stored.info.dtype)
        if not plain or info_of(data) != expected:
            found = str(info_of(data)) if plain else f"a {type(data).__name__} that is not plain data"
            raise self._corrupt(stored, f"holds {found}, its metadata says {expected}")
        for request in wanting:
            part = stored.chunk.intersect(request.chunk)
            assert part is not None
            put(request.data, request.chunk, part, data[part.within(stored.chunk)])

    def close(self) -> None:
        """Release the last chunk; no file stays open."""
        self._unread = None
        self._objects.clear()

    def _require_contained(self, file: str) -> None:
        try:
            outside = not store_of(self.path).holds(self.path, file)
        except (ValueError, OSError):  # the path cannot be the name of a file
            outside = True
        if outside:
            raise CorruptCheckpointError(
                f"{self._table} points outside the folder, at {file!r}. Take another checkpoint",
                str(self.path),
            )

    def _require_disjoint(self, key: str) -> None:
        """Refuse overlapping chunks: together with a hole elsewhere they could seem to be complete."""
        if pair := overlap([stored.chunk for stored in self._chunks.get(key, [])]):
            raise CorruptCheckpointError(
                f"{self._table}: {key} is stored twice at {list(pair[0].offsets)}+{list(pair[0].sizes)} and "
                f"{list(pair[1].offsets)}+{list(pair[1].sizes)}. Take another checkpoint",
                str(self.path),
            )
        self._checked.add(key)

    def _stored(self, index: MetadataIndex, info: _StorageInfo) -> Stored:
        if info.transform_descriptors:
            raise CorruptCheckpointError(
                f"{self._table}: {index.fqn} is stored with {list(info.transform_descriptors)}, which is not "
                "supported: save it again without stream transforms",
                str(self.path),
            )
        tensor, chunk = self._tensors.get(index.fqn, _ITEM), Chunk((), ())
        if index.fqn in self._tensors:
            offsets = tuple(index.offset or (0,) * len(self._tensors[index.fqn].shape))
            if (index.fqn, offsets) not in self._sizes:
                raise CorruptCheckpointError(
                    f"{self._table}: {index.fqn} at {offsets} is stored but not described", str(self.path)
                )
            chunk = Chunk(offsets, self._sizes[index.fqn, offsets])
        return Entry(index.fqn, tensor, chunk, (str(PurePosixPath(info.relative_path)), info.offset, info.length))

    def _load(self, stored: Stored) -> Any:
        name, start, num_bytes = stored.at
        with self.reading(stored), self.opened(name) as file:
            if file.num_bytes < start + num_bytes:
                raise self._corrupt(stored, "is cut off")
            if file.is_remote:  # torch asks for a few bytes at a time
                file.fetch(start, num_bytes)
            return _loaded(_Part(file.read_into, start, num_bytes))

    @contextmanager
    def reading(self, stored: Stored) -> Iterator[None]:
        """Say of an error which file could not be read, and for what. Raises: CorruptCheckpointError; OSError."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._corrupt(stored, "is missing") from error
        except (OSError, CorruptCheckpointError):
            raise
        except Exception as error:  # a pickle can fail in any way
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise self._corrupt(stored, f"cannot be read as plain data: {reason}") from error

    @contextmanager
    def opened(self, name: str) -> Iterator[Reader]:
        """Open a file; an object stays open, because its head is got each time. Raises: FileNotFoundError; OSError."""
        file = self._objects.get(name) or store_of(self.path).open(self.path / name)
        if file.is_remote:
            self._objects[name] = file
        try:
            yield file
        finally:
            if not file.is_remote:
                file.close()

    def _require_whole(self, chunks: Collection[Stored]) -> None:
        """Refuse chunks whose files are missing or too short, before any of them is read."""
        sizes: dict[str, int] = {}
        for stored in chunks:
            name, start, num_bytes = stored.at
            if name not in sizes:
                try:
                    sizes[name] = store_of(self.path).size(self.path / name)
                except FileNotFoundError as error:
                    raise self._corrupt(stored, "is missing") from error
            if sizes[name] < start + num_bytes:
                raise self._corrupt(stored, "is cut off")

    def _corrupt(self, stored: Stored, what: str) -> CorruptCheckpointError:
        path = self.path / stored.at[0]
        return CorruptCheckpointError(f"{path}, needed for {stored.name}, {what}. Take another checkpoint", str(path))


def _loaded(part: _Part) -> Any:
    return torch.load(cast(IO[bytes], part), weights_only=True, map_location="cpu")


class _Part(io.RawIOBase):
    """A part of a file, presented as a file, so that torch.load keeps its content in memory only once."""

    def __init__(self, read_into: Callable[[list[memoryview], int], None], offset: int, num_bytes: int) -> None:
        super().__init__()
        self._read_into, self._offset, self._num_bytes = read_into, offset, num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._num_bytes - self._position))
        if count:
            self._read_into([view[:count]], self._offset + self._position)
        self._position += count
        return count
