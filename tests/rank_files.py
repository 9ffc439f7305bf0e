"""A check of all files of a native checkpoint folder that goes beyond what a load does."""

from __future__ import annotations

import torch

from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.reader import NativeReader, _check_cover, _transfer
from titan_ckpt.formats.native.transfers import BlockReader, execute
from titan_ckpt.geometry.chunks import Chunk


def verify(reader: NativeReader) -> None:
    """Check every byte of every file, and that the chunks of each tensor tile it once.

    Raises: CorruptCheckpointError at the first file or tensor that is not as it was written.
    """
    whole: dict[str, list[Chunk]] = {fqn: [] for fqn in reader.tensors}
    for rank in range(reader._world_size):
        source = reader._open(rank)
        entries = [source.header.entry(i) for i in range(len(source.header.names))]
        scratch = torch.empty(0)
        everything = [_transfer(e, e.chunk, scratch) for e in entries if e.nbytes]
        blocks = BlockReader(source.file, source.header, everything)
        blocks.to_check = blocks.windows
        execute([blocks], check_only=True)
        for e in entries:
            if reader.tensors.get(e.fqn) != e.info:
                raise CorruptCheckpointError(
                    f"{source.header.path}: {e.fqn} is {e.info}, not {reader.tensors.get(e.fqn)}"
                )
            if e.chunk.numel:
                whole[e.fqn].append(e.chunk)
    for fqn, chunks in whole.items():
        _check_cover(fqn, Chunk.whole(reader.tensors[fqn].shape), chunks, str(reader.path))
