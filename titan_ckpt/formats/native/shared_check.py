"""Verifying sources before a load: ranks of one host share its page cache, so they divide the blocks that several need.

Owns which rank verifies which block, and that all ranks hear of damage before any of them fills a tensor. Reads nothing
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.transfers import BlockReader, BlockRun, execute, runs_of
from titan_ckpt.geometry.requests import ReadRequest, TensorReader

Needs = Mapping[str, Sequence[BlockRun]]
"""File identity -> the blocks that a rank needs verified."""

_STRIPE = 4
"""So many neighbouring blocks go to one rank, which then reads some MiB at a time."""


def check_together(parts: Sequence[tuple[TensorReader, Sequence[ReadRequest]]], coordinator: Coordinator) -> None:
    """Verify the cached blocks that `read` of the same requests would use, without writing to any tensor. Collective.

    1 Every rank finds its blocks. 2 The ranks of a host exchange which blocks they need. 3 Each verifies its part of
    them. 4 All ranks hear whether all blocks were right; only then does a rank trust what others verified for it.
    Raises: CorruptCheckpointError or OSError on the rank that met the fault, PeerError on all others.
    """
    error: BaseException | None = None
    files: list[BlockReader] = []
    alone: list[tuple[TensorReader, Sequence[ReadRequest]]] = []
    try:
        for reader, requests in parts:
            planned = [file for file in reader.plan(requests) if isinstance(file, BlockReader)]
            files += [file for file in planned if file.to_check]
            if not planned:
                alone.append((reader, requests))
    except Exception as e:
        error = e
    host = coordinator.on_host()
    try:
        of_ranks: list[Any] = host.gather("load-blocks", {} if error else _needs(files))
        if error is None:
            for file in files:
                file.divide(divided(file.identity, file.block_runs, host.rank, of_ranks))
            execute(files, check_only=True)
            for reader, requests in alone:
                reader.check(requests)
    except Exception as e:
        error = e
    coordinator.barrier("load-check", error)
    for file in files:
        file.trust()


def divided(name: str, runs: Sequence[BlockRun], rank: int, of_ranks: Sequence[Needs]) -> list[BlockRun]:
    """Return the blocks of a file that one rank verifies. `of_ranks`: the needs of each rank of the host.

    The ranks that need a block take turns, so each block is verified once and all ranks verify about as many.
    """
    needs = [ranks_runs.get(name, ()) for ranks_runs in of_ranks]
    num_blocks = max((last for of_rank in needs for _, last in of_rank), default=0)
    wanted = np.zeros((len(needs), num_blocks), dtype=bool)
    for row, of_rank in zip(wanted, needs, strict=True):
        for first, last in of_rank:
            row[first:last] = True
    turn = np.arange(num_blocks) // _STRIPE % np.maximum(wanted.sum(axis=0), 1)
    own_turn = wanted[rank] & (wanted[:rank].sum(axis=0) == turn)
    return list(runs_of(index for first, last in runs for index in range(first, last) if own_turn[index]))


def _needs(files: Sequence[BlockReader]) -> dict[str, Any]:
    """Return the blocks of each file as JSON. Several readers may have opened the same file."""
    needs: dict[str, Any] = {}
    for file in files:
        needs[file.identity] = [*needs.get(file.identity, ()), *file.block_runs]
    return needs
