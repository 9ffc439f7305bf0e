"""Reading a native checkpoint: any part of any tensor, from the ranks' files that hold it.

Owns the index over the files of one folder. Knows neither how a folder became a checkpoint nor what a model needs.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from titan_ckpt import progress
from titan_ckpt.directory.manifest import MAX_BYTES, Manifest
from titan_ckpt.directory.names import manifest_path, rank_file_name
from titan_ckpt.disk.files import Reader
from titan_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, NotACheckpointError, listed
from titan_ckpt.formats.native.header import RankFile, header_bytes, parse_header
from titan_ckpt.formats.reading.engine import SliceFill, SliceReader, execute
from titan_ckpt.formats.reading.slices import Slice
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Block, Chunk, Entry, Shape, TensorInfo
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, may_pass, read_twice, store_of
from titan_ckpt.weights.identity import base_settings

_NOWHERE = torch.empty(0, device="cpu")
"""In place of memory, where slices are verified alone."""
_AGAIN = "Load another step, or copy the folder again from where it is whole"


class NativeReader(TensorReader):
    """Reads the ranks' files of one folder. Each is opened when it is needed; this rank's own comes first."""

    format = "native"
    path: Place

    def __init__(self, path: Place) -> None:
        """Open this rank's file, or that of rank 0 if this rank has none.

        Sizes and digests must be those of the folder's manifest; without one (an attempt, a single rank's file) they
        are not compared.
        Raises: CheckpointNotFoundError; NotACheckpointError if there is no rank's file; CorruptCheckpointError.
        """
        self.path = path
        self._headers: dict[int, RankFile] = {}
        self._files: dict[int, Reader] = {}
        if store_of(path).misses(path, folder=True):
            raise CheckpointNotFoundError(f"{self.path}: no such folder")
        self.manifest = manifest_of(self.path)
        """The folder's manifest, if there is one."""
        self._records = None if self.manifest is None else {record.name: record for record in self.manifest.files}
        ready = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        # a checkpoint of this run's own layout needs this one file, and a large header takes long to read
        name = rank_file_name(rank)
        has_own = name in self._records if self._records is not None else not store_of(path).misses(path / name)
        self._own = self._open(rank if has_own else 0)
        self._world_size = self._own.world_size
        position = rank * self._world_size / world_size
        self._by_distance = sorted(range(self._world_size), key=lambda r: abs(r - position))

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the checkpoint; the file of rank 0 names them all. Raises: CorruptCheckpointError."""
        first = self._open(0)
        with gc_paused():
            return {**first.infos(), **first.elsewhere}

    def metadata(self) -> dict[str, Any]:
        """Return the base under an adapter, which the manifest records: under BASE_RECORD, or as PEFT names it."""
        base = None if self.manifest is None else self.manifest.base
        return {} if base is None else base_settings(base)

    def _open(self, rank: int) -> RankFile:
        """Open and check one rank's file, once."""
        if rank in self._headers:
            return self._headers[rank]
        name = rank_file_name(rank)
        path = self.path / name
        try:
            self._headers[rank] = read_twice(path, lambda path: self._opened(rank, path))
        except FileNotFoundError:
            if rank == 0 and not self._records:
                raise NotACheckpointError(f"{self.path}: holds no {name}, so no checkpoint of this format") from None
            raise CorruptCheckpointError(f"{path}: is missing. {_AGAIN}", str(path)) from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CorruptCheckpointError(f"{path}: is a symbolic link; put the file itself there", str(path)) from None
        return self._headers[rank]

    def _opened(self, rank: int, path: Place) -> RankFile:
        """Open and check one rank's file."""
        name = path.name
        file = store_of(path).open(path)
        try:
            header = read_header(file)
            if header.rank != rank or (self._headers and header.world_size != self._world_size):
                raise CorruptCheckpointError(
                    f"{path}: was written by rank {header.rank} of {header.world_size}; it belongs to another "
                    "checkpoint. Copy the folder again from where it is whole",
                    str(path),
                )
            self._check_record(name, header, file.num_bytes)
        except BaseException:
            file.close()
            raise
        self._files[rank] = file
        return header

    def _check_record(self, name: str, header: RankFile, num_bytes: int) -> None:
        if self._records is None:
            return
        record = self._records.get(name)
        found = f"{num_bytes} bytes, digest {header.digest}"
        expected = "no such file" if record is None else f"{record.num_bytes} bytes, digest {record.digest}"
        if found != expected:
            raise CorruptCheckpointError(
                f"{header.path}: expected {expected} by the manifest, found {found}; the file is of another save. "
                f"{_AGAIN}",
                header.path,
            )
        ranks = [name for name in self._records if name.endswith(".safetensors")]
        if len(ranks) != header.world_size:
            raise CorruptCheckpointError(
                f"{header.path}: is of a checkpoint of {header.world_size} ranks, and the manifest lists the files of "
                f"{len(ranks)}. {_AGAIN}",
                header.path,
            )

    def plan(self, requests: Sequence[Block]) -> SliceFill:
        """Find the blocks of every request; return the function that fills them, and verifies each as it is read.

        Raises: CorruptCheckpointError for a file whose header is damaged, and for a tensor whose stored chunks do not
        cover it exactly once; KeyError for a name that is not in `tensors`; OSError.
        """
        with gc_paused():
            slices = self._slices(requests)
        return SliceFill([(self._files[rank], self._headers[rank].blocks, slices[rank]) for rank in sorted(slices)])

    def verify(self, count: progress.Count = progress.uncounted) -> None:
        """Check every byte of every rank's file, and that the stored chunks of each tensor cover it exactly once.

        A load checks in the same way what it reads. Writes to no tensor; `count` is called with the bytes of tensors.
        Raises: CorruptCheckpointError listing every file and tensor that is not as it was written; OSError.
        """
        problems: list[str] = []
        chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in self.tensors}
        for rank in range(self._world_size):
            try:
                header = self._open(rank)
                entries = [header.entry(i) for i in range(len(header.names))]
                slices = [_slice(header, e, e.chunk, _NOWHERE, e.chunk) for e in entries if e.chunk.numel]
                execute([SliceReader(self._files[rank], header.blocks, slices)], count)
            except CorruptCheckpointError as error:
                problems.append(str(error))
                continue
            for entry in entries:
                if (expected := self.tensors.get(entry.name)) != entry.info:
                    problems.append(f"{header.path}: {_contradiction(entry, expected)}")
                else:
                    chunks[entry.name].append(entry.chunk)
        for fqn, parts in chunks.items() if not problems else ():
            try:
                _check_cover(fqn, Chunk.whole(self.tensors[fqn].shape), parts, str(self.path))
            except CorruptCheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CorruptCheckpointError(listed(problems, "\n  "), str(self.path))

    def blocks_of(self, key: str) -> list[tuple[tuple[Shape, ...], int, int, int, str]]:
        """Return the parts of blocks that hold a tensor: in which box, at which byte of it, and (start, stop, digest).

        The box is () where the bytes follow each other in the whole tensor too, as those of rows do: then the byte is
        one of the whole. Steps with equal lists hold equal values; unequal lists say nothing.
        Raises: CorruptCheckpointError.
        """
        blocks = []
        for header, entry, _ in self._locate(key, Chunk.whole(self.tensors[key].shape)):
            box, first = _place(entry)
            size, stop = header.blocks.size, entry.at + entry.chunk.numel * entry.info.dtype.itemsize
            for block in range(entry.at // size, -(-stop // size)):
                start, end = max(entry.at, block * size), min(stop, (block + 1) * size)
                at = start - block * size
                digest = header.blocks.digest(block)
                blocks.append((box, first + start - entry.at, at, at + end - start, digest))
        return sorted(blocks)

    def stored_chunks(self) -> dict[str, list[Chunk]]:
        """Return the chunks in which the ranks' files hold each tensor. Raises: CorruptCheckpointError."""
        chunks: dict[str, list[Chunk]] = {}
        for rank in range(self._world_size):
            header = self._open(rank)
            for entry in map(header.entry, range(len(header.names))):
                chunks.setdefault(entry.name, []).append(entry.chunk)
        return chunks

    def _slices(self, requests: Sequence[Block]) -> dict[int, list[Slice]]:
        """Return the slices of each rank's file."""
        own: list[Slice] = []
        header = self._own
        slices = {header.rank: own}
        for chunk, into, key in requests:
            entire = header.entire(key, chunk)
            if entire is not None and (header.rank == 0 or entire[2] is self.tensors[key].dtype):
                start, sizes, dtype = entire
                own.append(Slice(key, header.blocks.start + start, sizes, dtype, None, into))
                continue
            if into.is_contiguous():
                into = into.detach().view(chunk.sizes)
            for stored, entry, part in self._locate(key, chunk):
                slices.setdefault(stored.rank, []).append(_slice(stored, entry, part, into, chunk))
        return slices

    def _locate(self, fqn: str, chunk: Chunk) -> list[tuple[RankFile, Entry[int], Chunk]]:
        """Find the stored parts that make up a chunk, first in this rank's file, then in those of neighbouring ranks.

        If tensors are sharded by rows, as with FSDP, the files of a few neighbours suffice; the others are not opened.
        """
        if fqn not in self.tensors:
            raise KeyError(f"{self.path}: holds no tensor {fqn}")
        if not chunk.numel:
            return []
        parts = _parts(self._own, fqn, chunk)
        missing = chunk.numel - sum(part.numel for _, _, part in parts)
        for rank in self._by_distance:
            if missing <= 0:
                break
            if rank != self._own.rank:
                more = _parts(self._open(rank), fqn, chunk)
                missing -= sum(part.numel for _, _, part in more)
                parts += more
        for header, entry, _ in parts:
            if entry.info != self.tensors[fqn]:
                wrong = f"{header.path}: {_contradiction(entry, self.tensors[fqn])}. {_AGAIN}"
                raise CorruptCheckpointError(wrong, header.path)
        _check_cover(fqn, chunk, [part for _, _, part in parts], str(self.path))
        return parts

    def close(self) -> None:
        files, self._files, self._headers = self._files, {}, {}
        for file in files.values():
            file.close()


def manifest_of(folder: Place) -> Manifest | None:
    """Return the folder's manifest, or None without one. Raises: CorruptCheckpointError; OSError."""
    path = manifest_path(folder)
    try:
        return read_twice(path, lambda path: Manifest.from_bytes(store_of(path).read_whole(path, MAX_BYTES), str(path)))
    except FileNotFoundError:
        return None
    except OSError as error:
        if isinstance(error, StoreError) or may_pass(error):
            raise
        raise CorruptCheckpointError(f"{path}: cannot be read ({error}). Load another step", str(path)) from error


def read_header(file: Reader) -> RankFile:
    """Read and check the header of an open file. Raises: CorruptCheckpointError; OSError."""
    path = str(file.path)
    length = header_bytes(file.read(0, 8), file.num_bytes, path)
    return parse_header(file.read(0, length), file.num_bytes, path)


def _slice(header: RankFile, entry: Entry[int], part: Chunk, into: torch.Tensor, chunk: Chunk) -> Slice:
    """Return the slice that fills its part of `into`, which has the elements of a chunk, from a stored chunk.

    `part` and `chunk` are in global coordinates.
    """
    origin, sizes = entry.chunk.offsets, entry.chunk.sizes
    box = None if part == entry.chunk else part.seen_from(origin)
    outer = None
    if part != chunk and into.shape == chunk.sizes:
        into = into[part.within(chunk)]
    elif part != chunk:
        outer = chunk.seen_from(origin)
    return Slice(entry.name, header.blocks.start + entry.at, sizes, entry.info.dtype, box, into, outer)


def _place(entry: Entry[int]) -> tuple[tuple[Shape, ...], int]:
    """Return the box in which a chunk's bytes are counted, () for the whole tensor, and the first of them."""
    shape, chunk = entry.info.shape, entry.chunk
    cut = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), len(shape))
    if chunk.sizes[cut + 1 :] != shape[cut + 1 :]:
        return (chunk.offsets, chunk.sizes), 0
    first = 0
    for offset, extent in zip(chunk.offsets, shape, strict=True):
        first = first * extent + offset
    return (), first * entry.info.dtype.itemsize


