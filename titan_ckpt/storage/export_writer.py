"""The tensor bytes of an export: every rank puts its own slices at their places in the final files, and proves them.

Owns the way from views of memory into shared files, and the memory of what was written. Knows no folder's other files
and talks to no rank.

A slice that is one run of the file is cut in blocks, which several threads cast and write; a strided one (a shard of
columns) is copied through a mapping of the file, which measured twice as fast as a write per row. Every byte is
digested on its way, from memory rather than from the file, so re-reading the file proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash

from titan_ckpt import posix, progress
from titan_ckpt.errors import ExportError
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.box import element_span, is_run
from titan_ckpt.storage.engine import IO_BYTES, NUM_WORKERS, bounce_buffer, collector_held, run_workers
from titan_ckpt.storage.export_plan import ExportPlan
from titan_ckpt.storage.memory import ALIGNMENT, Buffer, bytes_at, is_plain_memory, round_up
from titan_ckpt.storage.regions import boxes, mapped_boxes, windows
from titan_ckpt.storage.safetensors_file import Layout
from titan_ckpt.storage.safetensors_reader import RUN_BYTES
from titan_ckpt.storage.shared_file import SharedFile
from titan_ckpt.tensors import Block, Chunk, LazyTensor
from titan_ckpt.transforms import FileGroup, FilePiece

_NUM_PROVERS = 2
"""Threads that compare: one digests what it has read while the other's reads are under way."""
_PROOF_BYTES = NUM_WORKERS * RUN_BYTES
"""Bytes that one of them re-reads at once."""
_QUEUED_BYTES = 256 << 20
"""Bytes of live tensors that the workers get at once; each time they wait for the slowest of them."""
_FEW_BYTES = 1 << 20
"""What one thread writes faster than others start."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A region that this rank wrote, and (number of bytes, digest) of the values it was given, block by block."""

    key: str
    chunk: Chunk
    blocks: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Block:
    """Values for one worker to cast, digest and put where they belong: into a run of a file, or into a mapping."""

    view: torch.Tensor
    dtype: torch.dtype
    target: tuple[SharedFile, int] | torch.Tensor
    written: _Written
    number: int


