"""Runs that a seed has drawn, killed at drawn moments: resumed bit for bit in each step, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integrations import lightning_draws, own_loop_draws, trainer_draws
from tests.integrations.draws import judge

ALL = bool(os.environ.get("TITAN_CKPT_SOAK"))


DRAWS = [(own_loop_draws, 1), (own_loop_draws, 2), (trainer_draws, 1), (lightning_draws, 1), (lightning_draws, 2)]
"""The Trainer waits for ever if a drawn stream gives its ranks unequal numbers of batches."""


@pytest.mark.parametrize(("programs", "ranks"), DRAWS)
@pytest.mark.parametrize("number", range(200 if ALL else 2))
def test_a_drawn_run_goes_on_bit_for_bit_or_is_refused(
    programs: object, number: int, ranks: int, tmp_path: Path
) -> None:
    """Libraries refuse some settings themselves, which are "broken" ones."""
    name, drawn = programs.__name__, programs.drawn  # type: ignore[attr-defined]  # a module
    found = judge(name, drawn(100 * ranks + number), ranks, tmp_path)
    assert [verdict for verdict in found if not verdict.startswith(("exact", "refused", "broken"))] == []
