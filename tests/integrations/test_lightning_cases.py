"""Lightning's Trainer, resumed from what a kill leaves at every kind of place, with every exact callback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.integrations.lightning_cases import CASES, Case
from tests.integrations.phases import Phase, play_together

NAMES = sorted(CASES)[:: 1 if os.environ.get("TITAN_CKPT_SOAK") else 4]
"""A quarter of the cases; all of them in the soak."""
DONE = [
    "2 ranks, statistics of each", "an early stop within an epoch", "an unfrozen backbone, within",
    "averages, accumulated", "averages, ended within an epoch", "limited batches, at an epoch's end",
    "metrics that grow, at an epoch's end", "schedules and skipped batches, by steps",
    "a stochastic average, normalized, at the end", "a stochastic average, within",
]  # fmt: skip
"""Cases that end within an epoch or at its end."""


def interval_of(case: Case) -> int:
    """Return after how many steps a case is saved: one to three times up to the step that is left, if not told."""
    parts = next(parts for parts in (3, 2, 1) if case.killed_at % parts == 0)
    return case.interval if case.interval > 1 else case.killed_at // parts


def play_cases(runs: Iterable[tuple[str, Path, int | None]]) -> None:
    """Play cases on equally many ranks, each in a folder whose parent has its name, and one step of which is left."""
    phases = [Phase("run", str(folder), CASES[n].ranks, (interval_of(CASES[n]), at)) for n, folder, at in runs]
    codes = play_together("tests.integrations.lightning_cases", phases)
    assert [(phase.folder, ended) for phase, ended in zip(phases, codes, strict=True) if any(ended)] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_does_the_rest_of_the_whole_run(ranks: int, tmp_path: Path) -> None:
    """Weights, optimizers, schedules, callbacks, metrics, the samples read and the order of all hooks are equal.

    A run that is done ends once more as it had ended: after a kill behind its last save.
    """
    killed, done = ([name for name in names if CASES[name].ranks == ranks] for names in (NAMES, DONE))
    play_cases((name, tmp_path / name / "whole", CASES[name].killed_at) for name in dict.fromkeys([*killed, *done]))
    resumed = [(name, tmp_path / name / "resumed") for name in killed]
    for name in done:
        again = tmp_path / "done" / name / "resumed"
        shutil.copytree(tmp_path / name / "whole" / "checkpoints", again / "checkpoints")
        resumed.append((name, again))
    play_cases((name, folder, None) for name, folder in resumed)
    for name, folder in resumed:
        for rank in range(ranks):
            found, expected = (torch.load(f / f"result-{rank}.pt") for f in (folder, tmp_path / name / "whole"))
            assert found["logs"] == expected["logs"], folder
            assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items()), folder
            rest, whole = ((f / f"events-{rank}.txt").read_text() for f in (folder, tmp_path / name / "whole"))
            assert rest and f"\n{whole}".endswith(f"\n{rest}"), folder
            assert "done" in folder.parts or len(rest) < 0.95 * len(whole), folder
