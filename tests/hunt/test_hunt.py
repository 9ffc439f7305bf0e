"""The hunt: drawn programs of one process and of two ranks; every committed step and export holds what it must.

200 programs here, 2,000 with `make hunt`, 10,000 in a soak. TITAN_CKPT_HUNT_SEED draws the same programs again, and
`python -m tests.hunt "PROGRAM"` carries out one alone.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.faults.scenarios import SOAK
from tests.hunt.programs import Program, programs
from tests.hunt.workers import Workers

NUMBER = int(os.environ.get("TITAN_CKPT_HUNT_PROGRAMS") or (10_000 if SOAK else 200))
SEED = int(os.environ.get("TITAN_CKPT_HUNT_SEED") or random.randrange(1 << 32))


class Hunt:
    """The processes that carry out programs, started when the first program needs them."""

    def __init__(self) -> None:
        self._workers: dict[int, Workers] = {}

    def run(self, program: Program) -> str | None:
        """Carry out a program; return what was wrong, and how to see it again."""
        if program.ranks not in self._workers:
            self._workers[program.ranks] = Workers(program.ranks)
        wrong = self._workers[program.ranks].run(program)
        if wrong is None:
            return None
        self._workers.pop(program.ranks).close()
        return f'{wrong}\n\nThis program again: {sys.executable} -m tests.hunt "{program}"'

    def close(self) -> None:
        for workers in self._workers.values():
            workers.close()


@pytest.fixture(scope="module")
def hunt() -> Iterator[Hunt]:
    hunt = Hunt()
    yield hunt
    hunt.close()


@pytest.mark.timeout(14_400 if NUMBER > 200 else 900)
def test_every_committed_step_and_export_is_the_state_of_its_save(hunt: Hunt) -> None:
    """Whatever a program writes, interrupts, forks or rolls back, no step and no export holds another state."""

    @seed(SEED)
    @settings(
        max_examples=NUMBER,
        derandomize=False,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def carry_out(program: Program) -> None:
        wrong = hunt.run(program)
        assert wrong is None, wrong

    print(f"the same programs again: TITAN_CKPT_HUNT_SEED={SEED} {sys.executable} -m pytest {__file__}")
    carry_out()
