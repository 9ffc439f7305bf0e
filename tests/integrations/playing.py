"""The same training whole, killed and resumed, for several trainings in one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.forked import Program
from tests.integrations.phases import Phase, play


class Run(NamedTuple):
    """A training that is killed."""

    function: str
    ranks: int
    interval: int
    killed_at: int
    """Step after which every rank ends by SIGKILL."""


def play_all(module: str, runs: dict[str, Run], root: Path, others: Sequence[Phase] = ()) -> list[list[int]]:
    """Play every run whole, killed and resumed, in folders of `root`; return the exit codes of other phases."""
    phases = [
        Phase(run.function, str(root / name / folder), run.ranks, (run.interval, run.killed_at if kills else None))
        for name, run in runs.items()
        for folder, kills in (("whole", False), ("resumed", True), ("resumed", False))
    ]
    program = Program(play, module, [*phases, *others], str(root / "codes.json"), output=root / "log.txt")
    try:
        assert program.wait(280) == 0, program.text()
    finally:
        program.kill()
    codes: list[list[int]] = json.loads((root / "codes.json").read_text())
    for first, run in zip(range(0, 3 * len(runs), 3), runs.values(), strict=True):
        whole, killed, resumed = codes[first : first + 3]
        assert whole == resumed == [0] * run.ranks, program.text()
        # a rank that still waits for one that has killed itself ends with a PeerError
        assert -signal.SIGKILL in killed, program.text()
        assert 0 not in killed, program.text()
    print(program.text())
    return codes[3 * len(runs) :]


def both_results(root: Path, name: str, run: Run) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return for each rank the results of the resumed and of the whole run."""
    files = [f"result-{rank}.pt" for rank in range(run.ranks)]
    return [(torch.load(root / name / "resumed" / file), torch.load(root / name / "whole" / file)) for file in files]


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that weights and log are equal, bit for bit, and that less than the whole data was read."""
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
    assert found["logs"] == expected["logs"]
    assert found["num_read"] <= 0.7 * expected["num_read"]
