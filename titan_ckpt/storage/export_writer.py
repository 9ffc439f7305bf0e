"""The tensor bytes of an export: every rank puts its own slices at their places in the final files, and proves them.

Owns the way from views of memory into shared files, and the memory of what was written. Knows no folder's other files
and talks to no rank.

A slice that is one run of the file is cut in blocks, which several threads cast and write. Strided ones (shards of
columns) are put together with those of the machine's other ranks (assembly.py). Where that cannot be, and for values
that are computed when they are written, they are copied through a mapping of the file, which measured twice as fast as
a write per row. Every byte is digested on its way, from memory rather than from the file, so re-reading the file proves
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from titan_ckpt import posix, progress
from titan_ckpt.storage.assembly import Assembly, GaveUp, Rows
from titan_ckpt.storage.base import TensorReader
from titan_ckpt.storage.box import element_span, is_run
from titan_ckpt.storage.engine import NUM_WORKERS, bounce_buffer, run_workers
from titan_ckpt.storage.export_plan import ExportPlan
from titan_ckpt.storage.export_proof import Written, digest, prove
from titan_ckpt.storage.memory import ALIGNMENT, bytes_at, is_plain_memory
from titan_ckpt.storage.regions import mapped_boxes, windows
from titan_ckpt.storage.safetensors_file import Layout
from titan_ckpt.storage.safetensors_reader import RUN_BYTES
from titan_ckpt.storage.shared_file import SharedFile
from titan_ckpt.tensors import Block, Chunk, LazyTensor, blocks_of
from titan_ckpt.transforms import FileGroup, FilePiece

_QUEUED_BYTES = 256 << 20
"""Bytes of live tensors that the workers get at once; each time they wait for the slowest of them."""
_FEW_BYTES = 1 << 20
"""What one thread writes faster than others start."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Values for one worker to cast, digest and put where they belong: into a run of a file, or into a mapping."""

    view: torch.Tensor
    dtype: torch.dtype
    target: tuple[SharedFile, int] | torch.Tensor
    written: Written
    number: int


Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""File key, where a region begins, and its sizes but for the number of its rows: no two regions have the same."""


@dataclass(frozen=True, slots=True)
class Together:
    """What this rank and others put together."""

    assembly: Assembly
    rows: Sequence[Rows]
    pieces: Mapping[Place, FilePiece]


class ExportWriter:
    """Writes this rank's slices into files that were created before. A context manager; leaving it closes the files."""

    def __init__(self, folder: Path, plan: ExportPlan, direct: bool) -> None:
        """`direct`: around the page cache, right for files that are to be durable at the end."""
        self._folder = folder
        self._plan = plan
        self._direct = direct
        self._files: dict[str, SharedFile] = {}
        self._written: list[Written] = []
        self._queue: list[FilePiece] = []
        self._done: set[Place] = set()
        self._sources: dict[str, list[str]] = {}
        self.gave_up = False
        """Whether `write` ended early because another rank had failed, which says so itself."""
        self.undivided: dict[str, list[list[tuple[int, ...]]]] = {}
        """key -> [offsets, sizes] of each part written, where the plan does not know that the parts make up a whole."""

    def strided(self, groups: Sequence[FileGroup]) -> dict[Place, FilePiece]:
        """Return what this rank writes of tensors in memory that is no run of its file; of tied ones nothing."""
        found: dict[Place, FilePiece] = {}
        if not self._direct:
            return found
        makers = Counter(key for group in groups for key in group.infos)
        for group in groups:
            if group.quantised or any(makers[key] > 1 for key in group.infos):
                continue
            for index, value in enumerate(group.values):
                shares = self._plan.shares_of(group.fqns[index])
                for block in blocks_of(value) if isinstance(value, torch.Tensor) or value.in_memory else ():
                    for piece in group.cut_shares(index, block, shares):
                        if not is_run(self._plan.infos[piece.key].shape, piece.chunk):
                            found[piece.key, piece.chunk.offsets, piece.chunk.sizes[1:]] = piece
        return found

    def write(self, groups: Iterable[FileGroup], together: Together | None = None) -> None:
        """Resolve the groups one tensor at a time, on this thread, and write what is this rank's to write.

        `together`: what is put together with other ranks' parts; that comes first.
        A group that takes part in collectives is resolved even after an error, so that other ranks do not wait in
        vain. Raises: the first error, but for another rank's.
        """
        error: Exception | None = None
        if together is not None:
            try:
                self._write_together(together)
            except GaveUp as caught:
                error = caught
            except Exception as caught:
                together.assembly.give_up()
                error = caught
        for group in groups:
            for key in group.infos:
                self._sources.setdefault(key, []).append(", ".join(group.fqns))
            if not group.collective and (error is not None or not self._plan.writes(group)):
                continue
            try:
                for index, block in group.blocks():
                    if error is None:
                        self._add(group, index, block)
            except Exception as caught:
                error = error or caught
        self.gave_up = isinstance(error, GaveUp)
        if self.gave_up:
            return
        if error is not None:
            raise error
        self._write_queued()
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Make durable what this rank wrote."""
        for file in self._files.values():
            file.sync()

    def prove(self, reader: TensorReader) -> None:
        """Compare every region this rank wrote with what is read back. Raises: ExportError naming what differs."""
        prove(self._written, reader, self._sources)

    def _add(self, group: FileGroup, index: int, block: Block) -> None:
        """Queue what of a block is this rank's to write; a lazy tensor's values are written before the next are made.

        A live tensor's values need no memory while they wait.
        """
        for piece in group.cut_shares(index, block, self._plan.shares_of(group.fqns[index])):
            if (piece.key, piece.chunk.offsets, piece.chunk.sizes[1:]) in self._done:
                continue
            self._queue.append(piece)
            if not self._plan.is_divided(group):
                chunks = self.undivided.setdefault(piece.key, [])
                chunks.append([piece.chunk.offsets, piece.chunk.sizes])
        is_lazy = isinstance(group.values[index], LazyTensor)
        if is_lazy or sum(piece.view.nbytes for piece in self._queue) >= _QUEUED_BYTES:
            self._write_queued()

    def _write_together(self, together: Together) -> None:
        """Put this rank's parts where they become whole rows, and write those that are this rank's to write."""
        me = together.assembly.rank
        mine = [rows for rows in together.rows if any(rank == me for rank, _ in rows.parts)]
        for rows in mine:
            self._file(rows.key)
            self._done |= {_place(rows, box) for rank, box in rows.parts if rank == me}
        failures: list[BaseException] = []

        def write(rows: Rows) -> None:
            try:
                self._write_rows(rows, together)
            except GaveUp:
                raise
            except BaseException as error:  # now, for this rank's other threads wait for these rows too
                failures.append(error)
                together.assembly.give_up()
                raise

        try:
            run_workers(mine, write)
        except GaveUp:
            if failures:
                raise failures[0] from None
            raise

    def _write_rows(self, rows: Rows, together: Together) -> None:
        """Put this rank's parts into the rows' slot; where they are its own to write, wait for the others' parts."""
        name, assembly = self._plan.file_of[rows.key], together.assembly
        entry = self._plan.layouts[name].entries[rows.key]
        dtype = entry.info.dtype
        offset = entry.start + element_span(entry.info.shape, rows.chunk)[0] * dtype.itemsize
        first, num_bytes = offset % ALIGNMENT, rows.chunk.numel * dtype.itemsize
        slot = assembly.slot(rows)
        whole = slot.tensor[first : first + num_bytes].view(dtype).view(rows.chunk.sizes)
        for number, (rank, box) in enumerate(rows.parts):
            if rank == assembly.rank:
                piece = together.pieces[_place(rows, box)]
                assembly.put(rows, number, _put(piece, box, _part_of(whole, box, rows.chunk)))
        if rows.writer == assembly.rank:
            parts = assembly.complete(rows)
            self._files[name].write(slot.view[first : first + num_bytes], offset)
            assembly.written(rows)
            progress.advance(num_bytes)
            self._written.append(Written(rows.key, rows.chunk, entry.info, offset, [(num_bytes, b"")], parts))

    def _write_queued(self) -> None:
        queue, self._queue = self._queue, []
        few = sum(piece.view.nbytes for piece in queue) < _FEW_BYTES
        run_workers((block for piece in queue for block in self._blocks(piece)), _write, 1 if few else NUM_WORKERS)

    def _blocks(self, piece: FilePiece) -> Iterator[_Block]:
        """Cut a piece in blocks of at most a bounce buffer, in row-major order; of one run at whole blocks of its file.

        Not thread-safe: one worker at a time asks for the next one.
        """
        layout = self._plan.layouts[self._plan.file_of[piece.key]]
        entry = layout.entries[piece.key]
        dtype = entry.info.dtype
        assert entry.start % dtype.itemsize == 0, "a view of a mapping must be aligned, or it would be a copy"
        is_one_run = is_run(entry.info.shape, piece.chunk)
        offset = entry.start + element_span(entry.info.shape, piece.chunk)[0] * dtype.itemsize
        written = Written(piece.key, piece.chunk, entry.info, offset if is_one_run else None)
        self._written.append(written)
        file = self._file(piece.key)

        def block(view: torch.Tensor, target: tuple[SharedFile, int] | torch.Tensor) -> _Block:
            return _Block(view, dtype, target, written, written.add(view.numel() * dtype.itemsize))

        step = RUN_BYTES // dtype.itemsize
        if not is_one_run:
            mapped = mapped_boxes(entry, piece.chunk, piece.view, lambda at, size: posix.map_shared(file.fd, at, size))
            for box, memory in mapped:
                for target, window in zip(windows(box, step), windows(memory, step), strict=True):
                    yield block(window, target)
            return
        for window in _run_windows(piece.view, offset, dtype.itemsize):
            yield block(window, (file, offset))
            offset += window.numel() * dtype.itemsize

    def _file(self, key: str) -> SharedFile:
        name = self._plan.file_of[key]
        if name not in self._files:
            self._files[name] = SharedFile(self._folder / name, self._direct)
        return self._files[name]

    def close(self) -> None:
        """Close the files; idempotent. Raises: OSError, where a network file system reports a late error."""
        while self._files:
            _, file = self._files.popitem()
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _place(rows: Rows, box: Chunk) -> Place:
    return rows.key, (rows.first, *box.offsets[1:]), box.sizes[1:]


