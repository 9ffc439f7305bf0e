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
    "snapshots": 1, "second": False, "limit": 2, "interval": 1, "kills": [2, 4, 9],
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
        {"data": "dealt", "size": None, "length": 11, "workers": 3, "kills": [7, 9, 10]},
        {"data": "dealt", "size": 2, "length": 12, "workers": 2, "kept": True, "loop": "after", "kills": [8]},
        {"data": "dealt", "size": None, "length": 5, "workers": 2, "kept": True, "loop": "after", "kills": [7]},
        {"data": "stated", "workers": 2, "snapshots": 2},
        {"sampler": "torchdata, distributed", "workers": 2, "snapshots": 2, "kills": [1, 4, 5]},
    ],
)
def test_loops_that_are_exact_are_not_refused(case: dict[str, Any], loader: str, tmp_path: Path) -> None:
    """Streams with a state of their own, iterators that are no generators, and next_epoch() at the end of an epoch.

    Also worker processes whose data gives its state, which torch's own loader asks none for.
    """
    found = judge(PLAIN | case | {"loader": loader}, tmp_path)
    is_of_workers = loader == "torch" and case.get("workers") and "data" in case
    assert found.startswith("refused: ConfigError") if is_of_workers else found == "exact"


@pytest.mark.parametrize("loader", ["torch", "torchdata"])
@pytest.mark.parametrize(
    "case",
    [
        {"data": "stated"},
        {"data": "part"},
        {"data": "omitting", "noise": "own", "loop": "left"},
        {"data": "stated", "workers": 2, "noise": "torch"},
        {"data": "stated", "workers": 2, "noise": "own", "sampler": "random", "kept": True, "loop": "after"},
        {"data": "stated", "workers": 2, "sampler": "early", "kills": [4, 5, 8]},
        {"data": "part", "workers": 2},
        {"data": "omitting", "workers": 2, "noise": "own"},
        {"data": "rows", "noise": "torch", "sampler": "of the process", "second": True},
        {"data": "stream", "noise": "random", "second": True},
    ],
)
def test_data_of_a_wrapped_loader_that_gives_its_state_has_it_again(
    case: dict[str, Any], loader: str, tmp_path: Path
) -> None:
    """Also if another loader is read in turn; worker processes of torch's loader, and in part of the data, are told."""
    found = judge(PLAIN | case | {"loader": loader}, tmp_path)
    if case["data"] == "omitting" and "workers" in case:
        assert "random.Random: each worker process draws from a copy" in found
        return
    is_copied = case.get("workers") and (loader == "torch" or case["data"] == "part")
    assert ("nobody asks it, or its copies in worker" in found) if is_copied else found == "exact"
