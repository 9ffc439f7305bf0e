"""Reading and writing the torch.distributed.checkpoint format: folders of `dcp.save` and torchtitan.

Owns that format's files. Nothing in them is trusted: `.metadata` is read as data (metadata.py), every item is loaded
with `weights_only`, and a path that leaves the folder is refused.
Source: torch/distributed/checkpoint/{metadata,filesystem,planner_helpers}.py.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_ckpt import progress
from titan_ckpt.disk import posix
from titan_ckpt.disk.direct import FileReader
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.metadata import METADATA, read_metadata, saved_paths, storage_table
from titan_ckpt.formats.publish.run import published
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, TensorInfo, blocks_of, dtype_name, info_of, layout_of
from titan_ckpt.geometry.requests import Fill, ReadRequest, TensorReader
from titan_ckpt.types import StateDict
from titan_ckpt.weights.write_view import FileGroup


@dataclass(frozen=True, slots=True)
class _Stored:
    chunk: Chunk
    file: str
    offset: int
    num_bytes: int


class DcpReader(TensorReader):
    """A DCP folder. `tensors` lists its tensors; `item(name)` returns an item that is no tensor."""

    format = "dcp"

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises: CorruptCheckpointError for anything but plain, contained metadata."""
        self.path = path
        metadata = read_metadata(path / METADATA)
        self._tensors: dict[str, TensorInfo] = {}
        self._sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self._chunks: dict[str, list[_Stored]] = {}
        self._items: dict[str, _Stored] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                for c in entry.chunks:
                    self._sizes[name, tuple(c.offsets)] = tuple(c.sizes)
        self.paths: dict[str, tuple[str, ...]] = saved_paths(metadata)
        """Name -> the keys by which the value was nested when it was saved, as far as the folder says so."""
        self._checked: set[str] = set()
        self._unread: tuple[_Stored, Any] | None = None
        """The last chunk, if it was read in part: the next request is likely to be for the rest of it."""
        for file in {info.relative_path for info in storage_table(metadata).values()}:
            self._require_contained(file)
        for index, info in storage_table(metadata).items():
            stored = self._stored(index, info)
            if index.fqn in self._tensors:
                self._chunks.setdefault(index.fqn, []).append(stored)
            else:
                self._items[index.fqn] = stored

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def stored_chunks(self) -> dict[str, list[Chunk]]:
        """Return the parts in which the folder holds each tensor."""
        return {name: [stored.chunk for stored in parts] for name, parts in self._chunks.items()}

    @property
    def items(self) -> list[str]:
        """Return the names of the items that are no tensors."""
        return list(self._items)

    def item(self, name: str) -> Any:
        """Return an item that is no tensor. Raises: CorruptCheckpointError if it is more than plain data; KeyError."""
        return self._load(name, self._items[name])

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request, one stored chunk at a time; extra memory is one chunk. Raises: CorruptCheckpointError."""
        self.plan(requests)()

    def plan(self, requests: Sequence[ReadRequest]) -> Fill:
        """Find the stored chunks of every request, and look at the sizes of their files.

        Raises: CorruptCheckpointError for chunks that overlap, leave a hole or are cut off. The function that fills
        the requests raises it for values that are not what the metadata says.
        """
        for key in {request.key for request in requests} - self._checked:
            self._require_disjoint(key)
        by_chunk: dict[tuple[str, int], list[ReadRequest]] = {}
        for request in requests:
            covered = 0
            for i, stored in enumerate(self._chunks.get(request.key, [])):
                part = stored.chunk.intersect(request.chunk)
                if part is not None:
                    by_chunk.setdefault((request.key, i), []).append(request)
                    covered += part.numel
            if covered != request.chunk.numel:
                raise CorruptCheckpointError(
                    f"{self.path}: {covered} of {request.chunk.numel} elements of {request.key} at "
                    f"{request.chunk.offsets} are stored: was a rank's file left out?",
                    str(self.path),
                )
        self._require_whole(by_chunk)
        return partial(self._fill, by_chunk)

    def _fill(self, by_chunk: Mapping[tuple[str, int], Sequence[ReadRequest]]) -> None:
        for (key, i), wanting in by_chunk.items():
            stored = self._chunks[key][i]
            if self._unread is None or self._unread[0] is not stored:
                self._unread = None  # before the next chunk is loaded
                self._unread = stored, self._load(key, stored)
            data = self._unread[1]
            plain = type(data) is torch.Tensor and data.layout is torch.strided and data.device.type == "cpu"
            expected = TensorInfo(stored.chunk.sizes, self._tensors[key].dtype)
            if not plain or info_of(data) != expected:
                found = str(info_of(data)) if plain else f"a {type(data).__name__} that is not plain data"
                raise self._corrupt(stored, key, f"holds {found}, its metadata says {expected}")
            for request in wanting:
                part = stored.chunk.intersect(request.chunk)
                assert part is not None
                if tuple(request.into.shape) == request.chunk.sizes:
                    request.into[part.within(request.chunk)].copy_(data[part.within(stored.chunk)])
                else:
                    self._copy_reshaped(request, part, data[part.within(stored.chunk)])
            if sum(part.numel for r in wanting if (part := stored.chunk.intersect(r.chunk))) >= stored.chunk.numel:
                self._unread = None
            del data

    @staticmethod
    def _copy_reshaped(request: ReadRequest, part: Chunk, values: torch.Tensor) -> None:
        """Fill part of a destination whose shape differs from its chunk's, by row-major positions."""
        positions = torch.arange(request.chunk.numel).view(request.chunk.sizes)[part.within(request.chunk)].reshape(-1)
        index = torch.unravel_index(positions, request.into.shape)
        request.into[index] = values.reshape(-1).to(request.into.dtype)

    def close(self) -> None:
        """Release the last chunk; no file stays open."""
        self._unread = None

    def _require_contained(self, file: str) -> None:
        try:
            target = self.path / PurePosixPath(file)
            outside = not target.resolve().is_relative_to(self.path.resolve()) or target.is_symlink()
        except (ValueError, OSError):  # the path cannot be the name of a file
            outside = True
        if outside:
            raise CorruptCheckpointError(
                f"{self.path / METADATA} points outside the folder, at {file!r}. Take another checkpoint",
                str(self.path),
            )

    def _require_disjoint(self, key: str) -> None:
        """Refuse overlapping chunks: together with a hole elsewhere they could seem to be complete."""
        if pair := overlap([stored.chunk for stored in self._chunks.get(key, [])]):
            raise CorruptCheckpointError(
                f"{self.path / METADATA}: {key} is stored twice at {list(pair[0].offsets)}+{list(pair[0].sizes)} and "
                f"{list(pair[1].offsets)}+{list(pair[1].sizes)}. Take another checkpoint",
                str(self.path),
            )
        self._checked.add(key)

    def _stored(self, index: MetadataIndex, info: _StorageInfo) -> _Stored:
        if info.transform_descriptors:
            raise CorruptCheckpointError(
                f"{self.path / METADATA}: {index.fqn} is stored with {list(info.transform_descriptors)}, which is not "
                "supported: save it again without stream transforms",
                str(self.path),
            )
        chunk = Chunk((), ())
        if index.fqn in self._tensors:
            offsets = tuple(index.offset or (0,) * len(self._tensors[index.fqn].shape))
            if (index.fqn, offsets) not in self._sizes:
                raise CorruptCheckpointError(
                    f"{self.path / METADATA}: {index.fqn} at {offsets} is stored but not described", str(self.path)
                )
            chunk = Chunk(offsets, self._sizes[index.fqn, offsets])
        return _Stored(chunk, str(PurePosixPath(info.relative_path)), info.offset, info.length)

    def _load(self, name: str, stored: _Stored) -> Any:
        try:
            file = FileReader(self.path / stored.file)
        except FileNotFoundError as error:
            raise self._corrupt(stored, name, "is missing") from error
        try:
            if file.num_bytes < stored.offset + stored.num_bytes:
                raise self._corrupt(stored, name, "is cut off")
            return torch.load(cast(IO[bytes], _Part(file, stored)), weights_only=True, map_location="cpu")
        except (OSError, CorruptCheckpointError):
            raise
        except Exception as error:  # a pickle can fail in any way
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise self._corrupt(stored, name, f"cannot be read as plain data: {reason}") from error
        finally:
            file.close()

    def _require_whole(self, chunks: Collection[tuple[str, int]]) -> None:
        """Refuse chunks whose files are missing or too short, before any of them is read."""
        sizes: dict[str, int] = {}
        for key, i in chunks:
            stored = self._chunks[key][i]
            if stored.file not in sizes:
                try:
                    sizes[stored.file] = (self.path / stored.file).stat().st_size
                except FileNotFoundError as error:
                    raise self._corrupt(stored, key, "is missing") from error
            if sizes[stored.file] < stored.offset + stored.num_bytes:
                raise self._corrupt(stored, key, "is cut off")

    def _corrupt(self, stored: _Stored, name: str, what: str) -> CorruptCheckpointError:
        path = self.path / stored.file
        return CorruptCheckpointError(f"{path}, needed for {name}, {what}. Take another checkpoint", str(path))


