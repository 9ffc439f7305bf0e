"""The tensor bytes of an export: every rank puts its own slices at their places in the final files, and proves them.

Owns the way from views of memory into shared files, and the memory of what was written. Knows no folder's other files
and talks to no rank.

A slice that is one run of the file is written from the tensor's own memory, or cast through a bounce buffer; a strided
one (a shard of columns) is copied through a mapping of the file, which measured twice as fast as a write per row. Every
byte is digested on its way, from memory rather than from the file, so re-reading the file proves it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash

from titan_ckpt import posix
from titan_ckpt.errors import ExportError
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.box import element_span, is_run
from titan_ckpt.storage.engine import IO_BYTES, collector_held
from titan_ckpt.storage.export_plan import ExportPlan
from titan_ckpt.storage.memory import Buffer, bytes_at, is_plain_memory, round_up
from titan_ckpt.storage.regions import boxes, mapped_boxes, windows
from titan_ckpt.storage.safetensors_file import Layout
from titan_ckpt.tensors import Block, Chunk
from titan_ckpt.transforms import FileGroup, FilePiece

_PROOF_BYTES = 16 << 20
"""Bytes that are re-read at once."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A region that this rank wrote, and the digest of the values it was given."""

    key: str
    chunk: Chunk
    digest: bytes


class ExportWriter:
    """Writes this rank's slices into files that were created before. A context manager; leaving it closes the files."""

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._fds: dict[str, int] = {}
        self._bounce = Buffer.allocate(IO_BYTES)
        self._written: list[_Written] = []
        self.undivided: dict[str, list[list[tuple[int, ...]]]] = {}
        """key -> [offsets, sizes] of each part written, where the plan does not know that the parts make up a whole."""

    def write(self, groups: Iterable[FileGroup]) -> None:
        """Resolve the groups one tensor at a time and write what is this rank's to write.

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
                        self._write_block(group, index, block)
            except Exception as caught:
                error = error or caught
        if error is not None:
            raise error

    def sync(self) -> None:
        """Make durable what this rank wrote."""
        for fd in self._fds.values():
            posix.fsync(fd)

    @collector_held()
    def prove(self, reader: TensorReader) -> None:
        """Re-read every region this rank wrote and compare it with what was given.

        Raises: ExportError naming each tensor that differs.
        """
        wrong: list[str] = []
        buffer = Buffer.allocate(_PROOF_BYTES)
        batch: list[tuple[_Written, ReadRequest]] = []
        used = 0
        for written in self._written:
            dtype = self._plan.infos[written.key].dtype
            num_bytes = written.chunk.numel * dtype.itemsize
            if num_bytes > _PROOF_BYTES:
                wrong += [] if _is_in_file(reader, written, dtype, buffer) else [written.key]
                continue
            if used + num_bytes > _PROOF_BYTES:
                wrong += _differing(reader, batch)
                batch, used = [], 0
            into = buffer.tensor[used : used + num_bytes].view(dtype)
            batch.append((written, ReadRequest(written.key, written.chunk, into)))
            used += round_up(num_bytes, 16)
        wrong += _differing(reader, batch)
        if wrong:
            names = ", ".join(dict.fromkeys(wrong))
            raise ExportError(f"{len(wrong)} region(s) read back differ from what was written, of {names}")

    def _write_block(self, group: FileGroup, index: int, block: Block) -> None:
        for part in self._plan.parts(group.fqns[index], block):
            for piece in group.cut(index, part):
                self._write_piece(piece)
                if not self._plan.is_divided(group):
                    chunks = self.undivided.setdefault(piece.key, [])
                    chunks.append([piece.chunk.offsets, piece.chunk.sizes])

    def _write_piece(self, piece: FilePiece) -> None:
        """Write one piece and remember its digest."""
        layout = self._plan.layouts[self._plan.file_of[piece.key]]
        entry = layout.entries[piece.key]
        dtype = entry.info.dtype
        assert entry.start % dtype.itemsize == 0, "a view of a mapping must be aligned, or it would be a copy"
        hasher = xxhash.xxh3_128()
        if is_run(entry.info.shape, piece.chunk):
            offset = entry.start + element_span(entry.info.shape, piece.chunk)[0] * dtype.itemsize
            for data in self._as_bytes(piece.view, dtype):
                hasher.update(data)
                posix.pwrite_all(self._fd(piece.key), data, offset)
                offset += len(data)
        else:
            fd = self._fd(piece.key)
            mapped = mapped_boxes(entry, piece.chunk, piece.view, lambda at, size: posix.map_shared(fd, at, size))
            for box, memory in mapped:
                step = IO_BYTES // dtype.itemsize
                for target, window in zip(windows(box, step), windows(memory, step), strict=True):
                    (data,) = self._as_bytes(window, dtype, bounced=True)
                    hasher.update(data)
                    target.copy_(self._bounce.tensor[: len(data)].view(dtype).view(window.shape))
        self._written.append(_Written(piece.key, piece.chunk, hasher.digest()))

    def _as_bytes(self, view: torch.Tensor, dtype: torch.dtype, bounced: bool = False) -> Iterator[memoryview]:
        """Yield the view's values in row-major order, cast, in blocks that are good until the next one."""
        if view.dtype == dtype and is_plain_memory(view) and not bounced:
            if view.nbytes:
                whole = bytes_at(view.data_ptr(), view.nbytes)
                for start in range(0, view.nbytes, IO_BYTES):
                    yield whole[start : start + IO_BYTES]
            return
        for window in windows(view, IO_BYTES // dtype.itemsize):
            num_bytes = window.numel() * dtype.itemsize
            self._bounce.tensor[:num_bytes].view(dtype).view(window.shape).copy_(window)
            yield self._bounce.view[:num_bytes]

    def _fd(self, key: str) -> int:
        name = self._plan.file_of[key]
        if name not in self._fds:
            self._fds[name] = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._fds[name]

    def close(self) -> None:
        """Close the files; idempotent. Raises: OSError, where a network file system reports a late error."""
        while self._fds:
            _, fd = self._fds.popitem()
            posix.close(fd)

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


def _differing(reader: TensorReader, batch: Sequence[tuple[_Written, ReadRequest]]) -> list[str]:
    """Read regions at once and return the keys of those that are not what was written."""
    reader.read([request for _, request in batch])
    return [w.key for w, r in batch if xxhash.xxh3_128_digest(bytes_at(r.into.data_ptr(), r.into.nbytes)) != w.digest]


def _is_in_file(reader: TensorReader, written: _Written, dtype: torch.dtype, buffer: Buffer) -> bool:
    """Compare a region larger than the buffer, part by part."""
    hasher = xxhash.xxh3_128()
    for box in boxes(written.chunk, _PROOF_BYTES // dtype.itemsize):
        into = buffer.tensor[: box.numel * dtype.itemsize].view(dtype)
        reader.read([ReadRequest(written.key, box, into)])
        hasher.update(buffer.view[: into.nbytes])
    return hasher.digest() == written.digest