def _part_of(whole: torch.Tensor, box: Chunk, rows: Chunk) -> torch.Tensor:
    return whole[box.within(rows)]


def _put(piece: FilePiece, box: Chunk, target: torch.Tensor) -> bytes:
    """Cast some rows of a piece into the target, and return their digest."""
    start = box.offsets[0] - piece.chunk.offsets[0]
    stop = start + box.sizes[0]
    step = piece.chunk.sizes[0] // len(piece.view)  # a view may have a row per head
    values = piece.view[start // step : -(-stop // step)]
    if start % step or stop % step:
        values = values.reshape(-1, *box.sizes[1:])[start % step :][: box.sizes[0]]
    with bounce_buffer() as bounce:
        data = bounce.tensor[: target.nbytes].view(target.dtype)
        data.view(values.shape).copy_(values)
        target.copy_(data.view(box.sizes))
        return digest(bounce.view[: target.nbytes])


def create_file(path: Path, layout: Layout) -> None:
    """Create a file of its final size, all space reserved, with its header. Raises: OSError, also for a full disk."""
    fd = posix.open_exclusive(path)
    try:
        posix.fallocate(fd, layout.num_bytes)
        posix.truncate(fd, layout.num_bytes)
        posix.pwrite_all(fd, layout.header, 0)
    finally:
        posix.close(fd)


def _run_windows(view: torch.Tensor, offset: int, itemsize: int) -> Iterator[torch.Tensor]:
    """Cut values that go to byte `offset` of a file on; where their memory allows it, at whole blocks of the file."""
    if not view.is_contiguous():
        yield from windows(view, RUN_BYTES // itemsize)
        return
    flat = view.view(-1)
    start = 0
    while start < len(flat):
        stop = start + (RUN_BYTES - (offset + start * itemsize) % ALIGNMENT) // itemsize
        yield flat[start:stop]
        start = stop


def _write(block: _Block) -> None:
    """Cast, digest and write one block; what has no need of a bounce buffer goes from the tensor's own memory."""
    view, target = block.view, block.target
    num_bytes = view.numel() * block.dtype.itemsize
    progress.advance(num_bytes)
    if isinstance(target, tuple):
        file, offset = target
        as_it_is = view.dtype == block.dtype and is_plain_memory(view)
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
        values = bounce.tensor[first : first + num_bytes].view(block.dtype).view(view.shape)
        values.copy_(view)
        block.written.note(block.number, data)
        if isinstance(target, tuple):
            target[0].write(data, target[1])
        else:
            target.copy_(values)
