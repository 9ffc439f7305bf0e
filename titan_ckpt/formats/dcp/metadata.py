"""Reading the metadata file of the torch.distributed.checkpoint format as data: nothing in it is trusted.

Owns the check of every field; unpickle.py makes the objects. Reads no tensors.
Source: torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_ckpt.encoding.strict_json import is_unicode
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.unpickle import MAX_PATH, unpickle
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30


@gc_paused()
def read_metadata(path: Place) -> Metadata:
    """Return a folder's metadata with every field checked. Nothing in the file is executed.

    Raises: OSError; CorruptCheckpointError for anything that is no valid metadata.
    """
    data = store_of(path).read_whole(path, MAX_METADATA_BYTES)
    try:
        metadata = unpickle(data)
        if not isinstance(metadata, Metadata):
            raise UnpicklingError(f"it holds a {type(metadata).__name__}")
        _check_types(metadata)
    except (UnpicklingError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{path} is not the metadata of a DCP checkpoint, and may be hostile: {error}. Nothing was executed. "
            "Take another checkpoint",
            str(path),
        ) from error
    return metadata


def storage_table(metadata: Metadata) -> dict[Any, Any]:
    """Return index -> place of every stored chunk and item."""
    table: dict[Any, Any] | None = metadata.storage_data
    return table or {}


def saved_paths(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """Return name -> path in the nested state that was saved; a name with anything but text in its path is left out."""
    paths: Any = metadata.planner_data
    if type(paths) is not dict:
        return {}
    plain = ((n, p) for n, p in paths.items() if type(n) is str and type(p) is tuple and p)
    return {name: path for name, path in plain if all(type(part) is str for part in path)}


def _check_types(metadata: Metadata) -> None:
    """Check the types and values of all fields before anything uses them. Raises: UnpicklingError."""
    entries, places = (vars(metadata).get(name) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(places, dict | None):
        raise UnpicklingError("its tables of names and places are malformed")
    for index, info in (places or {}).items():
        _check_place(index, info)
    listed: set[int] = set()
    for name, entry in entries.items():
        if type(name) is not str or not is_unicode(name):
            raise UnpicklingError("a name is malformed")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(name, vars(entry))
            if id(entry.chunks) in listed:  # thousands of names with thousands of chunks take few bytes otherwise
                raise UnpicklingError(f"the chunks of {name!r:.200} are those of another tensor")
            listed.add(id(entry.chunks))
        elif type(entry) is not BytesStorageMetadata:
            raise UnpicklingError(f"the entry of {name!r:.200} is malformed")


def _check_place(index: Any, info: Any) -> None:
    if type(info) is not _StorageInfo or type(index) is not MetadataIndex:
        raise UnpicklingError("its table of places is malformed")
    name, offset = vars(index).get("fqn"), vars(index).get("offset")
    place = vars(info)
    transforms = place.get("transform_descriptors")
    sizes = (place.get("offset"), place.get("length"), *(offset or ()))
    if (
        not all(type(n) is int and n >= 0 for n in sizes)
        or type(place.get("relative_path")) is not str
        or len(place["relative_path"]) > MAX_PATH
        or not (transforms is None or _is_texts(transforms))
    ):
        raise UnpicklingError(f"the place of {name!r:.200} is malformed")


def _is_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) < 64 and all(type(text) is str for text in value)


def _check_tensor(name: str, entry: Mapping[str, Any]) -> None:
    shape, properties, chunks = entry.get("size"), entry.get("properties"), entry.get("chunks")
    dtype = vars(properties).get("dtype") if type(properties) is TensorProperties else None
    if not isinstance(dtype, torch.dtype) or type(shape) is not torch.Size or any(n < 0 for n in shape):
        raise UnpicklingError(f"the shape or dtype of {name!r:.200} is malformed")
    if type(chunks) is not list or not all(type(chunk) is ChunkStorageMetadata for chunk in chunks):
        raise UnpicklingError(f"the chunks of {name!r:.200} are malformed")
    filled: set[torch.Size] = set()
    for chunk in chunks:
        offsets: Any = vars(chunk).get("offsets")
        sizes: Any = vars(chunk).get("sizes")
        comparable = type(offsets) is type(sizes) is torch.Size and len(offsets) == len(sizes) == len(shape)
        if not comparable or not all(
            o >= 0 and n >= 0 and o + n <= size for size, o, n in zip(shape, offsets, sizes, strict=True)
        ):
            raise UnpicklingError(f"a chunk of {name!r:.200} is not inside its shape")
        if math.prod(sizes):
            if offsets in filled:
                raise UnpicklingError(f"two chunks of {name!r:.200} begin at the same place")
            filled.add(offsets)
