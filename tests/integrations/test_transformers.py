"""transformers' Trainer and TRL's trainers with titan_ckpt: killed and resumed runs equal uninterrupted ones."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import Program
from tests.integrations.phases import Phase, play

RUNS = {
    "trainer-1": ("run", 1, 8),
    "trainer-2": ("run", 2, 5),
}
"""Name -> function of trainer_runs.py, ranks, step at which the run is killed."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Play every run whole, killed and resumed; return the folder of their results."""
    root = tmp_path_factory.mktemp("trainers")
    phases = [
        Phase(function, str(root / name / folder), ranks, (at if kills else None,))
        for name, (function, ranks, at) in RUNS.items()
        for folder, kills in (("whole", False), ("killed", True), ("killed", False))
    ]
    program = Program(play, "tests.integrations.trainer_runs", phases, str(root / "codes.json"), output=root / "log.txt")
    try:
        assert program.wait(280) == 0, program.text()
    finally:
        program.kill()
    codes = iter(json.loads((root / "codes.json").read_text()))
    expected = [code for _, ranks, _ in RUNS.values() for code in ([0] * ranks, [-signal.SIGKILL] * ranks, [0] * ranks)]
    assert [*codes] == expected, program.text()
    return root


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_bit_for_bit_and_reads_nothing_twice(played: Path, name: str) -> None:
    """SIGKILL within the second epoch: weights and log are those of the whole run; only what follows is read."""
    _, ranks, _ = RUNS[name]
    both = [results(played / name / folder, ranks) for folder in ("killed", "whole")]
    for found, expected in zip(*both, strict=True):
        assert found["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
        assert found["logs"] == expected["logs"]
        assert found["epoch"] == expected["epoch"]
        assert found["num_read"] <= expected["num_read"] / 2
