"""Qwen3-MoE in every layout: what one saves any other loads, bit for bit, and goes on with the same loss.

Its first layer is dense, as all of Llama 3, which is laid out by the same code: test_parallel_sources.py has its loads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.trainer_layouts import assert_every_layout_loads_what_every_other_one_saves


@pytest.mark.timeout(600)  # four ranks share few cores
def test_every_layout_loads_what_every_other_one_saves(tmp_path: Path) -> None:
    """Single, FSDP2, HSDP, tensor, pipeline, expert, context parallelism and products of them."""
    assert_every_layout_loads_what_every_other_one_saves(tmp_path)
