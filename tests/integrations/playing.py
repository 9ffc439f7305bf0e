"""The same training whole, killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.integrations.phases import Phase, play_together


class Run(NamedTuple):
    """A training that is killed."""

    function: str
    ranks: int
    interval: int
    killed_at: int
    """Step after which every rank ends by SIGKILL."""


def played(module: str, run: Run, root: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Play a run whole and killed, and resumed in new processes; return each rank's results, resumed and whole."""
    parts = (("whole", None), ("resumed", run.killed_at), ("resumed", None))
    phases = [Phase(run.function, str(root / part), run.ranks, (run.interval, at)) for part, at in parts]
    whole, killed, resumed = play_together(module, phases)
    assert whole == resumed == [0] * run.ranks
    # a rank that still waits for one that has killed itself ends with a PeerError
    assert -signal.SIGKILL in killed
    assert 0 not in killed
    files = [f"result-{rank}.pt" for rank in range(run.ranks)]
    return [(torch.load(root / "resumed" / file), torch.load(root / "whole" / file)) for file in files]


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that weights and log are equal, bit for bit, and that less than the whole data was read."""
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
    assert found["logs"] == expected["logs"]
    assert found["num_read"] <= 0.7 * expected["num_read"]
