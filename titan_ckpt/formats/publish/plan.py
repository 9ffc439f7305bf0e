"""The plan of an export: all file tensors, the layout of the files, what each rank writes, and the open files.

Owns the plan, and who creates a file. The layout is the same on every rank and for any parallelism, so that files are
too. On a mounted file system a rank creates a file at its final size and all write into it; in a bucket one rank
uploads it while it is written, in about that order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.disk.files import FileWriter, Writer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.sharing import divide
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.formats.safetensors.container import Layout, lay_out
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, TensorInfo, dtype_name, info_of, layout_of
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, local_path, store_of
from titan_ckpt.weights.transforms import FileGroup

Infos = Mapping[str, TensorInfo]
"""All tensors of an export, by their keys."""
PackFiles = Callable[[Infos], Mapping[str, Sequence[str]]]
"""(All tensors of an export) -> file name -> its keys."""
MakeHeader = Callable[[Infos, Mapping[str, str]], Mapping[str, str]]
"""(All tensors of an export, descriptions of the quantized ones) -> the metadata of every file."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of an export, the same on every rank and for any parallelism; and this rank's part of the work."""

    infos: Infos
    layouts: Mapping[str, Layout]
    file_of: Mapping[str, str]
    quantized: Mapping[str, str]
    """Key of each tensor that is stored as several tensors -> its description in the files' headers."""
    sources: Mapping[str, Collection[str]]
    """Key -> the native tensors from which it is made, on any rank: those of tied weights by each of their names."""
    shares: Mapping[str, Sequence[Chunk] | None]
    """Native fqn -> the chunks that this rank writes; None: all that it holds."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors, without headers."""
        return sum(info.nbytes for info in self.infos.values())

    def shares_of(self, fqn: str) -> Sequence[Chunk] | None:
        """Return the chunks of a native tensor that this rank writes; None: all that it holds."""
        return self.shares.get(fqn, ())

    def is_divided(self, group: FileGroup) -> bool:
        """Return whether the plan ensures that the ranks' parts of this group make up all of it."""
        return all(self.shares_of(fqn) is not None for fqn in group.fqns)

    def writes(self, group: FileGroup) -> bool:
        """Return whether this rank writes any of the group's values."""
        return any(self.shares_of(fqn) != () for fqn in group.fqns)


@gc_paused()
def plan_export(
    groups: Sequence[FileGroup],
    pack: PackFiles,
    header: MakeHeader,
    coordinator: Coordinator,
    buffers: Collection[str] = (),
) -> ExportPlan:
    """Agree on all tensors and on the rank that writes each part. Collective.

    1. Every rank posts the digest of its table; the lowest rank of each distinct one posts the table. 2. The tensors
    are divided over the ranks that hold them, `buffers` as in a save. 3. Every rank lays out all files.
    Raises: ExportError if ranks disagree about a tensor, or there is none.
    """
    tables = coordinator.gather_distinct("export/tables", lambda: {"table": _table(groups)})["table"]
    infos, quantized, sources = _merge(tables.values())
    if not infos:
        raise ExportError("there is no tensor to export")
    shares: dict[str, Sequence[Chunk] | None] = {}
    known: dict[str, torch.Tensor] = {}
    for group in groups:
        for fqn, value in zip(group.fqns, group.values, strict=True):
            layout = _layout_of(value)
            if layout is None or isinstance(layout, tuple):
                shares[fqn] = layout
            elif coordinator.world_size == 1 and not isinstance(layout, DTensor):  # dividing is slow
                shares[fqn] = (Chunk.whole(tuple(layout.shape)),)
            else:
                known[fqn] = layout
                shares[fqn] = ()
    for share in divide(known, coordinator, buffers)[0]:
        shares[share.name] = (*(shares[share.name] or ()), share.chunk)
    packed = pack(infos)
    metadata = {"format": "pt", **header(infos, quantized)}
    layouts = {name: lay_out({key: infos[key] for key in keys}, metadata) for name, keys in packed.items()}
    file_of = {key: name for name, keys in packed.items() for key in keys}
    return ExportPlan(infos, layouts, file_of, quantized, sources, shares)


def pack_model_files(infos: Infos, max_bytes: int) -> dict[str, list[str]]:
    """Pack keys into files of at most `max_bytes`, in natural order of the keys, with the file names of transformers.

    Natural order compares numbers in names as numbers, so it does not depend on which rank holds which tensor. A tensor
    larger than the limit gets a file of its own.
    """
    packed: list[list[str]] = []
    room = -1
    for key in sorted(infos, key=_natural):
        num_bytes = infos[key].nbytes
        if num_bytes > room:
            packed.append([])
            room = max_bytes
        packed[-1].append(key)
        room -= num_bytes
    if len(packed) == 1:
        return {"model.safetensors": packed[0]}
    return {f"model-{i:05d}-of-{len(packed):05d}.safetensors": keys for i, keys in enumerate(packed, 1)}


