"""Reading folders of the package torch_checkpointing: metadata.pkl, and a file of each rank for each item.

Owns that format's metadata. metadata.pkl is read as data (metadata.py), every item with `weights_only`.
Source: torch_checkpointing 0.1.1, distributed_metadata.py, dtensor_metadata.py and checkpoint_layout.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from operator import add, gt
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_ckpt.disk import posix
from titan_ckpt.disk.files import FileReader
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, NotACheckpointError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.filling import ByChunk, Stored
from titan_ckpt.formats.dcp.metadata import MAX_METADATA_BYTES, unpickle
from titan_ckpt.geometry.chunks import Block, Chunk, Entry, Shape, TensorInfo, chunks_at, local_tensor
from titan_ckpt.geometry.requests import Fill
from titan_ckpt.process import gc_paused

METADATA = "metadata.pkl"
_MALFORMED = (
    UnpicklingError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_Cell = list[tuple[Chunk, tuple[slice, ...]]]
"""The chunks of a tensor that one rank holds, and where they are in its local tensor."""


class TorchCheckpointingReader(DcpReader):
    """A folder of torch_checkpointing. Its tensors are named by item and path: `model.layers.0.weight`."""

    path: Path  # not in a bucket, because a rank's file is mapped

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises: CorruptCheckpointError; NotACheckpointError for items in another serialization."""
        self._begin(path, METADATA)
        self._places: dict[tuple[str, str], tuple[tuple[Any, ...], _Cell]] = {}
        self._open: dict[str, Any] = {}
        data = posix.read_whole(path / METADATA, MAX_METADATA_BYTES)
        try:
            with gc_paused():
                self._take(unpickle(data))
        except CheckpointError:
            raise
        except _MALFORMED as error:
            raise CorruptCheckpointError(
                f"{self._table} is not the metadata of torch_checkpointing, and may be hostile: "
                f"{str(error) or type(error).__name__:.200}. Nothing was executed. Take another checkpoint",
                str(path),
            ) from error
        for file in {stored.at[0] for chunks in self._chunks.values() for stored in chunks}:
            self._require_contained(file)

    def fill(self, by_chunk: ByChunk) -> int:
        """Fill every request. A rank's file is mapped, so memory is that of the pages in use."""
        try:
            return super().fill(by_chunk)
        finally:
            self._open.clear()
            self._unread = None

    def plan(self, requests: Sequence[Block]) -> Fill:
        """Do as for DCP. What is mapped is not read together with other ranks, nor counted."""
        planned: Fill = super().plan(requests)

        def fill() -> None:
            planned()

        return fill

    def _take(self, metadata: Any) -> None:
        if type(metadata) is not dict or metadata.get("version") != "2.0":
            found = metadata.get("version") if type(metadata) is dict else type(metadata).__name__
            raise UnpicklingError(f"its version is {found!r}, expected '2.0'")
        for item, about in metadata["metadata"].items():
            layouts = {int(rank): layout for rank, layout in about["rank_to_layout_info"].items()}
            for text, groups in about["nested_path_to_metadata"].items():
                self._take_tensor(item, tuple(json.loads(text)), groups, layouts)

    def _take_tensor(self, item: str, path: tuple[Any, ...], groups: Any, layouts: Mapping[int, Any]) -> None:
        name = ".".join([item, *map(str, path)])
        chunks: dict[Chunk, Stored] = {}
        for group in groups:
            about = group["sharding_metadata"]
            shape, dtype = _numbers(about["data"]["global_shape"]), _dtype(about["data"]["dtype"])
            info = TensorInfo(shape, dtype)
            if self._tensors.setdefault(name, info) != info:
                raise UnpicklingError(f"{name!r:.200} has several shapes or dtypes")
            for rank in _numbers(group["ranks"]):
                file = self._file(item, rank, layouts)
                held = _held(about, shape, rank)
                self._places[name, file] = path, held
                for chunk, _ in held:  # replicas are read from the first rank that holds them
                    if chunk.numel:
                        chunks.setdefault(chunk, Entry(name, info, chunk, (file, 0, 0)))
        self._chunks[name] = [*chunks.values()]

    def _file(self, item: str, rank: int, layouts: Mapping[int, Any]) -> str:
        if rank not in layouts:
            raise UnpicklingError(f"rank {rank} has no file of {item!r:.200}")
        layout = layouts[rank]
        if layout is None:
            return f"{item}_{rank}.pt"
        kind = layout["serialization_format"]["type"]
        if kind != "TorchSerialization":
            raise NotACheckpointError(
                f"{self.path}: item {item} is stored as {kind!r:.80}; only TorchSerialization is read: save it so, or "
                "convert the folder to safetensors with torch_checkpointing and load that"
            )
        return str(PurePosixPath(layout["file_path"]))

    def _load(self, stored: Stored) -> torch.Tensor:
        name = stored.at[0]
        path, held = self._places[stored.name, name]
        if name not in self._open:  # the content of a file, its tensors mapped and not read
            file = self.path / name
            with self.reading(stored):
                FileReader(file).close()  # refuses what is no file
                self._open[name] = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        value = self._open[name]
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for part in path:
                value = value[part]
            local: object = local_tensor(value)
            if isinstance(local, torch.Tensor):
                return local[next(index for chunk, index in held if chunk == stored.chunk)]
        raise self._corrupt(stored, "does not hold it")


