"""Trainers, callbacks and arguments of transformers, TRL and PEFT: a resumed run is exact, or refused by name.

The row of a class or field is what the lists of titan_ckpt say of it; the row of a run is one that was killed, resumed
and compared. tests/integrations/test_trainer_classes.py runs a sample of the runs, and compares the lists with the
installed libraries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import trainer_cases, trainer_grid
from tests.zoo.worlds import Row, judged
from titan_ckpt.integrations.transformers.known import ARGUMENTS, CALLBACKS, REFUSED_ARGUMENTS, TRAINERS

FLOORS = {": trainer": 20, ": callback": 30, ": argument": 109, ": run": 89, ": drawn run": 60}
_POINTS = 60
"""Drawn runs of the grid."""


def listed() -> list[Row]:
    """Return the row of every class and argument that is listed."""
    fields = dict.fromkeys(sorted(ARGUMENTS), "") | {name: reason for name, (_, reason) in REFUSED_ARGUMENTS.items()}
    known = (("trainer", TRAINERS), ("callback", CALLBACKS), ("argument", fields))
    return [
        (f"{name}: {role}", "refused" if reason else "exact", reason)
        for role, reasons in known
        for name, reason in reasons.items()
    ]


def rows() -> list[Row]:
    """Return the rows of the lists and of all runs."""
    return [*listed(), *judged(judge, [*trainer_cases.CASES, *map(str, range(_POINTS))])]


def judge(name: str, folder: Path) -> list[Row]:
    """Return the row of a case by its name, or of a drawn run by its number."""
    drawn = name.isdigit()
    rows = trainer_grid.judge([int(name)], folder) if drawn else trainer_cases.judge([name], folder)
    return [(f"{case}{': drawn run' if drawn else ': run'}", verdict, note) for case, verdict, note in rows]


@pytest.mark.parametrize("end", [": trainer", ": callback", ": argument"])
def test_the_lists_are_above_their_floors(end: str) -> None:
    """An entry that goes from exact to refused is noticed without a run of the zoo."""
    exact = [name for name, verdict, _ in listed() if verdict == "exact" and name.endswith(end)]
    assert len(exact) >= FLOORS[end]