def pack_as(file_of: Mapping[str, str], infos: Infos) -> dict[str, list[str]]:
    """Put every key into the file that holds it in another folder. Raises: ExportError for keys that folder lacks."""
    if unknown := sorted(key for key in infos if key not in file_of):
        raise ExportError(
            f"the base's files have no place for {len(unknown)} tensor(s): {listed(unknown, ', ', ' ')}: "
            'leave max_shard_bytes = "base" out'
        )
    names = sorted({file_of[key] for key in infos})
    if len(names) == 1:
        return {"model.safetensors": sorted(infos, key=_natural)}
    return {name: sorted((k for k in infos if file_of[k] == name), key=_natural) for name in names}


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", key)]


def _layout_of(value: torch.Tensor | LazyTensor) -> torch.Tensor | tuple[Chunk, ...] | None:
    """Return a tensor with the value's layout, or this rank's own chunks of it, or None if the layout is unknown."""
    layout = layout_of(value)
    if isinstance(layout, torch.Tensor) and tuple(layout.shape) != info_of(value).shape:
        return None
    return layout


def _table(groups: Sequence[FileGroup]) -> dict[str, Any]:
    """Return this rank's (key, dtype, shape, source) of file tensors, and its quantized tensors, as JSON."""
    return {
        "tensors": [
            [key, dtype_name(info.dtype), list(info.shape), ", ".join(group.fqns)]
            for group in groups
            for key, info in group.infos.items()
        ],
        "quantized": {key: text for group in groups for key, text in group.quantized.items()},
    }


def _merge(
    tables: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, TensorInfo], dict[str, str], dict[str, Collection[str]]]:
    infos: dict[str, TensorInfo] = {}
    sources: dict[str, dict[str, None]] = {}
    quantized: dict[str, str] = {}
    faults = []
    for table in tables:
        quantized |= table["quantized"]
        for key, dtype, shape, source in table["tensors"]:
            sources.setdefault(key, {})[source] = None
            info = TensorInfo(tuple(shape), getattr(torch, dtype))
            if infos.setdefault(key, info) != info:
                faults.append(f"{key}: {infos[key]} and {info}")
    if faults:
        raise ExportError(f"ranks disagree about {len(faults)} tensor(s): {'; '.join(faults)}")
    return infos, quantized, {**sources}


def is_shared(place: Place) -> bool:
    """Return whether ranks write into one file of a folder. Else one rank uploads each, and it is there when synced."""
    return local_path(place) is not None


class OutputFiles:
    """The files of one export, in the order of its plan: rank n creates the files n, n + ranks, and so on."""

    def __init__(self, place: Place, layouts: Mapping[str, Layout], coordinator: Coordinator) -> None:
        """Create nothing yet."""
        self._place = place
        self._folder = local_path(place)
        self.is_shared = is_shared(place)
        self._layouts = layouts
        self.owners = {name: number % coordinator.world_size for number, name in enumerate(layouts)}
        self._own = {name: layout for name, layout in layouts.items() if self.owners[name] == coordinator.rank}
        self._files: dict[str, Writer] = {}
        self._opening = threading.Lock()
        beside = 1 if self.is_shared else coordinator.world_size
        sizes = [layout.num_bytes for layout in layouts.values()]
        starts = [0, *accumulate(max(sizes[first : first + beside]) for first in range(0, len(sizes), beside))]
        self.starts = {name: starts[number // beside] for number, name in enumerate(layouts)}
        """How many bytes lie before each file. As many files as there are ranks are uploaded side by side."""

    def begin(self) -> None:
        """Create this rank's files, with their headers. Raises: OSError, also for a full disk."""
        for name, layout in self._own.items():
            if self._folder is not None:
                FileWriter.reserve(self._folder / name, layout.num_bytes, layout.header)
            else:
                self.file(name).write(memoryview(layout.header), 0)

    def file(self, name: str) -> Writer:
        """Return a file that is there, or that this rank uploads. Threads may call it. Raises: OSError."""
        with self._opening:
            if name not in self._files:
                self._files[name] = (
                    FileWriter(self._folder / name, direct=True)
                    if self._folder is not None
                    else store_of(self._place).new_file(self._place / name, self._layouts[name].num_bytes)
                )
            return self._files[name]

    def flush(self) -> None:
        """Write what was put off. Raises: OSError."""
        for file in self._files.values():
            file.flush()

    def sync(self, before: Callable[[], None] = lambda: None) -> None:
        """Make what this rank has written durable, headers too; may be called again. `before`: called before each file.

        Raises: OSError; EOFError; what `before` raises.
        """
        for name in {**self._own, **self._files}:
            before()
            self.file(name).finish(self._layouts[name].num_bytes)

    def close(self) -> None:
        """Close the files; idempotent. Raises: OSError if a network file system reports a late error."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
