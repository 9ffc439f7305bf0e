"""A loop of one's own is killed on two ranks and goes on with the next sample, on two and on one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.own_loop import SAMPLES, STEPS
from tests.integrations.phases import Phase, play, play_together

MODULE = "tests.integrations.own_loop"
INTERVAL, KILLED_AT = 4, 9


def result(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"read-{rank}.json").read_text())
    return found


WAYS = ["ddp", "fsdp2"]


def test_killed_loops_read_the_samples_of_uninterrupted_ones(tmp_path: Path) -> None:
    """Bit for bit on two ranks; on one rank each step has the samples that two would have read, and none is lost."""

    def run(way: str, part: str, ranks: int, killed_at: int | None = None) -> Phase:
        return Phase("run", str(tmp_path / way / part), ranks, (way, INTERVAL, killed_at))

    first = [run(way, part, 2, at) for way in WAYS for part, at in (("whole", None), ("killed", KILLED_AT))]
    codes = play_together(MODULE, first)
    assert codes[::2] == [[0, 0]] * 2
    assert [code.count(-signal.SIGKILL) >= 1 for code in codes[1::2]] == [True, True]
    for way in WAYS:
        shutil.copytree(tmp_path / way / "killed/checkpoints", tmp_path / way / "alone/checkpoints")
    assert play_together(MODULE, [run(way, "killed", 2) for way in WAYS]) == [[0, 0]] * 2
    assert play_together(MODULE, [run(way, "alone", 1) for way in WAYS]) == [[0]] * 2
    for way in WAYS:
        goes_on(tmp_path / way)


def goes_on(root: Path) -> None:
    saved, rest = KILLED_AT // INTERVAL * INTERVAL, STEPS - KILLED_AT // INTERVAL * INTERVAL
    of_ranks = [result(root / "whole", rank)["read"] for rank in (0, 1)]
    for rank in (0, 1):
        found = result(root / "killed", rank)
        assert found == {"read": {n: v for n, v in of_ranks[rank].items() if int(n) > saved}, "num_read": 2 * rest}
        weights, expected = (torch.load(root / part / f"weights-{rank}.pt") for part in ("killed", "whole"))
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    together = {n: sorted(of_ranks[0][n] + of_ranks[1][n]) for n in of_ranks[0]}
    found = result(root / "alone")
    assert {n: sorted(read) for n, read in found["read"].items()} == {
        n: read for n, read in together.items() if int(n) > saved
    }
    assert found["num_read"] == 4 * rest
    epoch = [number for step in range(1, 7) for number in together[str(step)]]
    assert sorted(epoch) == [*range(SAMPLES)]
    assert together["7"] != together["1"], "another order in each epoch"


def test_what_three_ranks_of_ddp_see_themselves(tmp_path: Path) -> None:
    """The order of the whole run, in which they sum gradients, in a loop of one's own and in Fabric.

    A step without it is resumed with a warning. It needs no memory, and is refused where it cannot be given back: of a
    wrapper that comes after the manager, and of hooks that the pass of zeros would call.
    """
    ways = ["ddp", "views", "its model", "fabric", "frozen objects"]
    calls: list[tuple[Any, ...]] = [("run_summed", way) for way in ways]
    calls += [("run_older",), ("run_order",)]
    phases = [Phase(call[0], str(tmp_path / str(number)), 3, call[1:]) for number, call in enumerate(calls)]
    codes = play_together(MODULE, phases)
    assert [(call, ended) for call, ended in zip(calls, codes, strict=True) if any(ended)] == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_join_ddp_with_uneven_batches_are_killed_and_go_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """From a step that was saved while all of them had batches."""
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    phases = [Phase("run_joined", folder, ranks, (at,)) for folder, at in ((whole, None), (killed, 6), (killed, None))]
    first, second, third = play_together(MODULE, phases)
    assert first == third == [0] * ranks
    assert -signal.SIGKILL in second and 0 not in second
    for rank in range(ranks):
        weights, expected = (torch.load(Path(folder, f"weights-{rank}.pt")) for folder in (killed, whole))
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_a_save_of_a_rank_that_has_more_batches_than_another_is_an_error_and_no_wait(tmp_path: Path) -> None:
    assert play(MODULE, [Phase("run_apart", str(tmp_path), 2)]) == [[0] * 2]


@pytest.mark.parametrize("where", ["save", "load"])
def test_no_rank_waits_for_the_order_of_one_that_has_failed(where: str, tmp_path: Path) -> None:
    """A state that fails on one rank is named on all, before any of them waits in an exchange of DDP's."""
    assert play(MODULE, [Phase("run_failing", str(tmp_path), 3, (where,))]) == [[0] * 3]


def test_hooks_of_ddp_are_looked_at_again_after_the_first_step(tmp_path: Path) -> None:
    assert play(MODULE, [Phase("run_hooked_late", str(tmp_path), 2)]) == [[0] * 2]


@pytest.mark.parametrize("way", ["own", "fabric"])
def test_evaluations_by_workers_that_are_kept_draw_no_seed_more_after_a_resume(way: str, tmp_path: Path) -> None:
    assert play(MODULE, [Phase("run_evaluated", str(tmp_path), 1, (way,))]) == [[0]]
