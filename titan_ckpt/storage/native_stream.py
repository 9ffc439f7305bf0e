"""Writing a step of this package's own format from tensors that are computed as they are written, in one process.

Owns the streaming of lazy tensors into one rank's file. Saves of a training run go through native_writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from titan_ckpt.storage.base import FileRecord
from titan_ckpt.storage.engine import IO_BYTES, FileWriter, bounce_buffer
from titan_ckpt.storage.memory import Buffer, round_up
from titan_ckpt.storage.native_layout import BLOCK_BYTES, Layout, lay_out
from titan_ckpt.storage.native_writer import rank_file_name
from titan_ckpt.tensors import Chunk, LazyTensor, blocks_of, info_of


def write_stream(folder: Path, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> FileRecord:
    """Write all tensors as one rank's file, holding one block and one I/O buffer at a time; durable when it returns.

    A tensor's blocks must be rows in order: each whole but for dim 0, without gaps. Raises: OSError.
    """
    infos = {fqn: info_of(value) for fqn, value in tensors.items()}
    layout = lay_out([(fqn, info, Chunk.whole(info.shape)) for fqn, info in infos.items()], 0, 1)
    name = rank_file_name(0)
    with FileWriter(folder / name, layout.num_bytes) as file, bounce_buffer() as bounce:
        stream = _Stream(file, layout, bounce)
        for entry in layout.entries:
            for block in blocks_of(tensors[entry.fqn]):
                stream.append(block.data)
        stream.flush()
        header, digest = layout.seal(stream.digests)
        aligned = Buffer.allocate(len(header))
        aligned.view[:] = header
        file.write(aligned.view, 0)
        file.finish()
    return FileRecord(name, layout.num_bytes, digest)


class _Stream:
    """The data section, appended to; hashed and written an I/O buffer at a time."""

    def __init__(self, file: FileWriter, layout: Layout, bounce: Buffer) -> None:
        self.digests: list[str] = []
        self._file = file
        self._bounce = bounce
        self._offset = layout.data_start
        self._filled = 0

    def append(self, data: torch.Tensor) -> None:
        flat = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        taken = 0
        while taken < flat.numel():
            count = min(IO_BYTES - self._filled, flat.numel() - taken)
            self._bounce.tensor[self._filled : self._filled + count] = flat[taken : taken + count]
            self._filled += count
            taken += count
            if self._filled == IO_BYTES:
                self.flush()

    def flush(self) -> None:
        for at in range(0, self._filled, BLOCK_BYTES):
            block = self._bounce.view[at : min(at + BLOCK_BYTES, self._filled)]
            self.digests.append(xxhash.xxh3_128_hexdigest(block))
        if self._filled:
            self._file.write(self._bounce.view[: round_up(self._filled)], self._offset)
        self._offset += self._filled
        self._filled = 0
