"""The torch.distributed.checkpoint format, for interchange: folders of `dcp.save` and torchtitan, read and written.

Owns that format's files. Nothing in them is trusted: `.metadata` goes through an unpickler that knows eleven harmless
types, every item is loaded with `weights_only`, and a path that leaves the folder is refused.
Source: torch/distributed/checkpoint/{metadata,filesystem,planner_helpers}.py.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

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

from titan_ckpt import posix
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.staged_folder import StagedFolder, write_file
from titan_ckpt.strict_json import Json
from titan_ckpt.tensors import Chunk, TensorInfo, blocks_of, info_of
from titan_ckpt.types import StateDict

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_MODULES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _MODULES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")


@dataclass(frozen=True, slots=True)
class _Stored:
    chunk: Chunk
    file: str
    offset: int
    num_bytes: int


class DcpReader(TensorReader):
    """A DCP folder. `tensors` holds its tensors; `item(name)` gives what is not a tensor."""

    format = "dcp"

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises: CorruptCheckpointError for anything but plain, contained metadata."""
        self.path = path
        metadata = _read_metadata(path / METADATA)
        self._tensors: dict[str, TensorInfo] = {}
        self._sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self._chunks: dict[str, list[_Stored]] = {}
        self._items: dict[str, _Stored] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                for c in entry.chunks:
                    self._sizes[name, tuple(c.offsets)] = tuple(c.sizes)
        for index, info in _table(metadata).items():
            stored = self._contained(index, info)
            if index.fqn in self._tensors:
                self._chunks.setdefault(index.fqn, []).append(stored)
            else:
                self._items[index.fqn] = stored

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def items(self) -> list[str]:
        """Return the names of what is not a tensor."""
        return list(self._items)

    def item(self, name: str) -> Any:
        """Return one non-tensor item. Raises: CorruptCheckpointError if it is more than plain data."""
        return self._load(name, self._items[name])

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request, one stored chunk at a time. Raises: CorruptCheckpointError."""
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
        for (key, i), wanting in by_chunk.items():
            stored = self._chunks[key][i]
            data = self._load(key, stored)
            if not isinstance(data, torch.Tensor) or tuple(data.shape) != stored.chunk.sizes:
                raise self._corrupt(stored, key, "holds something else than its metadata says")
            for request in wanting:
                part = stored.chunk.intersect(request.chunk)
                assert part is not None
                if tuple(request.into.shape) == request.chunk.sizes:
                    request.into[part.within(request.chunk)].copy_(data[part.within(stored.chunk)])
                else:
                    self._copy_reshaped(request, part, data[part.within(stored.chunk)])

    @staticmethod
    def _copy_reshaped(request: ReadRequest, part: Chunk, values: torch.Tensor) -> None:
        """Fill part of a destination that has another shape than its chunk, by its row-major positions."""
        positions = torch.arange(request.chunk.numel).view(request.chunk.sizes)[part.within(request.chunk)].reshape(-1)
        index = torch.unravel_index(positions, request.into.shape)
        request.into[index] = values.reshape(-1).to(request.into.dtype)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _contained(self, index: MetadataIndex, info: _StorageInfo) -> _Stored:
        relative = PurePosixPath(info.relative_path)
        target = self.path / relative
        if not target.resolve().is_relative_to(self.path.resolve()) or target.is_symlink():
            raise CorruptCheckpointError(
                f"{self.path / METADATA}: {index.fqn} points outside the folder, at {info.relative_path!r}",
                str(self.path),
            )
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
        return _Stored(chunk, str(relative), info.offset, info.length)

    def _load(self, name: str, stored: _Stored) -> Any:
        path = self.path / stored.file
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < stored.offset + stored.num_bytes:
                    raise self._corrupt(stored, name, "is cut off")
                file.seek(stored.offset)
                return torch.load(io.BytesIO(file.read(stored.num_bytes)), weights_only=True, map_location="cpu")
        except FileNotFoundError as error:
            raise self._corrupt(stored, name, "is missing") from error
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            raise self._corrupt(stored, name, f"cannot be read as plain data: {str(error).splitlines()[0]}") from error

    def _corrupt(self, stored: _Stored, name: str, what: str) -> CorruptCheckpointError:
        path = self.path / stored.file
        return CorruptCheckpointError(f"{path}, needed for {name}, {what}. Take another checkpoint", str(path))


def export_dcp(folder: Path, tensors: StateDict, coordinator: Coordinator) -> None:
    """Write a state dict as a DCP folder and publish it whole. Lazy tensors are resolved one at a time. Collective.

    Raises: FileExistsError; OSError; PeerError. Nothing is left under the folder's name then.
    """
    staged: StagedFolder | None = None
    error: BaseException | None = None
    path = ""
    try:
        if coordinator.rank == 0:
            staged = StagedFolder.begin(folder)
            path = str(staged.path)
    except Exception as e:
        error = e
    path = str(coordinator.broadcast("dcp-begin", path, error))
    try:
        write_dcp(Path(path), tensors, coordinator)
        try:
            if staged is not None:
                staged.publish(fsync=True)
        except Exception as e:
            error = e
        coordinator.barrier("dcp-publish", error)
    except BaseException:
        if staged is not None and staged.path.exists():
            staged.abandon()
        raise


def write_dcp(folder: Path, tensors: StateDict, coordinator: Coordinator) -> None:
    """Write a state dict so that plain `dcp.load` reads it. Lazy tensors are resolved one at a time.

    Collective. 1 Every rank says which chunks it holds. 2 Of equal chunks the lowest rank writes; every rank writes its
    own file. 3 Rank 0 writes the metadata. All files are synced; publishing the folder is the caller's.
    Raises: OSError; PeerError.
    """
    places: list[Json] = []
    error: BaseException | None = None
    data_file = f"__{coordinator.rank}_0.distcp"
    alone = coordinator.world_size == 1  # then nothing is asked of lazy tensors before they are written
    held: Json = (
        {} if alone else {name: [list(b.chunk.offsets) for b in blocks_of(value)] for name, value in tensors.items()}
    )
    owner: dict[tuple[str, tuple[int, ...]], int] = {}
    tables: list[Any] = coordinator.gather("dcp-chunks", held)
    for rank, table in enumerate(tables):
        for name, offsets in table.items():
            for o in offsets:
                owner.setdefault((name, tuple(o)), rank)
    try:
        fd = posix.open_exclusive(folder / data_file)
        try:
            position = 0
            for name, value in tensors.items():
                for block in blocks_of(value):
                    if owner.get((name, block.chunk.offsets), coordinator.rank) != coordinator.rank:
                        continue
                    buffer = io.BytesIO()
                    torch.save(block.data.detach().cpu().contiguous().clone(), buffer)
                    posix.pwrite_all(fd, buffer.getbuffer(), position)
                    places.append(
                        [
                            name,
                            [*block.chunk.offsets],
                            [*block.chunk.sizes],
                            data_file,
                            position,
                            len(buffer.getbuffer()),
                        ]
                    )
                    position += len(buffer.getbuffer())
            posix.fsync(fd)
        finally:
            posix.close(fd)
    except Exception as e:
        error = e
    infos: Json = {
        n: [list(info_of(v).shape), str(info_of(v).dtype).removeprefix("torch.")] for n, v in tensors.items()
    }
    gathered: list[Any] = coordinator.gather("dcp-places", {"places": places, "infos": infos}, error)
    try:
        if coordinator.rank == 0:
            _write_metadata(folder, gathered)
    except Exception as e:
        error = e
    coordinator.barrier("dcp-metadata", error)


def _write_metadata(folder: Path, gathered: list[Any]) -> None:
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for one in gathered:
        for name, (shape, dtype) in one["infos"].items():
            properties = TensorProperties(dtype=getattr(torch, dtype))
            entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
        for name, offsets, sizes, file, position, length in one["places"]:
            chunks = entries[name].chunks
            storage[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(file, position, length)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    metadata = Metadata(dict(entries), planner_data={n: (n,) for n in entries}, storage_data=storage)
    metadata.storage_meta = StorageMeta()
    write_file(folder / METADATA, pickle.dumps(metadata), fsync=True)


def _read_metadata(path: Path) -> Metadata:
    try:
        data = posix.read_whole(path, _MAX_METADATA_BYTES)
        metadata = _SafeUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        _check_types(metadata)
    except Exception as error:  # a pickle can fail in any way
        if isinstance(error, OSError):
            raise
        raise CorruptCheckpointError(
            f"{path} is not the metadata of a DCP checkpoint, and may be hostile: {error}. Nothing was executed",
            str(path),
        ) from error
    return metadata


def _table(metadata: Metadata) -> dict[Any, Any]:
    table: dict[Any, Any] | None = metadata.storage_data
    return table or {}


def _check_types(metadata: Metadata) -> None:
    """Refuse a metadata whose fields are not what they should be, before anything uses them."""
    for index, info in _table(metadata).items():
        sizes = (info.offset, info.length)
        if not isinstance(info, _StorageInfo) or type(index) is not MetadataIndex or type(index.fqn) is not str:
            raise pickle.UnpicklingError("its storage table is malformed")
        if not all(type(n) is int and n >= 0 for n in sizes) or not isinstance(info.relative_path, str):
            raise pickle.UnpicklingError(f"the place of {index.fqn} is malformed")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not isinstance(entry.properties.dtype, torch.dtype):
            raise pickle.UnpicklingError(f"the dtype of {name} is malformed")
