"""Writing one rank's file: from pieces of its data section, or from a stream of tensors.

The pieces come from live memory, from the arena, or from a writer process. The stream serves tensors that are computed
while they are written. Both ways write the data first and hash each block while it is in the processor's cache; then
they write the header, which holds the digests, and fsync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.disk.direct import IO_BYTES, NUM_WORKERS, FileWriter, bounce_buffer, run_workers
from titan_ckpt.disk.memory import Buffer, round_up
from titan_ckpt.formats.native.layout import BLOCK_BYTES, Layout, lay_out, rank_file_name
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, blocks_of, info_of

Pieces = Callable[[int, int], AbstractContextManager[memoryview]]
"""(start, stop) -> these bytes of the data section, in aligned memory, padded to a multiple of the alignment."""


def write_rank_file(path: Path, layout: Layout, pieces: Pieces, num_workers: int = NUM_WORKERS) -> str:
    """Write a new file and return its digest. The file is durable when this returns; its entry in the folder is not.

    `pieces` is called once for each piece; with one worker in order, with several from their threads.
    Raises: OSError; the file is then incomplete and its attempt must be abandoned.
    """
    digests = [""] * layout.num_blocks
    with FileWriter(path, layout.num_bytes) as file:

        def write_piece(start: int) -> None:
            stop = min(start + IO_BYTES, layout.data_bytes)
            with pieces(start, stop) as view:
                for at in range(0, stop - start, BLOCK_BYTES):
                    block = view[at : min(at + BLOCK_BYTES, stop - start)]
                    digests[(start + at) // BLOCK_BYTES] = xxhash.xxh3_128_hexdigest(block)
                file.write(view, layout.data_start + start)

        run_workers(range(0, layout.data_bytes, IO_BYTES), write_piece, num_workers)
        header, digest = layout.seal(digests)
        aligned = Buffer.allocate(len(header))
        aligned.view[:] = header
        file.write(aligned.view, 0)
        file.finish()
    return digest


def write_stream(folder: Path, tensors: Mapping[str, torch.Tensor | LazyTensor], count: progress.Count) -> FileRecord:
    """Write all tensors as the file of rank 0, holding one block and one I/O buffer at a time.

    The blocks of a tensor must be runs of whole rows, in order and without gaps. The file is durable when this
    returns. Raises: OSError.
    """
    infos = {fqn: info_of(value) for fqn, value in tensors.items()}
    order = sorted(infos, key=lambda fqn: -infos[fqn].dtype.itemsize)
    layout = lay_out([(fqn, infos[fqn], Chunk.whole(infos[fqn].shape)) for fqn in order], 0, 1)
    blocks = (block.data for fqn in order for block in blocks_of(tensors[fqn]))
    rest = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def next_piece(start: int, stop: int) -> Iterator[memoryview]:
        nonlocal rest
        filled = 0
        while filled < stop - start:
            values = rest if len(rest) else next(blocks).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            taken = min(len(values), stop - start - filled)
            bounce.tensor[filled : filled + taken] = values[:taken]
            rest = values[taken:]
            filled += taken
        count(filled)
        yield bounce.view[: round_up(filled)]

    name = rank_file_name(0)
    with bounce_buffer() as bounce:
        digest = write_rank_file(folder / name, layout, next_piece, num_workers=1)
    return FileRecord(name, layout.num_bytes, digest)
