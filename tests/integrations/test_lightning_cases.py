"""Lightning's Trainer, resumed from what a kill leaves at every kind of place, with every exact callback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.integrations.lightning_cases import CASES
from tests.integrations.playing import left_behind, play_in, results

NAMES = sorted(CASES)[:: 1 if os.environ.get("TITAN_CKPT_SOAK") else 4]
"""A quarter of the cases; all of them in the soak."""


DONE = [
    "2 ranks, statistics of each", "an early stop within an epoch", "an unfrozen backbone, within",
    "averages, accumulated", "averages, ended within an epoch", "limited batches, at an epoch's end",
    "metrics that grow, at an epoch's end", "schedules and skipped batches, by steps",
    "a stochastic average, normalized, at the end", "a stochastic average, within",
]  # fmt: skip
"""Cases that end within an epoch or at its end."""


@pytest.mark.parametrize("name", DONE)
def test_a_run_that_is_done_ends_once_more_as_it_had_ended(name: str, tmp_path: Path) -> None:
    """After a kill behind its last save: the hooks of the end, the epoch's metrics, and what is frozen."""
    run, root = CASES[name].run, tmp_path / name
    assert play_in("tests.integrations.lightning_cases", run, root, [("whole", None)]) == [[0] * run.ranks]
    shutil.copytree(root / "whole" / "checkpoints", root / "resumed" / "checkpoints")
    assert play_in("tests.integrations.lightning_cases", run, root, [("resumed", None)]) == [[0] * run.ranks]
    for rank, (found, expected) in enumerate(results(run, root)):
        assert found["logs"] == expected["logs"]
        assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
        rest, whole = (
            (root / folder / f"events-{rank}.txt").read_text().splitlines() for folder in ("resumed", "whole")
        )
        assert rest and rest == whole[-len(rest) :]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_does_the_rest_of_the_whole_run(name: str, tmp_path: Path) -> None:
    """Weights, optimizers, schedules, callbacks, metrics, the samples read and the order of all hooks are equal."""
    root = tmp_path / name
    for rank, (found, expected) in enumerate(left_behind("tests.integrations.lightning_cases", CASES[name].run, root)):
        assert found["logs"] == expected["logs"]
        assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
        rest, whole = (
            (root / folder / f"events-{rank}.txt").read_text().splitlines() for folder in ("resumed", "whole")
        )
        assert rest == whole[-len(rest) :]
        assert 0 < len(rest) < 0.95 * len(whole)
