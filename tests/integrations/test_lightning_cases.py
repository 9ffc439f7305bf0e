"""Lightning's Trainer, resumed from what a kill leaves at every kind of place, with every exact callback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.integrations.lightning_cases import CASES
from tests.integrations.playing import left_behind

NAMES = sorted(CASES)[:: 1 if os.environ.get("TITAN_CKPT_SOAK") else 4]
"""A quarter of the cases; all of them in the soak."""


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
