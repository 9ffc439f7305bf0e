"""The same modules of torch.nn, sharded over two ranks by FSDP2: exact, or refused by name."""

from __future__ import annotations

from tests.zoo.sample import chosen
from tests.zoo.test_modules import FLOORS, builders, rows_of
from tests.zoo.worlds import Row, judged

__all__ = ["FLOORS"]


def test_a_sharded_module_resumes_exactly() -> None:
    """Weights, buffers and moments go on with the bits of a run without a stop."""
    found = judged(rows_of, chosen(sorted(builders()), 12), ranks=2)
    assert {verdict for _, verdict, _ in found} == {"exact"}, found


def rows() -> list[Row]:
    """Return the row of every module that FSDP2 can train."""
    return judged(rows_of, list(builders()), ranks=2)
