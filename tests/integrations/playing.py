"""The same training whole, killed and resumed."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.integrations.phases import Phase, play


class Run(NamedTuple):
    """A training that is killed."""

    function: str
    ranks: int
    interval: int
    killed_at: int
    """Step after which every rank ends by SIGKILL."""


def played(module: str, run: Run, root: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Play a run whole, killed and resumed; return for each rank the results of the resumed and of the whole run."""
    whole, killed, resumed = play_in(
        module, run, root, (("whole", None), ("resumed", run.killed_at), ("resumed", None))
    )
    assert whole == resumed == [0] * run.ranks
    # a rank that still waits for one that has killed itself ends with a PeerError
    assert -signal.SIGKILL in killed
    assert 0 not in killed
    return results(run, root)


def left_behind(module: str, run: Run, root: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Do the same for a run that leaves behind what a kill would leave, and goes on as the whole one."""
    assert play_in(module, run, root, (("whole", run.killed_at), ("resumed", None))) == [[0] * run.ranks] * 2
    return results(run, root)


def play_in(module: str, run: Run, root: Path, folders: Iterable[tuple[str, int | None]]) -> list[list[int]]:
    return play(module, [Phase(run.function, str(root / name), run.ranks, (run.interval, at)) for name, at in folders])


def results(run: Run, root: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    files = [f"result-{rank}.pt" for rank in range(run.ranks)]
    return [(torch.load(root / "resumed" / file), torch.load(root / "whole" / file)) for file in files]


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that weights and log are equal, bit for bit, and that less than the whole data was read."""
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(value, expected["weights"][key]) for key, value in found["weights"].items())
    assert found["logs"] == expected["logs"]
    assert found["num_read"] <= 0.7 * expected["num_read"]
