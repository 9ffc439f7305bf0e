"""A loop of one's own is killed on two ranks and goes on with the next sample, on two and on one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.own_loop import SAMPLES, STEPS
from tests.integrations.phases import Phase, play

INTERVAL, KILLED_AT = 4, 9


def result(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"read-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_killed_loop_reads_the_samples_of_an_uninterrupted_one(way: str, tmp_path: Path) -> None:
    """Bit for bit on two ranks; on one rank each step has the samples that two would have read, and none is lost."""
    whole, killed, alone = (str(tmp_path / name) for name in ("whole", "killed", "alone"))
    phases = [
        Phase("run", whole, 2, (way, INTERVAL, None)),
        Phase("run", killed, 2, (way, INTERVAL, KILLED_AT)),
        Phase("copied", alone, 1, (killed,)),
        Phase("run", killed, 2, (way, INTERVAL, None)),
        Phase("run", alone, 1, (way, INTERVAL, None)),
    ]
    codes = play("tests.integrations.own_loop", phases)
    assert codes.pop(1).count(-signal.SIGKILL) >= 1
    assert codes == [[0, 0], [0], [0, 0], [0]]

    saved, rest = KILLED_AT // INTERVAL * INTERVAL, STEPS - KILLED_AT // INTERVAL * INTERVAL
    of_ranks = [result(Path(whole), rank)["read"] for rank in (0, 1)]
    for rank in (0, 1):
        found = result(Path(killed), rank)
        assert found == {"read": {n: v for n, v in of_ranks[rank].items() if int(n) > saved}, "num_read": 2 * rest}
        weights, expected = (torch.load(Path(folder, f"weights-{rank}.pt")) for folder in (killed, whole))
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    together = {n: sorted(of_ranks[0][n] + of_ranks[1][n]) for n in of_ranks[0]}
    found = result(Path(alone))
    assert {n: sorted(read) for n, read in found["read"].items()} == {
        n: read for n, read in together.items() if int(n) > saved
    }
    assert found["num_read"] == 4 * rest
    epoch = [number for step in range(1, 7) for number in together[str(step)]]
    assert sorted(epoch) == [*range(SAMPLES)]
    assert together["7"] != together["1"], "another order in each epoch"


@pytest.mark.parametrize("way", ["ddp", "views", "its model", "fabric", "frozen objects"])
def test_three_ranks_of_ddp_sum_gradients_in_the_order_of_the_whole_run(way: str, tmp_path: Path) -> None:
    """The manager finds DDP around the model by itself, in a loop of one's own and in Fabric."""
    assert play("tests.integrations.own_loop", [Phase("run_summed", str(tmp_path), 3, (way,))]) == [[0] * 3]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_join_ddp_with_uneven_batches_are_killed_and_go_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """From a step that was saved while all of them had batches."""
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    phases = [Phase("run_joined", folder, ranks, (at,)) for folder, at in ((whole, None), (killed, 6), (killed, None))]
    first, second, third = play("tests.integrations.own_loop", phases)
    assert first == third == [0] * ranks
    assert -signal.SIGKILL in second and 0 not in second
    for rank in range(ranks):
        weights, expected = (torch.load(Path(folder, f"weights-{rank}.pt")) for folder in (killed, whole))
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_a_save_of_a_rank_that_has_more_batches_than_another_is_an_error_and_no_wait(tmp_path: Path) -> None:
    assert play("tests.integrations.own_loop", [Phase("run_apart", str(tmp_path), 2)]) == [[0] * 2]


def test_the_order_of_ddp_needs_no_memory_and_is_refused_where_it_cannot_be_given_back(tmp_path: Path) -> None:
    """A wrapper that comes after the manager, and hooks that the pass of zeros would call."""
    assert play("tests.integrations.own_loop", [Phase("run_order", str(tmp_path), 3)]) == [[0] * 3]


@pytest.mark.parametrize("where", ["save", "load"])
def test_no_rank_waits_for_the_order_of_one_that_has_failed(where: str, tmp_path: Path) -> None:
    """A state that fails on one rank is named on all, before any of them waits in an exchange of DDP's."""
    assert play("tests.integrations.own_loop", [Phase("run_failing", str(tmp_path), 3, (where,))]) == [[0] * 3]


def test_a_step_without_the_order_of_ddp_is_resumed_with_a_warning(tmp_path: Path) -> None:
    assert play("tests.integrations.own_loop", [Phase("run_older", str(tmp_path), 3)]) == [[0] * 3]


def test_hooks_of_ddp_are_looked_at_again_after_the_first_step(tmp_path: Path) -> None:
    assert play("tests.integrations.own_loop", [Phase("run_hooked_late", str(tmp_path), 2)]) == [[0] * 2]


@pytest.mark.parametrize("way", ["own", "fabric"])
def test_evaluations_by_workers_that_are_kept_draw_no_seed_more_after_a_resume(way: str, tmp_path: Path) -> None:
    assert play("tests.integrations.own_loop", [Phase("run_evaluated", str(tmp_path), 1, (way,))]) == [[0]]
