"""Writing the torch.distributed.checkpoint format: folders that `dcp.load` and torchtitan read.

Owns which rank writes what, and the proof: every byte is read back before the folder is published, around the page
cache where possible, several blocks at a time, because the disk is the bottleneck. dcp.py reads such folders.
Source: torch/distributed/checkpoint/{metadata,filesystem,planner_helpers}.py.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import methodcaller
from typing import IO, Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_ckpt import progress
from titan_ckpt.disk.files import IO_BYTES, Writer
from titan_ckpt.disk.workers import bounce_buffer, run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import ExportError, counted, listed
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.metadata import METADATA
from titan_ckpt.formats.publish.publication import (
    Unpublished,
    compare_infos,
    coverage_faults,
    log_export,
    published,
    refuse_changed,
)
from titan_ckpt.formats.publish.record import RecordExport, unrecorded
from titan_ckpt.geometry.chunks import LazyTensor, TensorInfo, blocks_of, dtype_name, info_of, layout_of, run_through
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, store_of
from titan_ckpt.types import StateDict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value that is no tensor, as it is written."""

    path: tuple[str, ...]
    """The keys by which it is nested; joined by dots they are its name."""
    data: bytes
    """The bytes that torch.save makes of the value."""
    digest: str | None
    """Equal for equal values; None if ranks need not have the same one."""


@dataclass(frozen=True, slots=True)
class DcpExport:
    """An export into a folder that `dcp.load` reads."""

    tensors: StateDict
    values: Mapping[str, StoredValue] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of tensors that ranks might hold with values of their own, which the format has no place for."""
    changed: Callable[[], list[str]] = list
    """As of FolderExport."""

    def peers(self, folder: Place, coordinator: Coordinator) -> set[Ranks]:
        """Return no group: shards are written as they are."""
        return set()

    def write(self, folder: Place, coordinator: Coordinator, record: RecordExport = unrecorded) -> None:
        """Write, prove and record the folder, and publish it atomically. Collective.

        Lazy tensors are resolved one at a time.

        Raises: ExportError for values that differ between ranks, for tensors that are not whole, and for bytes that
        differ from what was written; OSError; PeerError; FileExistsError. Nothing has the folder's name then.
        """
        started = time.perf_counter()
        total = sum(info_of(value).nbytes for value in self.tensors.values())
        with (
            published(folder, coordinator, "dcp-", lambda: None, record) as unpublished,
            # written, and read back
            progress.shown(f"exporting {folder.name}", 2 * total // coordinator.world_size) as count,
        ):
            try:
                infos = self._write(unpublished, coordinator, count)
            except ExportError as error:
                raise ExportError(f"export to {folder} failed, nothing was published: {error}") from error
        log_export(len(infos), sum(info.nbytes for info in infos.values()), folder, started, coordinator)

    def _write(
        self, unpublished: Unpublished[None], coordinator: Coordinator, count: progress.Count
    ) -> dict[str, TensorInfo]:
        """Fill the folder and prove it; return all tensors in it.

        1 Every rank posts the chunks and values that it holds. 2 The lowest rank that holds one writes it, to its own
        file, and syncs the file. 3 Every rank reads its file back and compares it with what it wrote; rank 0 writes the
        metadata first, and opens the folder as any reader would.
        """
        alone = coordinator.world_size == 1  # then the layout of lazy tensors is not needed before they are written

        def own_parts() -> dict[str, Any]:
            held = [] if alone else [(name, _offsets(value)) for name, value in self.tensors.items()]
            return {"rows": held, "values": {**{name: v.digest for name, v in self.values.items()}, **self.digests}}

        of_ranks = gather_tables(coordinator, "dcp-chunks", own_parts)
        writers = _writers([of_rank["rows"] for of_rank in of_ranks])
        own = {name: {c for c, rank in chunks.items() if rank == coordinator.rank} for name, chunks in writers.items()}
        first = _first_holders([of_rank["values"] for of_rank in of_ranks])
        mine = {name: value for name, value in self.values.items() if first[name] == coordinator.rank}
        share = sum(info_of(value).nbytes for value in self.tensors.values()) + sum(len(v.data) for v in mine.values())
        file = DigestedFile(unpublished.path / _file_name(coordinator.rank), share, unpublished.require_own)
        counted = 0

        def count_written(num_bytes: int) -> None:
            nonlocal counted
            counted += num_bytes
            count(num_bytes)

        def write() -> dict[str, Any]:
            infos = {name: info_of(value) for name, value in self.tensors.items()}
            return {
                "rows": _write_chunks(file, self.tensors, None if alone else own, mine, count_written),
                "infos": {name: [list(info.shape), dtype_name(info.dtype)] for name, info in infos.items()},
                "paths": {name: list(value.path) for name, value in mine.items()},
            }

        written = gather_tables(coordinator, "dcp-places", write)

        def prove() -> None:
            refuse_changed(self.changed())
            if coordinator.rank == 0:
                _write_metadata(unpublished, written)
            file.prove(
                lambda num_bytes: count(num_bytes * counted // file.num_bytes)
            )  # pickles are larger than tensors

        coordinator.together("dcp-prove", prove)
        return {name: _info(*fact) for of_rank in written for name, fact in of_rank["infos"].items()}


def gather_tables(coordinator: Coordinator, tag: str, act: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `act` on every rank and return the tables of all ranks, with (name, fact) in "rows". Collective.

    1. Every rank posts digests of its names, of which kind of fact each has, and of all else in the table; one rank
    posts each that differs. 2. Every rank posts its kinds of facts, which are few, because tensors of one shape are
    sharded alike. So a rank's post does not grow with the number of tensors. Raises: as `Coordinator.gather`.
    """
    kinds: dict[str, int] = {}

    def split() -> dict[str, Any]:
        table = act()
        rows = table.pop("rows")
        kind_of = [kinds.setdefault(json.dumps(fact), len(kinds)) for _, fact in rows]
        return {**table, "rows": [[name for name, _ in rows], kind_of]}

    distinct = coordinator.gather_distinct(tag, split)
    facts: list[Any] = coordinator.gather(f"{tag}/kinds", [json.loads(kind) for kind in kinds])
    tables: list[dict[str, Any]] = [{} for _ in facts]
    for field_name, values in distinct.items():
        for ranks, value in values.items():
            for rank in ranks:
                tables[rank][field_name] = value
    for table, of_rank in zip(tables, facts, strict=True):
        names, kind_of = table["rows"]
        table["rows"] = zip(names, map(of_rank.__getitem__, kind_of), strict=True)
    return tables


