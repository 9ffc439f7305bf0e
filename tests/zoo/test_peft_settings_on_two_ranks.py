"""The same settings of PEFT's LoraConfig, read into models that FSDP2 shards over two ranks: exact, or refused."""

from __future__ import annotations

from tests.zoo.sample import chosen
from tests.zoo.test_peft_settings import CASES, FLOORS, rows_of
from tests.zoo.worlds import Row, judged

__all__ = ["FLOORS"]


def test_a_setting_of_peft_is_exact_or_refused_on_shards() -> None:
    """Each rank merges or loads its rows, and the logits are PEFT's; or the error names the setting."""
    found = judged(rows_of, [str(case) for case in chosen(CASES, 8)], ranks=2)
    assert not [row for row in found if row[1] == "different"]


def rows() -> list[Row]:
    """Return the rows of every setting."""
    return judged(rows_of, [str(case) for case in CASES], ranks=2)