class _Part(io.RawIOBase):
    """A part of a file, presented as a file, so that torch.load keeps its content in memory only once."""

    def __init__(self, file: FileReader, stored: _Stored) -> None:
        super().__init__()
        self._file = file
        self._stored = stored
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stored.num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._stored.num_bytes - self._position))
        if count:
            self._file.read_into([view[:count]], self._stored.offset + self._position)
        self._position += count
        return count


class _Appender(io.RawIOBase):
    """A stream that appends to a file at once, so that torch.save never keeps a tensor in memory twice."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        posix.pwrite_all(self._fd, view, self.position)
        self.position += len(view)
        return len(view)


@dataclass(frozen=True, slots=True)
class DcpExport:
    """An export into a folder that `dcp.load` reads."""

    tensors: StateDict
    groups: tuple[FileGroup, ...] = ()
    """Ranks write shards as they are, so none are put together."""

    def write(self, folder: Path, coordinator: Coordinator) -> None:
        """Write the folder and publish it atomically. Lazy tensors are resolved one by one. Collective.

        Raises: FileExistsError; OSError; PeerError. Nothing has the folder's name then.
        """
        total = sum(info_of(value).nbytes for value in self.tensors.values())
        with (
            published(folder, coordinator, "dcp-", lambda: None) as (path, _),
            progress.shown(f"exporting {folder.name}", total // coordinator.world_size),
        ):
            write_dcp(path, self.tensors, coordinator)


def write_dcp(folder: Path, tensors: StateDict, coordinator: Coordinator) -> None:
    """Write a state dict so that plain `dcp.load` reads it. Lazy tensors are resolved one at a time.

    Collective. 1 Every rank posts the chunks that it holds. 2 The lowest rank that holds a chunk writes it, to its own
    file. 3 Rank 0 writes the metadata. All files are synced; the caller publishes the folder.
    Raises: OSError; PeerError.
    """
    alone = coordinator.world_size == 1  # then the layout of lazy tensors is not needed before they are written
    held: Json = {} if alone else {name: _offsets(value) for name, value in tensors.items()}
    writers = _writers(coordinator.gather("dcp-chunks", held))
    own = {name: {c for c, rank in chunks.items() if rank == coordinator.rank} for name, chunks in writers.items()}

    def write() -> dict[str, Any]:
        infos = {name: info_of(value) for name, value in tensors.items()}
        return {
            "places": _write_chunks(folder / f"__{coordinator.rank}_0.distcp", tensors, None if alone else own),
            "infos": {name: [list(info.shape), dtype_name(info.dtype)] for name, info in infos.items()},
        }

    of_ranks = coordinator.gather_results("dcp-places", write)
    coordinator.together("dcp-metadata", lambda: _write_metadata(folder, of_ranks) if coordinator.rank == 0 else None)


def _writers(tables: list[Any]) -> dict[str, dict[tuple[int, ...], int]]:
    """Return tensor -> offsets of a chunk -> the rank that writes it: the lowest of those that hold it."""
    writers: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, table in enumerate(tables):
        for name, chunks in table.items():
            for offsets in chunks:
                writers.setdefault(name, {}).setdefault(tuple(offsets), rank)
    return writers


def _write_chunks(path: Path, tensors: StateDict, own: Mapping[str, Collection[tuple[int, ...]]] | None) -> list[Json]:
    """Write chunks to a new file and sync it; return the place of each chunk.

    `own`: tensor -> offsets of the chunks that this rank writes; None: all chunks. Lazy tensors that are collective are
    resolved after an error too, because other ranks cannot resolve them alone. Raises: the first error.
    """
    places: list[Json] = []
    error: BaseException | None = None
    fd = -1
    try:
        fd = posix.open_exclusive(path)
    except Exception as e:
        error = e
    file = _Appender(fd)
    for name, value in tensors.items():
        if error is not None and not (isinstance(value, LazyTensor) and value.collective):
            continue
        try:
            for block in blocks_of(value):
                if error is None and (own is None or block.chunk.offsets in own.get(name, ())):
                    start = file.position
                    progress.advance(block.data.nbytes)
                    torch.save(_alone(block.data), cast(IO[bytes], file))
                    chunk: list[Json] = [[*block.chunk.offsets], [*block.chunk.sizes]]
                    places.append([name, *chunk, path.name, start, file.position - start])
        except Exception as e:
            error = error or e
    try:
        if fd >= 0:
            try:
                if error is None:
                    posix.fsync(fd)
            finally:
                posix.close(fd)
    except Exception as e:
        error = error or e
    if error is not None:
        raise error
    return places


def _offsets(value: torch.Tensor | LazyTensor) -> list[Json]:
    """Return the offsets of the chunks that this rank holds; a lazy tensor is computed only if it has no layout."""
    layout = layout_of(value)
    if isinstance(layout, tuple):
        return [list(chunk.offsets) for chunk in layout]
    return [list(block.chunk.offsets) for block in blocks_of(value if layout is None else layout)]


def _alone(data: torch.Tensor) -> torch.Tensor:
    """Return the values in memory that holds nothing else, because torch.save writes the whole storage of a view."""
    data = data.detach().cpu().contiguous()
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()


def _write_metadata(folder: Path, gathered: list[Any]) -> None:
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for of_rank in gathered:
        for name, (shape, dtype) in of_rank["infos"].items():
            properties = TensorProperties(dtype=getattr(torch, dtype))
            entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
        for name, offsets, sizes, file, position, length in of_rank["places"]:
            chunks = entries[name].chunks
            storage[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(file, position, length)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    metadata = Metadata(dict(entries), planner_data={n: (n,) for n in entries}, storage_data=storage)
    metadata.storage_meta = StorageMeta()
    posix.write_file(folder / METADATA, pickle.dumps(metadata))