def _held(about: Any, shape: Shape, rank: int) -> _Cell:
    """Return the chunks that a rank holds. Raises: UnpicklingError for a description of another kind."""
    data = about["data"]
    if about["type"] == "default_tensor_v1":
        parts = [[_numbers(part) for part in data[key]] for key in ("global_offsets", "local_offsets", "local_sizes")]
        held = [
            (Chunk(at, size), tuple(slice(a, a + n) for a, n in zip(local, size, strict=True)))
            for at, local, size in zip(*parts, strict=True)
        ]
    elif about["type"] == "DTensorShardingMetadata":
        mesh = data["mesh_spec"]
        sizes, ranks = _numbers(mesh["mesh_shape"]), _numbers(mesh["mesh_data"])
        if math.prod(sizes) != len(ranks):  # before anything is as large as the file claims
            raise UnpicklingError("a mesh is malformed")
        placements = tuple(_placement(placement, len(shape), len(ranks)) for placement in data["placements"])
        held = [*chunks_at(shape, placements, sizes, _coordinates(sizes, ranks)[rank])]
    else:
        raise UnpicklingError(f"it describes a tensor as {about['type']!r:.80}, which this version does not know")
    for chunk, _ in held:
        is_in_all_dims = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not is_in_all_dims or any(map(gt, map(add, chunk.offsets, chunk.sizes), shape)):
            raise UnpicklingError("a chunk is not inside its tensor")
    return held


@functools.lru_cache(maxsize=64)
def _coordinates(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the place of each rank in a mesh."""
    return dict(zip(ranks, itertools.product(*map(range, sizes)), strict=True))


def _numbers(values: Any) -> tuple[int, ...]:
    """Return a tuple of integers that are not negative. Raises: UnpicklingError for anything else."""
    if type(values) not in (list, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in values):
        raise UnpicklingError("a list of numbers is malformed")
    return tuple(values)


def _dtype(name: Any) -> torch.dtype:
    value = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(value, torch.dtype):
        raise UnpicklingError(f"{name!r:.80} is no dtype")
    return value


def _placement(placement: Any, num_dims: int, num_ranks: int) -> Placement:
    kind = placement["type"]
    if kind == "Replicate":
        return Replicate()
    (dim,) = _numbers([placement["dim"]])
    if dim >= num_dims:
        raise UnpicklingError("a tensor is sharded along a dim that it does not have")
    if kind == "Shard":
        return Shard(dim)
    (factor,) = _numbers([placement["split_factor"]])
    if kind != "StridedShard" or not 0 < factor <= num_ranks:
        raise UnpicklingError(f"a placement {kind!r:.80} is malformed")
    return _StridedShard(dim, split_factor=factor)
