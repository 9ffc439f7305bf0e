"""Writing one rank's file from pieces of its data section, wherever they come from: live memory, the arena, a process.

Owns the order: data first, each block hashed while it is hot, then the header that holds the digests, then fsync.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from titan_ckpt.storage.engine import IO_BYTES, FileWriter, run_workers
from titan_ckpt.storage.memory import Buffer
from titan_ckpt.storage.native_layout import BLOCK_BYTES, Layout

Pieces = Callable[[int, int], AbstractContextManager[memoryview]]
"""(start, stop) -> those bytes of the data section, in aligned memory and padded to its multiple."""


def write_rank_file(path: Path, layout: Layout, pieces: Pieces) -> str:
    """Write a new file; return its digest. Durable when it returns, its entry in the folder not yet.

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

        run_workers(range(0, layout.data_bytes, IO_BYTES), write_piece)
        header, digest = layout.seal(digests)
        aligned = Buffer.allocate(len(header))
        aligned.view[:] = header
        file.write(aligned.view, 0)
        file.finish()
    return digest