class ExportWriter:
    """Writes this rank's slices into files that were created before. A context manager; leaving it closes the files."""

    def __init__(self, folder: Path, plan: ExportPlan, direct: bool) -> None:
        """`direct`: around the page cache, right for files that are to be durable at the end."""
        self._folder = folder
        self._plan = plan
        self._direct = direct
        self._files: dict[str, SharedFile] = {}
        self._written: list[_Written] = []
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

    def sync(self) -> None:
        """Make durable what this rank wrote."""
        for file in self._files.values():
            file.sync()

    @collector_held()
    def prove(self, reader: TensorReader) -> None:
        """Re-read every region this rank wrote and compare it with what was given.

        Raises: ExportError naming each tensor that differs.
        """
        wrong: list[str] = []
        buffers = [Buffer.allocate(_PROOF_BYTES) for _ in range(_NUM_PROVERS)]

        def compare(batch: Sequence[_Written]) -> None:
            buffer = buffers.pop()
            wrong.extend(self._differing(batch, reader, buffer))
            buffers.append(buffer)

        run_workers(self._batches(), compare, _NUM_PROVERS)
        if wrong:
            names = ", ".join(dict.fromkeys(wrong))
            raise ExportError(f"{len(wrong)} region(s) read back differ from what was written, of {names}")

    def _batches(self) -> Iterator[list[_Written]]:
        """Yield regions that fit the proof's buffer together, each aligned; one that does not fit is alone."""
        batch: list[_Written] = []
        used = 0
        for written in self._written:
            num_bytes = round_up(self._num_bytes(written), 16)
            if batch and used + num_bytes > _PROOF_BYTES:
                yield batch
                batch, used = [], 0
            batch.append(written)
            used += num_bytes
        yield batch

    def _num_bytes(self, written: _Written) -> int:
        return written.chunk.numel * self._plan.infos[written.key].dtype.itemsize

    def _differing(self, batch: Sequence[_Written], reader: TensorReader, buffer: Buffer) -> list[str]:
        """Read regions at once and return the keys of those that are not what was written."""
        dtypes = [self._plan.infos[written.key].dtype for written in batch]
        if len(batch) == 1 and self._num_bytes(batch[0]) > _PROOF_BYTES:
            return [] if _is_in_file(reader, batch[0], dtypes[0], buffer) else [batch[0].key]
        requests: list[ReadRequest] = []
        used = 0
        for written, dtype in zip(batch, dtypes, strict=True):
            num_bytes = self._num_bytes(written)
            into = buffer.tensor[used : used + num_bytes].view(dtype)
            requests.append(ReadRequest(written.key, written.chunk, into))
            used += round_up(num_bytes, 16)
        reader.read(requests)
        pairs = zip(batch, requests, strict=True)
        return [w.key for w, r in pairs if not _are_equal(w, [bytes_at(r.into.data_ptr(), r.into.nbytes)])]

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
        written = _Written(piece.key, piece.chunk)
        self._written.append(written)
        file = self._file(piece.key)

        def block(view: torch.Tensor, target: tuple[SharedFile, int] | torch.Tensor) -> _Block:
            written.blocks.append((view.numel() * dtype.itemsize, b""))
            return _Block(view, dtype, target, written, len(written.blocks) - 1)

        step = (IO_BYTES - ALIGNMENT) // dtype.itemsize
        if not is_run(entry.info.shape, piece.chunk):
            mapped = mapped_boxes(entry, piece.chunk, piece.view, lambda at, size: posix.map_shared(file.fd, at, size))
            for box, memory in mapped:
                for target, window in zip(windows(box, step), windows(memory, step), strict=True):
                    yield block(window, target)
            return
        offset = entry.start + element_span(entry.info.shape, piece.chunk)[0] * dtype.itemsize
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
        yield from windows(view, (IO_BYTES - ALIGNMENT) // itemsize)
        return
    flat = view.view(-1)
    start = 0
    while start < len(flat):
        stop = start + (IO_BYTES - (offset + start * itemsize) % ALIGNMENT) // itemsize
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
            _note(block, data)
            file.write(data, offset)
            return
        first = offset % ALIGNMENT
    else:
        first = 0
    with bounce_buffer() as bounce:
        data = bounce.view[first : first + num_bytes]
        values = bounce.tensor[first : first + num_bytes].view(block.dtype).view(view.shape)
        values.copy_(view)
        _note(block, data)
        if isinstance(target, tuple):
            target[0].write(data, target[1])
        else:
            target.copy_(values)


def _note(block: _Block, data: memoryview) -> None:
    block.written.blocks[block.number] = (len(data), xxhash.xxh3_128_digest(data))


def _is_in_file(reader: TensorReader, written: _Written, dtype: torch.dtype, buffer: Buffer) -> bool:
    """Compare a region larger than the buffer, part by part."""

    def parts() -> Iterator[memoryview]:
        for box in boxes(written.chunk, _PROOF_BYTES // dtype.itemsize):
            into = buffer.tensor[: box.numel * dtype.itemsize].view(dtype)
            reader.read([ReadRequest(written.key, box, into)])
            yield buffer.view[: into.nbytes]

    return _are_equal(written, parts())


def _are_equal(written: _Written, parts: Iterable[memoryview]) -> bool:
    """Compare a region's values, given in parts of any size, with the digests of its blocks."""
    blocks = iter(written.blocks)
    room, digest = 0, b""
    hasher = xxhash.xxh3_128()
    for part in parts:
        at = 0
        while at < len(part):
            if not room:
                room, digest = next(blocks)
                hasher.reset()
            taken = part[at : at + room]
            hasher.update(taken)
            at += len(taken)
            room -= len(taken)
            if not room and hasher.digest() != digest:
                return False
    return True
