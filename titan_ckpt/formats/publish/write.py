"""Writing the tensor bytes of an export: every rank writes its own slices to the final files, and proves them.

Owns the way from views of memory into shared files, and the record of what was written. Knows none of the folder's
other files.

A slice that is one run of the file is cut into blocks, which several threads cast and write. Strided slices (shards of
columns) are put together with those of other ranks (columns.py). If that is impossible, or if the values are computed
while they are written, they are copied through a mapping of the file, which measured twice as fast as a write per row.
Where a file system cannot reserve space, each row is written: a store to a mapping that finds the disk full would end
the process. Every byte is digested in memory on its way, so reading the file back proves it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, itemgetter

import torch

from titan_ckpt import progress
from titan_ckpt.disk.direct import NUM_WORKERS, bounce_buffer, run_workers
from titan_ckpt.disk.file_writer import FileWriter
from titan_ckpt.disk.memory import ALIGNMENT, bytes_at
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.columns import Assembled, ColumnExchange, Round, Rows
from titan_ckpt.formats.publish.outputs import Outputs
from titan_ckpt.formats.publish.plan import ExportPlan
from titan_ckpt.formats.publish.proof import Written, differing
from titan_ckpt.formats.publish.upload import UploadedFile
from titan_ckpt.formats.reading.engine import RUN_BYTES
from titan_ckpt.formats.reading.slices import windows
from titan_ckpt.formats.safetensors.container import Entry
from titan_ckpt.formats.safetensors.regions import mapped_boxes
from titan_ckpt.geometry.boxes import boxes_of_range, element_span, is_run, spans
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, blocks_of, is_plain_memory, run_through
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.weights.transforms import FileGroup, FilePiece

_QUEUED_BYTES = 256 << 20
"""Bytes of live tensors that the workers get at a time; each time all wait for the slowest worker."""
_FEW_BYTES = 1 << 20
"""One thread writes fewer bytes than this faster than other threads start."""


_Blocks = Iterator[tuple[int, Block]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Values that one worker casts, digests and writes to a run of a file, or copies into a mapping."""

    view: torch.Tensor
    target: list[tuple[Output, int, int]] | torch.Tensor
    """Runs of the file, as (file, offset, number of bytes), or memory that is mapped."""
    written: Written
    number: int


