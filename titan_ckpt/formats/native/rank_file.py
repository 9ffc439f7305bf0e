"""Writing one rank's file: from pieces of its data section, or from a stream of tensors.

The pieces come from live memory, from the arena, or from a writer process. The stream serves tensors that are computed
while they are written. Both ways write the data first and hash each block while it is in the processor's cache; then
they write the header, which holds the digests, and fsync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
import xxhash

from titan_ckpt import progress
from titan_ckpt.directory.manifest import FileRecord
from titan_ckpt.disk.direct import IO_BYTES, NUM_WORKERS, FileWriter, bounce_buffer, num_copy_workers, run_workers
from titan_ckpt.disk.memory import Buffer, round_up
from titan_ckpt.formats.native.layout import BLOCK_BYTES, Layout, lay_out, rank_file_name
from titan_ckpt.geometry.chunks import Chunk, LazyTensor, blocks_of, info_of
from titan_ckpt.stores.bucket import BucketPath, Location
from titan_ckpt.stores.part_memory import PartMemory

Pieces = Callable[[int, int], AbstractContextManager[memoryview]]
"""(start, stop) -> these bytes of the data section, in aligned memory, padded to a multiple of the alignment."""
Views = Callable[[int, int], Sequence[memoryview] | None]
"""(start, stop) -> these bytes in memory that does not change until the file is written; None if they are not there."""


def write_rank_file(
    path: Location,
    layout: Layout,
    pieces: Pieces,
    num_workers: int = NUM_WORKERS,
    views: Views = lambda *_: None,
) -> str:
    """Write a new file and return its digest. The file is durable when this returns; its entry in the folder is not.

    `pieces` is called once for each piece; with one worker in order, with several from their threads. An object in a
    bucket is made of `views`; where there are none, `pieces` is called twice, once for the digests.
    Raises: OSError; the file is then incomplete and its attempt must be abandoned.
    """
    if isinstance(path, BucketPath):
        return upload_rank_file(path, layout, pieces, views)
    digests = [""] * layout.num_blocks
    with FileWriter(path, layout.num_bytes) as file:

        def write_piece(start: int) -> None:
            stop = min(start + IO_BYTES, layout.data_bytes)
            with pieces(start, stop) as view:
                _digest([view[: stop - start]], start, digests)
                file.write(view, layout.data_start + start)

        run_workers(range(0, layout.data_bytes, IO_BYTES), write_piece, num_workers)
        header, digest = layout.seal(digests)
        aligned = Buffer.allocate(len(header))
        aligned.view[:] = header
        file.write(aligned.view, 0)
        file.finish()
    return digest


def upload_rank_file(path: BucketPath, layout: Layout, pieces: Pieces, views: Views) -> str:
    """Write the same bytes as an object. Its header comes first and holds all digests, so the data is hashed before.

    A part is sent from the memory that it is in, or from a copy: there are fewer copies than parts in flight, because
    the requests and the digests take some memory, too.
    Raises: OSError; then there is no object.
    """
    digests = [""] * layout.num_blocks

    def digest_piece(start: int) -> None:
        stop = min(start + IO_BYTES, layout.data_bytes)
        if (live := views(start, stop)) is not None:
            _digest(live, start, digests)
            return
        with pieces(start, stop) as view:
            _digest([view[: stop - start]], start, digests)

    run_workers(range(0, layout.data_bytes, IO_BYTES), digest_piece, num_copy_workers())
    header, digest = layout.seal(digests)
    settings = path.bucket.settings
    part_bytes = settings.part_bytes(layout.num_bytes)
    copies = PartMemory(part_bytes, max(1, settings.concurrency - 1))

    def parts() -> Iterator[memoryview]:
        yield memoryview(header)
        start = 0
        while start < layout.data_bytes:
            stop = min(start + part_bytes - (layout.data_start + start) % part_bytes, layout.data_bytes)
            live = views(start, stop)
            yield from live if live is not None else [_copied(pieces, start, copies.take(stop - start))]
            start = stop

    path.bucket.upload(path.key, parts(), part_bytes)
    return digest


def _copied(pieces: Pieces, start: int, part: memoryview) -> memoryview:
    """Fill a part with the data section's bytes from `start` on; return it."""
    for at in range(0, len(part), IO_BYTES):
        target = np.frombuffer(part[at : at + IO_BYTES], np.uint8)
        with pieces(start + at, start + at + len(target)) as view:
            np.copyto(target, np.frombuffer(view[: len(target)], np.uint8))  # without the interpreter
    return part


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
