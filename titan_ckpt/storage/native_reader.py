"""Reading a checkpoint of this package's own format: any part of any tensor, from the ranks' files that hold it.

Owns the index over the files of one folder. Knows neither how a folder became a checkpoint nor what a model wants.
"""

from __future__ import annotations

import copy
import errno
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import sub
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from titan_ckpt import posix
from titan_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, NotACheckpointError
from titan_ckpt.manifest import MANIFEST_NAME, MAX_BYTES, FileRecord, Manifest
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.engine import FileReader, collector_held
from titan_ckpt.storage.native_header import RankFile, header_bytes, parse_header
from titan_ckpt.storage.native_layout import Entry
from titan_ckpt.storage.native_writer import rank_file_name
from titan_ckpt.storage.scatter import Transfer
from titan_ckpt.storage.transfers import BlockReader, execute
from titan_ckpt.tensors import Chunk, TensorInfo


@dataclass(frozen=True, slots=True)
class _Source:
    """One opened rank's file."""

    file: FileReader
    header: RankFile


@dataclass(frozen=True, slots=True)
class _Planned:
    """Requests as transfers of each file; `arranged`: (target, memory that is filled instead of it, to be copied)."""

    requests: Sequence[ReadRequest]
    readers: list[BlockReader]
    arranged: list[tuple[torch.Tensor, torch.Tensor]]


