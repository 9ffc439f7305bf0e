"""The folder that tests of adapters start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world import write_llama


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama that transformers wrote."""
    return write_llama(tmp_path / "base")
