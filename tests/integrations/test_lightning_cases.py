"""Lightning's Trainer, killed and resumed at every kind of place, with every callback that is listed as exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.integrations.lightning_cases import CASES
from tests.integrations.playing import both_results, play_all

SHARDS = 4
"""Each is one process that plays its cases in turn, so that none comes near the bound of a process."""
NAMES = sorted(CASES)[:: 1 if os.environ.get("TITAN_CKPT_SOAK") else SHARDS]
"""A quarter of the cases; all of them in the soak."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lightning")
    for first in range(SHARDS):
        runs = {name: CASES[name].run for name in NAMES[first::SHARDS]}
        play_all("tests.integrations.lightning_cases", runs, root)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_does_the_rest_of_the_whole_run(played: Path, name: str) -> None:
    """Weights, optimizers, schedules, callbacks, metrics, the samples read and the order of all hooks are equal."""
    case = CASES[name]
    for rank, (found, expected) in enumerate(both_results(played, name, case.run)):
        assert found["logs"] == expected["logs"]
        assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
        rest, whole = (
            (played / name / folder / f"events-{rank}.txt").read_text().splitlines() for folder in ("resumed", "whole")
        )
        assert rest == whole[-len(rest) :]
        assert 0 < len(rest) < 0.95 * len(whole)