class NativeReader(TensorReader):
    """Reads the ranks' files of one folder, each opened when it is needed: this rank's own first."""

    format = "native"

    def __init__(self, path: Path, verify: bool = True, files: Sequence[FileRecord] | None = None) -> None:
        """Open this rank's file, or rank 0's where this rank has none.

        `files`: what was committed, whose sizes and digests must agree; by default what the folder's manifest says. A
        folder without a manifest (an attempt, a lone rank's file) is read for what it is.
        Raises: CheckpointNotFoundError; NotACheckpointError if there is no rank's file; CorruptCheckpointError.
        """
        self.path = Path(path)
        self._verify = verify
        self._sources: dict[int, _Source] = {}
        self._planned: _Planned | None = None
        self._borrows = False
        if not self.path.is_dir():
            raise CheckpointNotFoundError(f"{self.path}: no such folder")
        committed = _committed_files(self.path) if files is None else files
        self._records = None if committed is None else {record.name: record for record in committed}
        ready = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        # what was saved in this run's layout is in one file, and a large header takes long to read
        name = rank_file_name(rank)
        has_own = (self.path / name).exists() if self._records is None else name in self._records
        self._own = self._open(rank if has_own else 0)
        self._world_size = self._own.header.world_size
        here = rank * self._world_size / world_size
        self._by_distance = sorted(range(self._world_size), key=lambda r: abs(r - here))

    def another(self) -> NativeReader:
        """Return a second reader of the files that this one opens, for requests of its own; this one closes them."""
        other = copy.copy(self)
        other._planned, other._borrows = None, True  # noqa: SLF001
        return other

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the checkpoint; rank 0's file names them all. Raises: CorruptCheckpointError."""
        first = self._open(0).header
        with collector_held():
            return {**first.infos(), **first.elsewhere}

    def _open(self, rank: int) -> _Source:
        """Open and check one rank's file, once."""
        if rank in self._sources:
            return self._sources[rank]
        name = rank_file_name(rank)
        path = self.path / name
        try:
            file = FileReader(path)
        except FileNotFoundError:
            if rank == 0 and not self._records:
                raise NotACheckpointError(f"{self.path}: holds no {name}, so no checkpoint of this format") from None
            raise CorruptCheckpointError(
                f"{path}: is missing. Load another step, or copy the folder again from where it is whole", str(path)
            ) from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CorruptCheckpointError(f"{path}: is a symbolic link; put the file itself there", str(path)) from None
        try:
            header = _read_header(file, str(path))
            if header.rank != rank or (self._sources and header.world_size != self._world_size):
                raise CorruptCheckpointError(
                    f"{path}: was written by rank {header.rank} of {header.world_size}; it belongs to another "
                    "checkpoint. Copy the folder again from where it is whole",
                    str(path),
                )
            self._check_record(name, header, file.num_bytes)
        except BaseException:
            file.close()
            raise
        self._sources[rank] = _Source(file, header)
        return self._sources[rank]

    def _check_record(self, name: str, header: RankFile, num_bytes: int) -> None:
        if self._records is None:
            return
        record = self._records.get(name)
        found = f"{num_bytes} bytes, digest {header.digest}"
        expected = "no such file" if record is None else f"{record.num_bytes} bytes, digest {record.digest}"
        if found != expected:
            raise CorruptCheckpointError(
                f"{header.path}: expected {expected} by the manifest, found {found}; the file is of another save. "
                "Load another step, or copy the folder again from where it is whole",
                header.path,
            )

    def plan(self, requests: Sequence[ReadRequest]) -> Sequence[BlockReader]:
        """Find the blocks of every request; watch those in the page cache until `read` is done. Raises: OSError."""
        with collector_held():
            self._drop_plan()
            self._planned = self._plan(requests)
            for reader in self._planned.readers:
                reader.prepare()
        return self._planned.readers

    def check(self, requests: Sequence[ReadRequest]) -> None:
        """Verify the blocks that hold the requests, of files that are in the page cache, and fill nothing.

        What is not there is verified while it is read; twice would take the disk twice. Raises: as `read`.
        """
        cached = [reader for reader in self.plan(requests) if reader.to_check]
        with collector_held():
            execute(cached, check_only=True)
        for reader in cached:
            reader.trust()

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request's memory with exactly the blocks that hold it, verified; `check` comes first.

        Raises: CorruptCheckpointError naming the file, the damaged tensors and those overwritten in memory so far, or
        a tensor whose stored chunks do not cover it once; KeyError for a name that is not in `tensors`.
        """
        if self._planned is None or self._planned.requests is not requests:
            self.check(requests)
        assert self._planned is not None
        with collector_held(), torch.no_grad():
            try:
                execute(self._planned.readers)
                for target, values in self._planned.arranged:
                    target.copy_(values.view(target.shape))
            finally:
                self._drop_plan()

    def _drop_plan(self) -> None:
        planned, self._planned = self._planned, None
        for reader in planned.readers if planned is not None else ():
            reader.close()

    def _plan(self, requests: Sequence[ReadRequest]) -> _Planned:
        own: list[Transfer] = []
        transfers = {self._own.header.rank: own}
        arranged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for request in requests:
            chunk, into = request.chunk, request.into
            if into.shape != chunk.sizes:
                into = _reshaped(into.detach(), request, arranged)
            if (entire := self._own.header.entire(request.key, chunk)) is not None:
                own.append(Transfer(request.key, *entire, None, into))
                continue
            for source, entry, part in self._locate(request.key, chunk):
                target = into if part is chunk else into[part.within(chunk)]
                transfers.setdefault(source.header.rank, []).append(_transfer(entry, part, target))
        return _Planned(
            requests, [self._block_reader(r, of_file) for r, of_file in sorted(transfers.items())], arranged
        )

    def _block_reader(self, rank: int, transfers: Sequence[Transfer]) -> BlockReader:
        source = self._sources[rank]
        return BlockReader(source.file, source.header, transfers, self._verify)

    def _locate(self, fqn: str, chunk: Chunk) -> list[tuple[_Source, Entry, Chunk]]:
        """Find the stored parts that make up a chunk, in this rank's file first, then in those of the ranks around it.

        With sharding along rows, as FSDP does it, the files of a few neighbours have all; the others are not opened.
        """
        if fqn not in self.tensors:
            raise KeyError(f"{self.path}: holds no tensor {fqn}")
        if not chunk.numel:
            return []
        found = _parts(self._own, fqn, chunk)
        missing = chunk.numel - sum(part.numel for _, _, part in found)
        for rank in self._by_distance:
            if missing <= 0:
                break
            if rank != self._own.header.rank:
                more = _parts(self._open(rank), fqn, chunk)
                missing -= sum(part.numel for _, _, part in more)
                found += more
        _check_cover(fqn, chunk, [part for _, _, part in found], str(self.path))
        return found

    def verify(self) -> None:
        """Check every byte of every file, and that the chunks of each tensor tile it once.

        Raises: CorruptCheckpointError at the first file or tensor that is not as it was written.
        """
        whole: dict[str, list[Chunk]] = {fqn: [] for fqn in self.tensors}
        for rank in range(self._world_size):
            source = self._open(rank)
            entries = [source.header.entry(i) for i in range(len(source.header.names))]
            scratch = torch.empty(0)
            everything = [_transfer(e, e.chunk, scratch) for e in entries if e.nbytes]
            reader = BlockReader(source.file, source.header, everything, True)
            reader.to_check = reader.windows
            execute([reader], check_only=True)
            for e in entries:
                if self.tensors.get(e.fqn) != e.info:
                    raise CorruptCheckpointError(
                        f"{source.header.path}: holds {e.fqn} as {e.info}, rank 0's file says "
                        f"{self.tensors.get(e.fqn)}. Copy the folder again from where it is whole",
                        source.header.path,
                    )
                if e.chunk.numel:
                    whole[e.fqn].append(e.chunk)
        for fqn, chunks in whole.items():
            _check_cover(fqn, Chunk.whole(self.tensors[fqn].shape), chunks, str(self.path))

    def close(self) -> None:
        self._drop_plan()
        if self._borrows:
            return
        sources, self._sources = self._sources, {}
        for source in sources.values():
            source.file.close()


def _committed_files(folder: Path) -> tuple[FileRecord, ...] | None:
    """Return what the folder's manifest lists, or None without one. Raises: CorruptCheckpointError."""
    path = folder / MANIFEST_NAME
    try:
        data = posix.read_whole(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read ({error}). Load another step", str(path)) from error
    return Manifest.from_bytes(data, str(path)).files


def _read_header(file: FileReader, path: str) -> RankFile:
    length = header_bytes(file.read(0, 8), file.num_bytes, path)
    return parse_header(file.read(0, length), file.num_bytes, path)


def _transfer(entry: Entry, part: Chunk, into: torch.Tensor) -> Transfer:
    """Fill `into` with a part, given in global coordinates, of a stored chunk."""
    sizes = entry.chunk.sizes
    box = None if part == entry.chunk else Chunk(tuple(map(sub, part.offsets, entry.chunk.offsets)), part.sizes)
    return Transfer(entry.fqn, entry.start, sizes, entry.info.dtype, box, into)


def _parts(source: _Source, fqn: str, chunk: Chunk) -> list[tuple[_Source, Entry, Chunk]]:
    """Return what a file holds of a chunk, in global coordinates."""
    hits = ((entry, entry.chunk.intersect(chunk)) for entry in source.header.entries_of(fqn))
    return [(source, entry, part) for entry, part in hits if part is not None]


def _reshaped(
    into: torch.Tensor, request: ReadRequest, arranged: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """View the target in the chunk's shape; where its strides forbid that, read aside and arrange afterwards."""
    try:
        return into.view(request.chunk.sizes)
    except RuntimeError:
        aside = torch.empty(request.chunk.sizes, dtype=into.dtype)
        arranged.append((into, aside))
        return aside


def _check_cover(fqn: str, chunk: Chunk, parts: Sequence[Chunk], path: str) -> None:
    """Raises: CorruptCheckpointError unless the parts, which lie within the chunk, tile it exactly once."""
    covered = sum(part.numel for part in parts)
    if covered == chunk.numel and _disjoint(parts):
        return
    what = "overlap" if covered >= chunk.numel else "leave a hole"
    raise CorruptCheckpointError(
        f"{path}: the stored chunks of {fqn} {what}: {covered} of {chunk.numel} elements at {list(chunk.offsets)}"
        f"+{list(chunk.sizes)}. A rank's file is missing, or from another save: load another step",
        path,
    )


def _disjoint(parts: Sequence[Chunk]) -> bool:
    """Say whether no two boxes overlap, by counting them on the grid of their own edges."""
    if len(parts) < 2:
        return True
    if len(parts) == 2:
        return parts[0].intersect(parts[1]) is None
    edges = []
    for dim in range(len(parts[0].sizes)):
        begins = {p.offsets[dim] for p in parts}
        edges.append(sorted(begins | {p.offsets[dim] + p.sizes[dim] for p in parts}))
    position = [{edge: i for i, edge in enumerate(of_dim)} for of_dim in edges]
    if prod(len(of_dim) for of_dim in edges) > _MAX_GRID:
        return all(a.intersect(b) is None for a, b in combinations(parts, 2))
    counts = np.zeros([len(of_dim) for of_dim in edges], dtype=np.uint8)
    for p in parts:
        box = tuple(slice(at[o], at[o + n]) for at, o, n in zip(position, p.offsets, p.sizes, strict=True))
        if counts[box].any():
            return False
        counts[box] = 1
    return True


_MAX_GRID = 1 << 24
