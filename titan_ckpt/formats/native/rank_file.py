"""Writing one rank's file: from pieces of its data section, or from a stream of tensors.

The pieces come from live memory, from the arena, or from a writer process. The stream serves tensors that are computed
while they are written. Both ways hash each block while it is in the processor's cache; the header holds the digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.disk.files import NUM_WORKERS
from titan_ckpt.disk.kernel import round_up
from titan_ckpt.disk.workers import bounce_buffer
from titan_ckpt.formats.native.layout import BLOCK_BYTES, RankFileLayout, in_file_order, lay_out, rank_file_name
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, as_bytes, blocks_of, info_of
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place

Pieces = Callable[[int, int], AbstractContextManager[memoryview]]
"""(start, stop) -> these bytes of the data section, in aligned memory, padded to a multiple of the alignment."""
Views = Callable[[int, int], Sequence[memoryview] | None]
"""(start, stop) -> these bytes in memory that does not change until the file is written; None if they are not there."""


def write_rank_file(
    path: Place,
    layout: RankFileLayout,
    pieces: Pieces,
    num_workers: int = NUM_WORKERS,
    views: Views = lambda *_: None,
) -> str:
    """Write a new file and return its digest. The file is durable when this returns; its entry in the folder is not.

    `pieces` is called once for each piece; with one worker in order, with several from their threads. A store that must
    have the header first takes `views`; where there are none, it calls `pieces` twice, once for the digests.
    Raises: OSError; the file is then incomplete and its attempt must be abandoned.
    """
    file = _RankFile(layout, pieces, views)
    store_of(path).write_sealed(path, file, num_workers)
    return file.digest


class _RankFile:
    """A rank's file as a store writes it: its header is known when every block of its data has been digested."""

    digest = ""
    """That of the whole file, once it is sealed."""

    def __init__(self, layout: RankFileLayout, pieces: Pieces, views: Views) -> None:
        self.num_bytes = layout.num_bytes
        self.start = layout.data_start
        self.pieces = pieces
        self.views = views
        self._layout = layout
        self._digests = [""] * layout.num_blocks

    def see(self, views: Sequence[memoryview], start: int) -> None:
        _digest(views, start, self._digests)

    def seal(self) -> bytes:
        header, self.digest = self._layout.seal(self._digests)
        return header


def _digest(views: Sequence[memoryview], start: int, digests: list[str]) -> None:
    """Note the digests of a piece's blocks; it lies in several views and begins at byte `start` of the data section."""
    index, left = start // BLOCK_BYTES, BLOCK_BYTES
    state = xxhash.xxh3_128()
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + left]
            state.update(part)
            at, left = at + len(part), left - len(part)
            digests[index] = state.hexdigest()
            if not left:
                state.reset()
                index, left = index + 1, BLOCK_BYTES


def write_stream(folder: Place, tensors: Mapping[str, torch.Tensor | LazyTensor], count: progress.Count) -> FileRecord:
    """Write all tensors as the file of rank 0, holding one block and one I/O buffer at a time.

    The blocks of a tensor must be runs of whole rows, in order and without gaps. The file is durable when this
    returns. Raises: OSError.
    """
    infos = {fqn: info_of(value) for fqn, value in tensors.items()}
    whole = {fqn: Chunk.whole(info.shape) for fqn, info in infos.items()}
    order = sorted(infos, key=lambda fqn: in_file_order(infos[fqn], whole[fqn]))
    layout = lay_out([(fqn, infos[fqn], whole[fqn]) for fqn in order], 0, 1)
    blocks = (block.data for fqn in order for block in blocks_of(tensors[fqn]))
    rest = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def next_piece(start: int, stop: int) -> Iterator[memoryview]:
        nonlocal rest
        filled = 0
        while filled < stop - start:
            values = rest if len(rest) else as_bytes(next(blocks).cpu())
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