def _contradiction(entry: Entry[int], expected: TensorInfo | None) -> str:
    return f"{entry.name} is {entry.info}, rank 0's file says {expected or 'that there is none'}"


def _parts(header: RankFile, fqn: str, chunk: Chunk) -> list[tuple[RankFile, Entry[int], Chunk]]:
    """Return the parts of a chunk that a file holds, in global coordinates."""
    at = header.by_fqn.get(fqn, [])
    entries = map(header.entry, [at] if isinstance(at, int) else at)
    hits = ((entry, entry.chunk.intersect(chunk)) for entry in entries)
    return [(header, entry, part) for entry, part in hits if part is not None]


def _check_cover(fqn: str, chunk: Chunk, parts: Sequence[Chunk], path: str) -> None:
    """Check that the parts, which lie within the chunk, tile it exactly once. Raises: CorruptCheckpointError."""
    covered = sum(part.numel for part in parts)
    if covered == chunk.numel and overlap(parts) is None:
        return
    what = "overlap" if covered >= chunk.numel else "leave a hole"
    raise CorruptCheckpointError(
        f"{path}: the stored chunks of {fqn} {what}: {covered} of {chunk.numel} elements at {list(chunk.offsets)}"
        f"+{list(chunk.sizes)}. A rank's file is missing, or from another save: load another step",
        path,
    )
