"""Llama 3 in every layout: each loads what it and a single process save, bit for bit, and goes on with the same loss.

A single process loads what each saves. In a soak, any loads what any other saves, as a mixture of experts does always.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.trainer_layouts import assert_every_layout_loads_what_every_other_one_saves


@pytest.mark.timeout(600)  # four ranks share few cores
def test_every_layout_loads_what_every_other_one_saves(tmp_path: Path) -> None:
    """Single, FSDP2, HSDP, tensor and pipeline parallelism and products; with context parallelism in a soak."""
    assert_every_layout_loads_what_every_other_one_saves("llama3", tmp_path)
