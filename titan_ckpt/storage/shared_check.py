"""Verifying sources before a load: ranks of one host, which share its page cache, divide what several of them need.

Owns who verifies which block, and that all ranks hear of damage before any fills a tensor. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan_ckpt.distributed import Coordinator
from titan_ckpt.storage.base import ReadRequest, TensorReader
from titan_ckpt.storage.transfers import BlockReader, BlockRun, execute, runs_of

Needs = Mapping[str, Sequence[BlockRun]]
"""By file, the blocks that a rank wants verified."""

_STRIPE = 4
"""Neighbouring blocks that go to one rank, so that it reads some MiB at a time."""


def check_together(parts: Sequence[tuple[TensorReader, Sequence[ReadRequest]]], coordinator: Coordinator) -> None:
    """Verify, as far as memory holds it, what `read` of the same requests will take. Collective; fills nothing.

    1 Every rank finds its blocks. 2 Ranks of a host tell each other which. 3 Each verifies its part of them. 4 All
    ranks hear whether all were right: only then is what others verified for this rank as good as its own.
    Raises: CorruptCheckpointError or OSError where a rank met it, PeerError on all others.
    """
    error: BaseException | None = None
    files: list[BlockReader] = []
    alone: list[tuple[TensorReader, Sequence[ReadRequest]]] = []
    try:
        for reader, requests in parts:
            found = reader.plan(requests)
            files += [file for file in found if file.to_check]
            if not found:
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
    """Return which of a file's blocks one rank verifies; `of_ranks`: what each rank of the host needs.

    Every rank that needs a block could; they take turns, so each block has one, and all have about as many.
    """
    needs = [ranks_runs.get(name, ()) for ranks_runs in of_ranks]
    num_blocks = max((last for of_rank in needs for _, last in of_rank), default=0)
    wanted = np.zeros((len(needs), num_blocks), dtype=bool)
    for row, of_rank in zip(wanted, needs, strict=True):
        for first, last in of_rank:
            row[first:last] = True
    turn = np.arange(num_blocks) // _STRIPE % np.maximum(wanted.sum(axis=0), 1)
    mine = wanted[rank] & (wanted[:rank].sum(axis=0) == turn)
    return list(runs_of(index for first, last in runs for index in range(first, last) if mine[index]))


def _needs(files: Sequence[BlockReader]) -> dict[str, Any]:
    """Return the blocks of each file as JSON; several readers may have opened one."""
    needs: dict[str, Any] = {}
    for file in files:
        needs[file.identity] = [*needs.get(file.identity, ()), *file.block_runs]
    return needs
