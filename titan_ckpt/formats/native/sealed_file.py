"""The writing of a rank's file: its blocks are digested, and its header is written when all digests are known.

Imports no torch, so that the writer process starts at once and takes little memory. The layout that the header
describes is made in rank_file.py.

The file is a safetensors file. The digests of the data section are known only after it is written, but the header
stands before it. So their space is fixed when the file is laid out, as zeros, and `with_digests` fills it at the end.
The header's own digest covers the digests of all blocks, so it stands for the whole file (a tree of two levels).

It is written from pieces of its data section, which come from live memory, from the arena or from a writer process, or
from a stream of tensors that are computed meanwhile. Both ways hash each block while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import xxhash

from titan_ckpt.disk.files import NUM_WORKERS
from titan_ckpt.stores.store import Place, store_of

BLOCK_BYTES = 1 << 20
"""Bytes of the data section per digest: so few that a resharded load reads little more than it needs."""

PREFIX = b'{"__metadata__":{"titan_ckpt.digest":"'
DIGEST_AT = 8 + len(PREFIX)
DIGEST_CHARS = 32
NO_DIGEST = b"0" * DIGEST_CHARS
BLOCKS_KEY = b'","titan_ckpt.blocks":"'


class Headed(Protocol):
    """A file by its header, before the data, and by its length."""

    @property
    def header(self) -> bytes: ...

    @property
    def num_bytes(self) -> int: ...


def with_digests(header: bytes, block_digests: Sequence[str]) -> tuple[bytes, str]:
    """Return a header with the digests of all blocks, and its own digest, which stands for the whole file."""
    made = bytearray(header)
    at = DIGEST_AT + DIGEST_CHARS + len(BLOCKS_KEY)
    made[at : at + DIGEST_CHARS * len(block_digests)] = "".join(block_digests).encode()
    digest = xxhash.xxh3_128_hexdigest(made)
    made[DIGEST_AT : DIGEST_AT + DIGEST_CHARS] = digest.encode()
    return bytes(made), digest


Pieces = Callable[[int, int], AbstractContextManager[memoryview]]
"""(start, stop) -> these bytes of the data section, in aligned memory, padded to a multiple of the alignment."""
Views = Callable[[int, int], Sequence[memoryview] | None]
"""(start, stop) -> these bytes in memory that does not change until the file is written; None if they are not there."""


def write_rank_file(
    path: Place,
    layout: Headed,
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

    def __init__(self, layout: Headed, pieces: Pieces, views: Views) -> None:
        self.num_bytes = layout.num_bytes
        self.start = len(layout.header)
        self.pieces = pieces
        self.views = views
        self._header = layout.header
        self._digests = [""] * -(-(layout.num_bytes - self.start) // BLOCK_BYTES)

    def see(self, views: Sequence[memoryview], start: int) -> None:
        _digest(views, start, self._digests)

    def seal(self) -> bytes:
        header, self.digest = with_digests(self._header, self._digests)
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
