"""Loops over drawn loaders, killed at drawn batches: resumed bit for bit, or refused before the first batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.loader_draws import drawn, judge

PLAIN: dict[str, Any] = {
    "data": "rows", "length": 10, "noise": "", "collate": False, "loader": "torch", "sampler": "", "batch sampler": "",
    "size": 3, "drop_last": False, "generator": False, "workers": 0, "prefetch": None, "kept": False, "loop": "for",
    "limit": 2, "interval": 1, "kills": [2, 4, 9],
}  # fmt: skip


@pytest.mark.parametrize("number", range(400 if os.environ.get("TITAN_CKPT_SOAK") else 24))
def test_a_drawn_loop_goes_on_bit_for_bit_or_is_refused(number: int, tmp_path: Path) -> None:
    assert judge(drawn(number), tmp_path).startswith(("exact", "refused"))


@pytest.mark.parametrize("loader", ["torch", "torchdata", "raw"])
@pytest.mark.parametrize(
    "case",
    [
        {"data": "holding", "noise": "own"},
        {"data": "no generator"},
        {"data": "no generator", "size": 5, "loop": "to the length"},
        {"data": "sized stream", "size": 5, "loop": "left", "limit": 2},
        {"sampler": "positioned", "loop": "after"},
    ],
)
def test_loops_that_have_always_gone_on_are_not_refused(case: dict[str, Any], loader: str, tmp_path: Path) -> None:
    """Streams with a state of their own, iterators that are no generators, and next_epoch() at the end of an epoch."""
    assert judge(PLAIN | case | {"loader": loader}, tmp_path) == "exact"
