"""The tensor bytes of an export: every rank puts its own slices at their places in the final files, and proves them.

Owns the way from views of memory into shared files, and the memory of what was written. Knows no folder's other files
and talks to no rank.

A slice that is one run of the file is cut in blocks, which several threads cast and write; a strided one (a shard of
columns) is copied through a mapping of the file, which measured twice as fast as a write per row. Every byte is
digested on its way, from memory rather than from the file, so re-reading the file proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from titan_ckpt import posix, progress
from titan_ckpt.storage.base import TensorReader
from titan_ckpt.storage.box import element_span, is_run
from titan_ckpt.storage.engine import NUM_WORKERS, bounce_buffer, run_workers
from titan_ckpt.storage.export_plan import ExportPlan
from titan_ckpt.storage.export_proof import Written, prove
from titan_ckpt.storage.memory import ALIGNMENT, bytes_at, is_plain_memory
from titan_ckpt.storage.regions import mapped_boxes, windows
from titan_ckpt.storage.safetensors_file import Layout
from titan_ckpt.storage.safetensors_reader import RUN_BYTES
from titan_ckpt.storage.shared_file import SharedFile
from titan_ckpt.tensors import Block, LazyTensor
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
        self.undivided: dict[str, list[list[tuple[int, ...]]]] = {}
        """key -> [offsets, sizes] of each part written, where the plan does not know that the parts make up a whole."""

    def write(self, groups: Iterable[FileGroup]) -> None:
        """Resolve the groups one tensor at a time, on this thread, and write what is this rank's to write.

        A group that takes part in collectives is resolved even after an error, so that other ranks do not wait in
        vain. Raises: the first error.
        """
        error: Exception | None = None
        for group in groups:
            if not group.collective and (error is not None or not self._plan.writes(group)):
                continue
            try:
                for index, block in group.blocks():
                    if error is None:
                        self._add(group, index, block)
            except Exception as caught:
                error = error or caught
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
        prove(self._written, reader)

    def _add(self, group: FileGroup, index: int, block: Block) -> None:
        """Queue what of a block is this rank's to write; a lazy tensor's values are written before the next are made.

        A live tensor's values need no memory while they wait.
        """
        for piece in group.cut_shares(index, block, self._plan.shares_of(group.fqns[index])):
            self._queue.append(piece)
            if not self._plan.is_divided(group):
                chunks = self.undivided.setdefault(piece.key, [])
                chunks.append([piece.chunk.offsets, piece.chunk.sizes])
        is_lazy = isinstance(group.values[index], LazyTensor)
        if is_lazy or sum(piece.view.nbytes for piece in self._queue) >= _QUEUED_BYTES:
            self._write_queued()

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
