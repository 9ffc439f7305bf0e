"""Data position and generators on other layouts: peers that share data, another data-parallel size, another order."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import world
from tests.world import Value, gathered
from titan_ckpt import CheckpointManager, ResumeConfig
from titan_ckpt.errors import LoadMismatchError, PeerError
from titan_ckpt.testing import distributed
from titan_ckpt.training.data.batch import collate
from titan_ckpt.training.data.loader import build_dataloader
from titan_ckpt.training.data.sequences import PackedDataset

TOKENS = torch.arange(1001, dtype=torch.int32)


class Position(Value):
    """A loader of somebody's own: a counter for each data-parallel rank, that cannot be divided anew."""

    def __init__(self, dp_rank: int, dp_world_size: int, value: Any = 0) -> None:
        super().__init__(value)
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size


class Divisible(Position):
    """One that gets what every old data-parallel rank stored."""

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        self.old = [state["value"] for state in state_dicts]


def packed(dp_rank: int, dp_world_size: int, batch_size: int) -> Any:
    return build_dataloader(PackedDataset(TOKENS, 10, 5, rank=dp_rank, num_ranks=dp_world_size), batch_size, collate, 0)


def starts(batches: Iterator[Any]) -> list[int]:
    """Return the first token of each of the next batch's sequences, which names the sequence."""
    first: list[int] = next(batches)["tokens"][:, 0].tolist()
    return first


def manager(folder: Path, loader: Any, step: int | None = None) -> CheckpointManager:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # copies are alike whatever generators their ranks have
        model = nn.Linear(2, 2)
    return world.manager(folder, model, dataloader=loader, resume=ResumeConfig(step=step))


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002 - what is saved.


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def test_d4_the_data_goes_on_at_any_data_parallel_size(tmp_path: Path) -> None:
    """4 data ranks, then 2 of two peers each, then 1 process: the sequences come as if one process had read them."""
    go_on_with_peers(tmp_path)
    loader = packed(0, 1, 6)
    seed(5)
    assert world.load(manager(tmp_path, loader)).step == 2
    after_two = drawn()
    seed(5)
    world.load(manager(tmp_path, packed(0, 1, 6), step=1))
    assert drawn() != after_two, "generators are derived from the step too"
    alone = iter(packed(0, 1, 1))
    for _ in range(4 * 2 * 3 + 2 * 3 * 3):  # ranks x batch x steps
        next(alone)
    assert starts(iter(loader)) == [starts(alone)[0] for _ in range(6)]


@distributed(nproc=4)
def go_on_with_peers(folder: Path) -> None:
    rank = dist.get_rank()
    seed(rank // 2)  # as tensor-parallel peers are seeded
    loader = packed(rank, 4, 2)
    batches = iter(loader)
    taken = [starts(batches) for _ in range(3)]
    with manager(folder, loader) as m:
        m.load()
        m.save(1)
    went_on = drawn()

    seed(rank // 2 + 10)
    loader = packed(rank // 2, 2, 3)
    with manager(folder, loader) as m:
        m.load()
        batches = iter(loader)
        more = [starts(batches) for _ in range(3)]
        m.save(2)
    first = drawn()
    assert first != went_on
    seed(rank // 2 + 10)
    assert all(a != b for a, b in zip(first, drawn(), strict=True)), "no generator starts where the process did"
    generators = gathered(first)
    assert generators[0] == generators[1] != generators[2] == generators[3], "peers stay alike, others differ"
    seed(rank // 2 + 10)
    world.load(manager(folder, packed(rank // 2, 2, 3), step=1))
    assert drawn() == first, "deterministic"

    shares, peers = gathered(taken), gathered(more)
    assert peers[0] == peers[1]
    assert peers[2] == peers[3]
    in_turn = [s for of_step in zip(*shares, strict=True) for s in itertools.chain(*zip(*of_step, strict=True))]
    in_turn += [s for of_step in zip(*peers[::2], strict=True) for s in itertools.chain(*zip(*of_step, strict=True))]
    alone = iter(packed(0, 1, 1))
    assert in_turn == [starts(alone)[0] for _ in range(len(in_turn))]


def test_d4_a_position_follows_its_data_rank_and_none_is_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another order of ranks takes each data rank's position along; another number needs one that can be divided."""
    reorder(tmp_path)
    refused = pytest.raises(LoadMismatchError, match=r"of 2 data-parallel ranks, this run has 1, and Position cannot")
    with manager(tmp_path, Position(0, 1)) as m, refused:
        m.load()
    loader = Divisible(0, 1)
    world.load(manager(tmp_path, loader))
    assert loader.old == [100, 101], "those of all old ranks, in their order"
    resume = ResumeConfig(exclude=("dataloader",))
    with world.manager(tmp_path, nn.Linear(2, 2), resume=resume, save=None) as m, caplog.at_level(logging.WARNING):
        m.load()
    assert "saved by another layout of ranks" in caplog.text


@distributed(nproc=4)
def reorder(folder: Path) -> None:
    rank = dist.get_rank()
    with manager(folder, Position(rank // 2, 2, value=100 + rank // 2)) as m:
        m.load()
        m.save(1)
    loader = Position(rank % 2, 2)
    world.load(manager(folder, loader))
    assert loader.value == 100 + rank % 2
    loader = Position(rank, 4)
    world.load_fails(manager(folder, loader), (LoadMismatchError, PeerError), "cannot divide them anew")


def test_large_positions_are_given_to_another_number_of_ranks(tmp_path: Path) -> None:
    """A loader with a shuffle buffer of 9 MB in its state: more than a TCPStore takes at once."""
    world.save(manager(tmp_path, Divisible(0, 1, random.Random(0).randbytes(4_500_000).hex())))
    resume_on_two(tmp_path)
    refused = pytest.raises(LoadMismatchError, match=r"of 2 data-parallel ranks, this run has 1, and Value cannot")
    with manager(tmp_path / "own", Value()) as m, refused:  # without attributes, every rank reads data of its own
        m.load()


@distributed(nproc=2)
def resume_on_two(folder: Path) -> None:
    loader = Divisible(dist.get_rank(), 2, "")
    world.load(manager(folder, loader))
    assert loader.old == [random.Random(0).randbytes(4_500_000).hex()]
    world.save(manager(folder / "own", Value(dist.get_rank())))