Output = FileWriter | UploadedFile
RegionKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Unique id of a region: (file key, offsets, sizes[1:])."""


class ExportWriter:
    """Writes this rank's slices into files that exist already. `close` it, whatever happens."""

    def __init__(self, outputs: Outputs, plan: ExportPlan, count: progress.Count) -> None:
        """Write nothing yet. `count` is called with the bytes that are written, and again with those that are proved.

        `outputs`: the files, which `close` closes.
        """
        self._outputs = outputs
        self._count = count
        self._plan = plan
        self._written: list[Written] = []
        self._queue: list[FilePiece] = []
        self._queued_bytes = 0
        self._done: set[RegionKey] = set()
        self._sources: dict[str, list[str]] = {}
        self.undivided: dict[str, list[list[tuple[int, ...]]]] = {}
        """key -> [offsets, sizes] of each written part, for tensors that the plan does not divide among the ranks."""

    def strided(self, groups: Sequence[FileGroup], keys: Container[str]) -> dict[RegionKey, FilePiece]:
        """Return this rank's pieces of these keys that are in memory and no run of their file, without tied tensors."""
        pieces: dict[RegionKey, FilePiece] = {}
        makers = Counter(key for group in groups for key in group.infos)
        for group in groups:
            if group.quantised or any(makers[key] > 1 or key not in keys for key in group.infos):
                continue
            for index, value in enumerate(group.values):
                shares = self._plan.shares_of(group.fqns[index])
                for block in blocks_of(value) if isinstance(value, torch.Tensor) or value.in_memory else ():
                    for piece in group.cut_shares(index, block, shares):
                        if not is_run(self._plan.files.infos[piece.key].shape, piece.chunk):
                            pieces[piece.key, piece.chunk.offsets, piece.chunk.sizes[1:]] = piece
        return pieces

    def write(self, groups: Sequence[FileGroup], columns: ColumnExchange | None = None) -> None:
        """Resolve the groups one tensor at a time, on this thread, and write this rank's part of them.

        `columns`: rows that are put together with other ranks' parts; they are written first.
        A group that takes part in collectives is resolved even after an error, so that other ranks do not wait in
        vain. Raises: the first error of this rank; Lost.
        """
        blocks = [group.blocks() for group in groups]  # nothing is computed yet
        try:
            self._write_groups(groups, blocks, columns)
        except Exception:
            for group, left in zip(groups, blocks, strict=True):
                if group.collective:
                    run_through(partial(iter, left))
            raise
        self._outputs.flush()

    def _write_groups(
        self, groups: Sequence[FileGroup], blocks: Sequence[_Blocks], columns: ColumnExchange | None
    ) -> None:
        """Write the groups by their blocks. However that ends, no other rank waits for this one afterwards."""
        try:
            if columns is not None:
                columns.run(self._write_rows)
            ready = self._in_order(groups) if self._outputs.is_sequential else None
            for group, of_group in zip(groups, blocks, strict=True):
                for key in group.infos:
                    self._sources.setdefault(key, []).append(", ".join(group.fqns))
                if ready is not None:
                    if _is_in_memory(group):
                        continue
                    self._write_ready(ready, min(self._position(key) for key in group.infos))
                if group.collective or self._plan.writes(group):
                    for index, block in of_group:
                        self._add(group, index, block)
            if ready is not None:
                self._write_ready(ready, None)
            self._write_queued()
        finally:
            self._outputs.end()

    def _in_order(self, groups: Iterable[FileGroup]) -> deque[tuple[int, FilePiece]]:
        """Return the pieces that are in memory, with their positions, in the order of the files in a bucket.

        So nothing of a group is held while what lies between its tensors, as between those of experts, is to come.
        """
        pieces = (
            (self._position(piece.key, piece.chunk), piece)
            for group in filter(_is_in_memory, groups)
            for index, block in (group.blocks() if self._plan.writes(group) else ())
            for piece in self._cut(group, index, block)
        )
        return deque(sorted(pieces, key=itemgetter(0)))

    def _write_ready(self, ready: deque[tuple[int, FilePiece]], position: int | None) -> None:
        """Write the pieces before a position, or all of them. Waits where this rank is far ahead of the slowest one."""
        while ready and (position is None or ready[0][0] < position):
            start, piece = ready.popleft()
            self._keep_pace(start)
            self._queue_piece(piece)
        if position is not None:
            self._keep_pace(position)

    def _keep_pace(self, position: int) -> None:
        if self._outputs.is_ahead(position):
            self._write_queued()
            self._outputs.wait_for_others()

    def _position(self, key: str, chunk: Chunk | None = None) -> int:
        """Return the place of a tensor, or of a part of it, in the order in which a bucket gets all files."""
        offset = self._entry(key).start if chunk is None else self._offset(key, chunk)
        return self._outputs.position(self._plan.files.file_of[key], offset)

    def sync(self) -> None:
        """Make this rank's writes durable; sequential outputs of all ranks are, before anything is read."""
        self._outputs.sync()

    def prove(self, reader: TensorReader) -> None:
        """Read every region that this rank wrote and compare it. Raises: ExportError naming the tensors that differ."""
        if wrong := differing(self._written, reader, self._count):
            number = sum(map(len, wrong.values()))
            names = {key: self._sources.get(key, ()) for key in wrong}
            tied = {key: f" (tied, and not equal: {', '.join(fqns)})" for key, fqns in names.items() if len(fqns) > 1}
            listed = ", ".join(key + tied.get(key, "") for key in wrong)
            raise ExportError(f"{number} region(s) read back differ from what was written, of {listed}")

    def _add(self, group: FileGroup, index: int, block: Block) -> None:
        """Queue this rank's pieces of a block. A lazy tensor's values are written before the next ones are computed."""
        for piece in self._cut(group, index, block):
            self._queue_piece(piece)
        if isinstance(group.values[index], LazyTensor):
            self._write_queued()

    def _queue_piece(self, piece: FilePiece) -> None:
        """Queue a piece. Values of a live tensor need no memory while they are queued."""
        self._queue.append(piece)
        self._queued_bytes += piece.view.nbytes
        if self._queued_bytes >= _QUEUED_BYTES:
            self._write_queued()

    def _cut(self, group: FileGroup, index: int, block: Block) -> Iterator[FilePiece]:
        """Cut a block into this rank's pieces, without those that the exchange of columns has written."""
        for piece in group.cut_shares(index, block, self._plan.shares_of(group.fqns[index])):
            if (piece.key, piece.chunk.offsets, piece.chunk.sizes[1:]) in self._done:
                continue
            if not self._plan.is_divided(group):
                chunks = self.undivided.setdefault(piece.key, [])
                chunks.append([piece.chunk.offsets, piece.chunk.sizes])
            yield piece

    def columns(
        self, coordinator: Coordinator, rounds: Sequence[Round], pieces: Mapping[RegionKey, FilePiece]
    ) -> ColumnExchange:
        """Return the exchange of this rank's pieces, which `write` then leaves out."""
        for one in rounds:
            for rows in one.rows:
                self._done |= {_place(rows, box) for rank, box in rows.parts if rank == coordinator.rank}

        def put(rows: Rows, box: Chunk, target: torch.Tensor) -> None:
            _put(pieces[_place(rows, box)], box, target)

        dtypes = {key: info.dtype for key, info in self._plan.files.infos.items()}
        return ColumnExchange(coordinator, rounds, dtypes, lambda rows: self._offset(rows.key, rows.chunk), put)

    def _write_rows(self, assembled: Assembled) -> None:
        rows, num_bytes = assembled.rows, len(assembled.data)
        with assembled.lease:
            self._output(rows.key).write(assembled.data, assembled.offset)
        self._count(num_bytes)
        info = self._plan.files.infos[rows.key]
        blocks = [(num_bytes, b"")]
        self._written.append(Written(rows.key, rows.chunk, info, assembled.offset, blocks, assembled.parts))

    def _entry(self, key: str) -> Entry:
        return self._plan.files.layouts[self._plan.files.file_of[key]].entries[key]

    def _offset(self, key: str, chunk: Chunk) -> int:
        """Return the byte of the file at which the first element of a part lies."""
        entry = self._entry(key)
        return entry.start + element_span(entry.info.shape, chunk)[0] * entry.info.dtype.itemsize

    def _write_queued(self) -> None:
        queue, self._queue = self._queue, []
        few, self._queued_bytes = self._queued_bytes < _FEW_BYTES, 0
        blocks = (block for piece in queue for block in self._blocks(piece))
        run_workers(blocks, lambda block: _write(block, self._count), 1 if few else NUM_WORKERS)

    def _blocks(self, piece: FilePiece) -> Iterator[_Block]:
        """Cut a piece into blocks that fit a bounce buffer, in row-major order; one run is cut at blocks of the file.

        Not thread-safe: one worker at a time asks for the next block.
        """
        entry = self._entry(piece.key)
        dtype = entry.info.dtype
        assert entry.start % dtype.itemsize == 0, "a view of a mapping must be aligned, or it would be a copy"
        is_one_run = is_run(entry.info.shape, piece.chunk)
        offset = self._offset(piece.key, piece.chunk)
        written = Written(piece.key, piece.chunk, entry.info, offset if is_one_run else None)
        self._written.append(written)
        file = self._output(piece.key)
        step = RUN_BYTES // dtype.itemsize
        if not is_one_run and not file.is_reserved:
            yield from self._strided_blocks(piece, entry, file, written)
            return
        if not is_one_run:
            for box, memory in mapped_boxes(entry, piece.chunk, piece.view, file.map):
                for target, window in zip(windows(box, step), windows(memory, step), strict=True):
                    yield _Block(window, target, written, written.add(window.numel() * dtype.itemsize))
            return
        for window in _run_windows(piece.view, offset, dtype.itemsize):
            num_bytes = window.numel() * dtype.itemsize
            yield _Block(window, [(file, offset, num_bytes)], written, written.add(num_bytes))
            offset += num_bytes

    def _strided_blocks(self, piece: FilePiece, entry: Entry, file: Output, written: Written) -> Iterator[_Block]:
        """Cut a piece that is no run of its file into blocks, each with the runs that it is written to."""
        itemsize, first = entry.info.dtype.itemsize, 0
        for window in windows(piece.view, RUN_BYTES // itemsize):
            runs: list[tuple[Output, int, int]] = []
            for box in boxes_of_range(piece.chunk.sizes, first, first + window.numel()):
                there = Chunk(tuple(map(add, box.offsets, piece.chunk.offsets)), box.sizes)
                for start, stop in spans(entry.info.shape, there, 0):
                    runs.append((file, entry.start + start * itemsize, (stop - start) * itemsize))
            yield _Block(window, runs, written, written.add(window.numel() * itemsize))
            first += window.numel()

    def _output(self, key: str) -> Output:
        return self._outputs.file(self._plan.files.file_of[key])

    def close(self) -> None:
        """Close the files; idempotent. Raises: OSError if a network file system reports a late error."""
        self._outputs.close()


def _is_in_memory(group: FileGroup) -> bool:
    """Return whether the pieces of a group are views of memory, so that they cost nothing and may be kept."""
    return not group.quantised and all(isinstance(value, torch.Tensor) or value.in_memory for value in group.values)


def _place(rows: Rows, box: Chunk) -> RegionKey:
    return rows.key, (rows.first, *box.offsets[1:]), box.sizes[1:]


def _put(piece: FilePiece, box: Chunk, target: torch.Tensor) -> None:
    """Cast the rows of a piece that `box` covers into the target, which is one run of memory."""
    start = box.offsets[0] - piece.chunk.offsets[0]
    stop = start + box.sizes[0]
    step = piece.chunk.sizes[0] // len(piece.view)  # a view may have a row per head
    values = piece.view[start // step : -(-stop // step)]
    if start % step or stop % step:
        values = values.reshape(-1, *box.sizes[1:])[start % step :][: box.sizes[0]]
    target.view(values.shape).copy_(_cast(values, target.dtype))


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a device's values in this dtype, so that they are cast there; the host's own are cast as they are copied.

    torch would copy the values as they are to fresh host memory that is not page-locked, and cast them there.
    """
    return values if values.is_cpu else values.to(dtype)


def _run_windows(view: torch.Tensor, offset: int, itemsize: int) -> Iterator[torch.Tensor]:
    """Cut values that are written from byte `offset` of a file on; contiguous ones at whole blocks of the file."""
    if not view.is_contiguous():
        yield from windows(view, RUN_BYTES // itemsize)
        return
    flat = view.view(-1)
    start = 0
    while start < len(flat):
        stop = start + (RUN_BYTES - (offset + start * itemsize) % ALIGNMENT) // itemsize
        yield flat[start:stop]
        start = stop


def _write(block: _Block, count: progress.Count) -> None:
    """Cast, digest and write one block; without a bounce buffer if the tensor's own memory can be written as it is."""
    view, target, dtype = block.view, block.target, block.written.info.dtype
    num_bytes = view.numel() * dtype.itemsize
    count(num_bytes)
    if isinstance(target, list) and len(target) == 1:
        file, offset, _ = target[0]
        as_it_is = view.dtype == dtype and is_plain_memory(view)
        if as_it_is and (num_bytes < ALIGNMENT or not file.is_direct):
            data = bytes_at(view.data_ptr(), num_bytes)
            block.written.note(block.number, data)
            file.write(data, offset)
            return
        first = offset % ALIGNMENT
    else:
        first = 0
    with bounce_buffer() as bounce:
        data = bounce.view[first : first + num_bytes]
        values = bounce.tensor[first : first + num_bytes].view(dtype).view(view.shape)
        values.copy_(_cast(view, dtype))
        block.written.note(block.number, data)
        if isinstance(target, torch.Tensor):
            target.copy_(values)
            return
        at = 0
        for file, offset, size in target:
            file.write(data[at : at + size], offset)
            at += size
