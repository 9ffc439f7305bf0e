"""Two writers on a disk, interleaved at every operation of either: no step that was acknowledged is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scenarios import copy_of, quick_folder
from tests.faults.two_writers import (
    BEFORE,
    CASES,
    Baton,
    Case,
    Run,
    every_operation,
    faults_of,
    manager_of,
    positions,
    race,
)


def _begin(base: Path) -> None:
    """Make the steps that are there before."""
    with manager_of("checkpoints", base) as manager:
        for step in BEFORE:
            manager.save(step)


def _raced(base: Path, case: Case, at: tuple[int, ...]) -> tuple[Run, Baton, int]:
    """Let two runs meet; return what they did, and what a third one resumes."""
    baton = Baton(*at)
    with every_operation(baton):
        done = race(baton, ["checkpoints"] * 2, base, case)
    with manager_of("checkpoints", base, saves=False) as third:
        return done, baton, third.load().step


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(14400)
def test_a_successor_resumes_the_newest_acknowledged_step_whenever_it_comes(case: Case) -> None:
    """Or it is told, if a setting names an older one. It never fails because the other one goes on."""
    with quick_folder() as begun:
        _begin(begun)
        with copy_of(begun) as base:
            _, baton, _ = _raced(base, case, ())
        faults = []
        for at in positions(baton.counts, 30):
            with copy_of(begun) as base:
                done, _, newest = _raced(base, case, at)
                faults += [f"{at}: {fault}" for fault in faults_of(done, case, newest)]
    assert faults == []
