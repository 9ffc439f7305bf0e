"""The proof of an export's values: digests of what was written are compared with what the format's reader returns.

Owns the record of what was written, and the comparison. Writes nothing and talks to no rank.

A digest covers a region of a tensor, in the order of its elements, so a fault of the file's layout is found as surely
as a flipped bit. The regions of all ranks tile every tensor. Several reads run at a time, straight into aligned
memory, because the disk is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from titan_ckpt import progress
from titan_ckpt.disk.direct import IO_BYTES, NUM_WORKERS, bounce_buffer, run_workers
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, bytes_at
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.boxes import boxes_of_range
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import FilePart, TensorReader


@dataclass(frozen=True, slots=True)
class WrittenRegion:
    """A region of a file tensor, and digests of its values, block by block in the order of its elements."""

    key: str
    chunk: Chunk
    info: TensorInfo
    offset: int | None
    """First byte of the region in the file if the region is one run of bytes, else None. Reads are aligned to it."""
    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    """(Number of bytes, digest) of each."""
    parts: tuple[tuple[Chunk, bytes], ...] = ()
    """(Box, digest) of each rank's part, if several ranks assembled the region, which is then one block."""

    def add(self, num_bytes: int) -> int:
        """Append a block without a digest, and return its number."""
        self.blocks.append((num_bytes, b""))
        return len(self.blocks) - 1

    def note(self, number: int, data: memoryview) -> None:
        """Record the digest of a block's values."""
        self.blocks[number] = (len(data), digest(data))


class _Block(NamedTuple):
    """A block to compare: byte `at` of the buffer receives its values, which begin at byte `first` of the region."""

    written: WrittenRegion
    at: int
    first: int
    num_bytes: int
    digest: bytes


def digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


@gc_paused()
def differing(regions: Sequence[WrittenRegion], reader: TensorReader, count: progress.Count) -> dict[str, set[Chunk]]:
    """Read every region back and compare it with what was written; return the regions that differ, by key."""
    wrong: dict[str, set[Chunk]] = {}

    def compare(batch: Sequence[_Block]) -> None:
        count(sum(block.num_bytes for block in batch))
        with bounce_buffer() as buffer:
            reader.read([request for block in batch for request in _requests(block, buffer)])
            for block in batch:
                if not _is_as_written(block, buffer):
                    wrong.setdefault(block.written.key, set()).add(block.written.chunk)

    run_workers(_batches(regions), compare, NUM_WORKERS)
    return wrong


def _is_as_written(block: _Block, buffer: Buffer) -> bool:
    stop = block.at + block.num_bytes
    written = block.written
    if not written.parts:
        return digest(buffer.view[block.at : stop]) == block.digest
    values = buffer.tensor[block.at : stop].view(written.info.dtype).view(written.chunk.sizes)
    parts = ((values[box.within(written.chunk)].contiguous(), expected) for box, expected in written.parts)
    return all(digest(bytes_at(part.data_ptr(), part.nbytes)) == expected for part, expected in parts)


def _batches(regions: Sequence[WrittenRegion]) -> Iterator[list[_Block]]:
    """Yield lists of blocks that fit a buffer together, each aligned in the buffer as it is in the file."""
    batch: list[_Block] = []
    end = 0
    for written in regions:
        begin = 0
        for num_bytes, expected in written.blocks:
            first = 0 if written.offset is None else (written.offset + begin) % ALIGNMENT
            at = -(-(end - first) // ALIGNMENT) * ALIGNMENT + first
            if batch and at + num_bytes > IO_BYTES:
                yield batch
                batch, at = [], first
            batch.append(_Block(written, at, begin, num_bytes, expected))
            begin, end = begin + num_bytes, at + num_bytes
    yield batch


def _requests(block: _Block, buffer: Buffer) -> Iterator[FilePart]:
    """Yield the requests for a block's values: the boxes that its elements make up, one after the other in memory."""
    written, dtype = block.written, block.written.info.dtype
    at = block.at
    first, stop = block.first // dtype.itemsize, (block.first + block.num_bytes) // dtype.itemsize
    for box in boxes_of_range(written.chunk.sizes, first, stop):
        num_bytes = box.numel * dtype.itemsize
        offsets = tuple(a + b for a, b in zip(written.chunk.offsets, box.offsets, strict=True))
        yield FilePart(written.key, Chunk(offsets, box.sizes), buffer.tensor[at : at + num_bytes].view(dtype))
        at += num_bytes
