"""Reading the metadata file of the torch.distributed.checkpoint format as data: nothing in it is trusted.

Owns the unpickler, which knows a dozen harmless types, and the check of every field. Reads no tensors.
Source: torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titan_ckpt.disk import posix
from titan_ckpt.errors import CorruptCheckpointError

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


class _SafeUnpickler(pickle._Unpickler):  # noqa: SLF001 - the only name it has
    """Finds harmless names only. It is the Python class: the C one allocates what a file claims, up to 64 GiB."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _MODULES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")


def read_metadata(path: Path) -> Metadata:
    """Return a folder's metadata with every field checked. Nothing in the file is executed.

    Raises: OSError; CorruptCheckpointError for anything that is no valid metadata.
    """
    try:
        data = posix.read_whole(path, _MAX_METADATA_BYTES)
        metadata = _SafeUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        _check_types(metadata)
    except Exception as error:  # a pickle can fail in any way
        if isinstance(error, OSError):
            raise
        cause = error if isinstance(error, pickle.UnpicklingError) else repr(error)
        raise CorruptCheckpointError(
            f"{path} is not the metadata of a DCP checkpoint, and may be hostile: {cause}. Nothing was executed",
            str(path),
        ) from error
    return metadata


def storage_table(metadata: Metadata) -> dict[Any, Any]:
    """Return index -> place of every stored chunk and item."""
    table: dict[Any, Any] | None = metadata.storage_data
    return table or {}


def _check_types(metadata: Metadata) -> None:
    """Check the types and values of all fields before anything uses them. Raises: UnpicklingError."""
    for index, info in storage_table(metadata).items():
        if not isinstance(info, _StorageInfo) or type(index) is not MetadataIndex or type(index.fqn) is not str:
            raise pickle.UnpicklingError("its storage table is malformed")
        sizes = (info.offset, info.length, *(() if index.offset is None else index.offset))
        if not all(type(n) is int and n >= 0 for n in sizes) or type(info.relative_path) is not str:
            raise pickle.UnpicklingError(f"the place of {index.fqn} is malformed")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise pickle.UnpicklingError("a name is malformed")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    shape: tuple[Any, ...] = tuple(entry.size)  # unpickled: its types are what is checked here
    dtype: Any = entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError(f"the shape or dtype of {name} is malformed")
    for chunk in entry.chunks:
        box = list(zip(shape, chunk.offsets, chunk.sizes, strict=True))
        if not all(type(o) is int and type(n) is int and o >= 0 and n >= 0 and o + n <= size for size, o, n in box):
            raise pickle.UnpicklingError(f"a chunk of {name} is not inside its shape")
    filled = [tuple(chunk.offsets) for chunk in entry.chunks if math.prod(chunk.sizes)]
    if len(set(filled)) != len(filled):
        raise pickle.UnpicklingError(f"two chunks of {name} begin at the same place")
