"""The proof of an export's values: digests of what was written are compared with what the format's reader returns.

Owns the record of what was written, and the comparison. Writes nothing and talks to no rank.

A digest covers elements of a box of a tensor, in their order, so a fault of the file's layout is found as surely as a
flipped bit. What all ranks wrote tiles every tensor. Several reads run at a time, straight into aligned
memory, because the disk is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.files import IO_BYTES, NUM_WORKERS
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer, bytes_at, round_up
from titan_ckpt.disk.workers import bounce_buffer, run_workers
from titan_ckpt.geometry.boxes import boxes_of_range
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.process import gc_paused


@dataclass(slots=True)
class Written:
    """Values of a file tensor that were written at once: those of a box from its byte `first` on, in its order."""

    key: str
    chunk: Chunk
    info: TensorInfo
    offset: int | None
    """Byte of the file at which the values begin if they are one run of bytes, else None. Reads are aligned to it."""
    first: int
    num_bytes: int
    parts: Sequence[tuple[Chunk | None, bytes]] = ()
    """(Box, digest) of each rank's part of the whole box; or (None, digest) of the values."""


def digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


@gc_paused()
def differing(values: Sequence[Written], reader: TensorReader, count: progress.Count) -> dict[str, set[Chunk]]:
    """Read all values back and compare them with what was written; return the boxes that differ, by key."""
    wrong: dict[str, set[Chunk]] = {}

    def compare(batch: Sequence[tuple[Written, int]]) -> None:
        count(sum(written.num_bytes for written, _ in batch))
        with bounce_buffer() as buffer:
            reader.read([request for written, at in batch for request in _requests(written, at, buffer)])
            for written, at in batch:
                if not _is_as_written(written, at, buffer):
                    wrong.setdefault(written.key, set()).add(written.chunk)

    run_workers(_batches(values), compare, NUM_WORKERS)
    return wrong


def _is_as_written(written: Written, at: int, buffer: Buffer) -> bool:
    stop = at + written.num_bytes

    def found(box: Chunk | None) -> bytes:
        if box is None:
            return digest(buffer.view[at:stop])
        values = buffer.tensor[at:stop].view(written.info.dtype).view(written.chunk.sizes)
        part = values[box.within(written.chunk)].contiguous()
        return digest(bytes_at(part.data_ptr(), part.nbytes))

    return all(found(box) == expected for box, expected in written.parts)


def _batches(values: Sequence[Written]) -> Iterator[list[tuple[Written, int]]]:
    """Yield lists of what fits a buffer together, each with its place there, aligned as it is in the file."""
    batch: list[tuple[Written, int]] = []
    end = 0
    for written in values:
        first = (written.offset or 0) % ALIGNMENT
        at = round_up(end - first) + first
        if batch and at + written.num_bytes > IO_BYTES:
            yield batch
            batch, at = [], first
        batch.append((written, at))
        end = at + written.num_bytes
    yield batch


def _requests(written: Written, at: int, buffer: Buffer) -> Iterator[Block]:
    """Yield the requests for values: the boxes that their elements make up, one after the other in memory."""
    dtype = written.info.dtype
    first, stop = written.first // dtype.itemsize, (written.first + written.num_bytes) // dtype.itemsize
    for box in boxes_of_range(written.chunk.sizes, first, stop):
        num_bytes = box.numel * dtype.itemsize
        offsets = tuple(a + b for a, b in zip(written.chunk.offsets, box.offsets, strict=True))
        yield Block(Chunk(offsets, box.sizes), buffer.tensor[at : at + num_bytes].view(dtype), written.key)
        at += num_bytes
