"""The same models sharded over two ranks by FSDP2: exact, or refused by name before the first step."""

from __future__ import annotations

import pytest

from tests.zoo.sample import chosen
from tests.zoo.test_models import FLOORS, rows_of
from tests.zoo.tiny_models import species
from tests.zoo.worlds import Row, judged

__all__ = ["FLOORS"]


@pytest.mark.timeout(3000)
def test_sharded_models_are_exact_or_refused() -> None:
    """Every rank reads its slices, resumes its shards, and writes them to their places in the export."""
    found = judged(rows_of, [str(kind) for kind in chosen(species(), 2)], ranks=2)
    assert not [row for row in found if row[1] == "different"]


def rows() -> list[Row]:
    """Return the rows of every run of every model."""
    return judged(rows_of, [str(kind) for kind in species()], ranks=2)
