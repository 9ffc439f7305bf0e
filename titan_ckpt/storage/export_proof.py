"""The proof of an export's values: what was handed over is digested, and compared with what any reader gives back.

Owns the memory of what was written and the comparison. Writes nothing and talks to no rank.

Digests are of regions of tensors, in the order of their elements, so a fault of the file's layout is found as surely as
a flipped bit; the regions of all ranks tile every tensor. Reads go straight into aligned memory, several at a time, for
the disk is what limits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from titan_ckpt.errors import ExportError
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.box import boxes_of_range
from titan_ckpt.storage.engine import IO_BYTES, NUM_WORKERS, bounce_buffer, collector_held, run_workers
from titan_ckpt.storage.memory import ALIGNMENT, Buffer, bytes_at
from titan_ckpt.tensors import Chunk, TensorInfo


@dataclass(frozen=True, slots=True)
class Written:
    """A region of a file tensor, and what was written there, block by block in the order of its elements."""

    key: str
    chunk: Chunk
    info: TensorInfo
    offset: int | None
    """Byte of the file where the region begins, if it is one run of it: reads are aligned by it."""
    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    """(Number of bytes, digest) of each."""
    parts: tuple[tuple[Chunk, bytes], ...] = ()
    """Of one block that several ranks put together: the box of each, and the digest of what it gave."""

    def add(self, num_bytes: int) -> int:
        """Make room for the digest of the next block, and return its number."""
        self.blocks.append((num_bytes, b""))
        return len(self.blocks) - 1

    def note(self, number: int, data: memoryview) -> None:
        """Remember the values of a block."""
        self.blocks[number] = (len(data), digest(data))


class _Block(NamedTuple):
    """A block to compare: where its values go in the buffer, and where they are in the region."""

    written: Written
    at: int
    first: int
    num_bytes: int
    digest: bytes


def digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


@collector_held()
def prove(regions: Sequence[Written], reader: TensorReader, sources: Mapping[str, Sequence[str]]) -> None:
    """Read every region as any reader would, and compare it with what was written.

    `sources`: key -> native names that were written there, of which several are tied and must hold the same.
    Raises: ExportError naming each tensor that differs.
    """
    wrong: dict[str, set[Chunk]] = {}

    def compare(batch: Sequence[_Block]) -> None:
        with bounce_buffer() as buffer:
            reader.read([request for block in batch for request in _requests(block, buffer)])
            for block in batch:
                if not _is_as_written(block, buffer):
                    wrong.setdefault(block.written.key, set()).add(block.written.chunk)

    run_workers(_batches(regions), compare, NUM_WORKERS)
    if wrong:
        number = sum(map(len, wrong.values()))
        names = (
            f"{key} (tied, and not equal: {', '.join(sources[key])})" if len(sources.get(key, ())) > 1 else key
            for key in wrong
        )
        raise ExportError(f"{number} region(s) read back differ from what was written, of {', '.join(names)}")


def _is_as_written(block: _Block, buffer: Buffer) -> bool:
    stop = block.at + block.num_bytes
    written = block.written
    if not written.parts:
        return digest(buffer.view[block.at : stop]) == block.digest
    values = buffer.tensor[block.at : stop].view(written.info.dtype).view(written.chunk.sizes)
    parts = ((values[box.within(written.chunk)].contiguous(), expected) for box, expected in written.parts)
    return all(digest(bytes_at(part.data_ptr(), part.nbytes)) == expected for part, expected in parts)


def _batches(regions: Sequence[Written]) -> Iterator[list[_Block]]:
    """Yield blocks that fit a buffer together, each aligned as its place in the file is."""
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


def _requests(block: _Block, buffer: Buffer) -> Iterator[ReadRequest]:
    """Ask for a block's values: the boxes that its elements make up, one after the other in memory."""
    written, dtype = block.written, block.written.info.dtype
    at = block.at
    first, stop = block.first // dtype.itemsize, (block.first + block.num_bytes) // dtype.itemsize
    for box in boxes_of_range(written.chunk.sizes, first, stop):
        num_bytes = box.numel * dtype.itemsize
        offsets = tuple(a + b for a, b in zip(written.chunk.offsets, box.offsets, strict=True))
        yield ReadRequest(written.key, Chunk(offsets, box.sizes), buffer.tensor[at : at + num_bytes].view(dtype))
        at += num_bytes