def _info(shape: list[int], dtype: str) -> TensorInfo:
    return TensorInfo(tuple(shape), getattr(torch, dtype))


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _first_holders(tables: list[Any]) -> dict[str, int]:
    """Return value -> the lowest rank that has it. Raises: ExportError listing values that differ between ranks."""
    first: dict[str, int] = {}
    differing = set()
    for rank, table in enumerate(tables):
        for name, digest in table.items():
            if digest != tables[first.setdefault(name, rank)][name]:
                differing.add(name)
    if differing:
        raise ExportError(
            f"{counted(len(differing), 'value differs', 'values differ')} between ranks, and a DCP folder stores "
            f'each name once: {listed(sorted(differing), ", ", " ")}. Export format = "torchtitan_weights" instead'
        )
    return first


def _writers(tables: list[Any]) -> dict[str, dict[tuple[int, ...], int]]:
    """Return tensor -> offsets of a chunk -> the rank that writes it: the lowest of those that hold it."""
    writers: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, table in enumerate(tables):
        for name, chunks in table:
            for offsets in chunks:
                writers.setdefault(name, {}).setdefault(tuple(offsets), rank)
    return writers


def _write_chunks(
    file: DigestedFile,
    tensors: StateDict,
    own: Mapping[str, Collection[tuple[int, ...]]] | None,
    values: Mapping[str, StoredValue],
    count: progress.Count,
) -> list[tuple[str, list[Any]]]:
    """Create the file, write chunks and values to it, sync and close it; return of each
    its name and its offsets, sizes and bytes, in the order of the file.

    `own`: tensor -> offsets of the chunks that this rank writes; None: all chunks. Lazy tensors that are collective are
    resolved after an error or an interrupt too, because other ranks cannot resolve them alone. Raises: the first error.
    """
    places: list[tuple[str, list[Any]]] = []
    todo = iter(tensors.items())
    try:
        with file:
            file.open()
            for name, value in todo:
                for block in blocks_of(value):
                    if own is None or block.chunk.offsets in own.get(name, ()):
                        count(block.data.nbytes)
                        length = file.append(name, partial(torch.save, _alone(block.data)))
                        places.append((name, [[*block.chunk.offsets], [*block.chunk.sizes], length]))
            for name, stored in values.items():
                length = file.append(name, methodcaller("write", stored.data))
                places.append((name, [None, None, length]))
            file.sync()
    except BaseException:
        for _, value in todo:
            if isinstance(value, LazyTensor) and value.collective:
                run_through(value.blocks)
        raise
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


