"""The limits of the hardware: direct writes and reads of aligned blocks, and plain copies."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from titan_ckpt.disk import posix
from titan_ckpt.disk.files import IO_BYTES, NUM_WORKERS
from titan_ckpt.disk.kernel import Buffer, move_bytes
from titan_ckpt.disk.workers import num_copy_workers, run_workers


def write_direct(path: Path, num_bytes: int, buffers: list[Buffer]) -> None:
    """Write a new file in whole blocks around the page cache, from memory that is there already, and fsync it."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    posix.fallocate(fd, num_bytes)
    run_workers(
        range(0, num_bytes // IO_BYTES * IO_BYTES, IO_BYTES),
        lambda offset: posix.pwrite_all(fd, buffers[offset // IO_BYTES % NUM_WORKERS].view, offset),
    )
    posix.fsync(fd)
    posix.close(fd)


def read(path: Path, buffers: list[Buffer], direct: bool) -> None:
    """Read a whole file into the same few blocks of memory."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    free = list(buffers)

    def read_block(offset: int) -> None:
        buffer = free.pop()
        os.preadv(fd, [buffer.view], offset)
        free.append(buffer)

    run_workers(range(0, os.fstat(fd).st_size, IO_BYTES), read_block)
    os.close(fd)


def copy(sources: list[torch.Tensor], target: Buffer) -> None:
    """Copy tensors' memory, one after the other, in blocks and with as many threads as there are processors."""
    blocks = []
    start = target.address
    for source in sources:
        for offset in range(0, source.nbytes, IO_BYTES):
            count = min(IO_BYTES, source.nbytes - offset)
            blocks.append((start + offset, source.data_ptr() + offset, count))
        start += source.nbytes

    def move(block: tuple[int, int, int]) -> None:
        move_bytes(*block)

    run_workers(blocks, move, num_copy_workers())


def make_buffers() -> list[Buffer]:
    """Return one touched block per worker."""
    buffers = [Buffer.allocate(IO_BYTES) for _ in range(NUM_WORKERS)]
    for buffer in buffers:
        buffer.tensor.fill_(7)
    return buffers