def _write_metadata(unpublished: Unpublished[None], gathered: list[Any]) -> None:
    """Write the metadata of all ranks' files, in a bucket last, and open the folder as any reader would.

    Raises: ExportError for metadata that is not read back as it was written, and for tensors that are not whole.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    infos: dict[str, TensorInfo] = {}
    for rank, of_rank in enumerate(gathered):
        file, end = _file_name(rank), 0
        for name, (shape, dtype) in of_rank["infos"].items():
            info = infos.setdefault(name, _info(shape, dtype))
            entries.setdefault(name, TensorStorageMetadata(TensorProperties(info.dtype), torch.Size(shape), []))
        paths |= {name: tuple(path) for name, path in of_rank["paths"].items()}
        for name, (offsets, sizes, length) in of_rank["rows"]:
            position, end = end, end + length
            if offsets is None:
                entries[name] = BytesStorageMetadata()
                storage[MetadataIndex(name)] = _StorageInfo(file, position, length)
                continue
            entry = entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            chunks = entry.chunks
            storage[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(file, position, length)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    metadata = Metadata(dict(entries), planner_data={n: paths.get(n, (n,)) for n in entries}, storage_data=storage)
    metadata.storage_meta = StorageMeta()
    data = pickle.dumps(metadata)
    folder = unpublished.path
    unpublished.put_last(METADATA, data)
    if store_of(folder).read_whole(unpublished.as_source() / METADATA, len(data) + 1) != data:
        raise ExportError(f"{METADATA} read back differs from what was written")
    with DcpReader(unpublished.as_source()) as reader:
        boxes = {name: [(c.offsets, c.sizes) for c in chunks] for name, chunks in reader.stored_chunks().items()}
        nothing: dict[str, list[Any]] = {name: [] for name in infos}
        faults = compare_infos(infos, reader.tensors) or coverage_faults(infos, [nothing, boxes])
    if faults:
        raise ExportError(f"the re-opened folder differs in {len(faults)} tensor(s): {listed(faults)}")


class DigestedFile(io.RawIOBase):
    """A new file to which items are appended and which digests each on its way. A context manager that closes it."""

    def __init__(self, path: Place, expected_bytes: int, before_end: Callable[[], None] = lambda: None) -> None:
        """Create nothing yet. `expected_bytes`: about the size that the file will have.

        `before_end`: called before the file is synced.
        """
        super().__init__()
        self._path = path
        self._expected_bytes = expected_bytes
        self._before_end = before_end
        self._file: Writer | None = None
        self.num_bytes = 0
        self._pieces: list[tuple[str, int, int, bytes]] = []
        """An item, the bytes [first, stop) of the file that it has in one block of IO_BYTES, and their digest."""
        self._item = ""
        self._first = 0
        self._digest = xxhash.xxh3_128()

    def open(self) -> None:
        """Create the file; it may be there only when it is synced. Raises: OSError."""
        self._file = store_of(self._path).new_file(self._path, self._expected_bytes)

    def append(self, item: str, write: Callable[[IO[bytes]], object]) -> int:
        """Let `write` put an item at the end of the file; return its length.

        Raises: what `self.write` raises, such as OSError.
        """
        start = self.num_bytes
        self._item = item
        try:
            write(cast(IO[bytes], self))
        except RuntimeError as error:  # after an error torch.save ends its archive, which fails and hides the error
            if error.__context__ is not None:
                raise error.__context__ from None
            raise
        self._cut()
        return self.num_bytes - start

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes at once, so that torch.save never keeps a tensor in memory twice."""
        view = memoryview(data).cast("B")
        assert self._file is not None, "open() comes first"
        self._file.write(view, self.num_bytes)
        done = 0
        while done < len(view):
            part = view[done : done + IO_BYTES - self.num_bytes % IO_BYTES]
            self._digest.update(part)
            self.num_bytes += len(part)
            done += len(part)
            if self.num_bytes % IO_BYTES == 0:
                self._cut()
        return done

    def _cut(self) -> None:
        """End the piece that is being digested, if it has any bytes."""
        if self._first < self.num_bytes:
            self._pieces.append((self._item, self._first, self.num_bytes, self._digest.digest()))
            self._first = self.num_bytes
            self._digest.reset()

    def sync(self) -> None:
        """Make the file durable; nothing is appended after it. Raises: OSError; what `before_end` raises."""
        if self._file is not None and self.num_bytes:  # nothing refers to an empty file
            self._before_end()
            self._file.finish(self.num_bytes)

    def close(self) -> None:
        """Close the file; one that is not synced is given up. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @gc_paused()
    def prove(self, count: progress.Count) -> None:
        """Read the file back and compare it with what was written. Raises: ExportError naming items that differ."""
        if not self.num_bytes:
            return
        wrong: set[str] = set()
        file = store_of(self._path).open(self._path)

        def compare(pieces: Sequence[tuple[str, int, int, bytes]]) -> None:
            start, stop = pieces[0][1], pieces[-1][2]
            count(stop - start)
            with bounce_buffer() as buffer:
                file.read_blocks(buffer.view[: stop - start], start)
                for item, first, last, digest in pieces:
                    if xxhash.xxh3_128_digest(buffer.view[first - start : last - start]) != digest:
                        wrong.add(item)

        try:
            if file.num_bytes != self.num_bytes:
                raise ExportError(f"{self._path.name} has {file.num_bytes} bytes, and {self.num_bytes} were written")
            blocks = (list(block) for _, block in groupby(self._pieces, lambda piece: piece[1] // IO_BYTES))
            run_workers(blocks, compare, file.num_workers)
        finally:
            file.close()
        if wrong:
            raise ExportError(
                f"{len(wrong)} item(s) of {self._path.name} read back differ from what was written: "
                f"{listed(sorted(wrong), ', ', ' ')}"
            )
