"""Docs and configs of converters: the page's own converter keeps every law, and every table is accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import tomli

from titan_ckpt.config import CheckpointConfig, from_dict
from titan_ckpt.converters import from_tables
from titan_ckpt.converters.qat.converter import Scheme

CONFIGS = Path(__file__).parents[3] / "configs"
PAGE = Path(__file__).parents[3] / "docs" / "write-a-converter.md"
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)

# Here and not in a namespace of its own: pytest collects the page's test class, and ranks import it by name.
exec(compile("\n".join(BLOCKS), PAGE.name, "exec"), globals())


def test_the_example_is_short() -> None:
    """A whole converter takes fewer than 70 lines of the page's width."""
    lines = BLOCKS[0].splitlines()
    assert len([line for line in lines if line.strip()]) < 70


def test_the_page_defines_its_test() -> None:
    """The class that proves the laws comes from the page."""
    assert "TestGain" in globals()


def test_tables_on_the_page_are_accepted() -> None:
    """Every [[converters]] table of docs/converters.md is one that runs take."""
    page = (PAGE.parent / "converters.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    tables = [table["converters"] for block in blocks if "converters" in (table := tomli.loads(block))]
    assert [from_tables(some).describe()[0]["kind"] for some in tables] == ["lora", "qat", "float8"]
    others = [table["checkpoint"] for block in blocks if "checkpoint" in (table := tomli.loads(block))]
    sources, exports = (from_dict(CheckpointConfig, table, page[:20]) for table in others)
    assert [source.load for source in sources.initial_load] == ["weights", "merge", "weights"]
    assert [export.quantized for export in exports.export] == [True, False]
    for scheme in get_args(Scheme):
        assert f"`{scheme}`" in page


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_converters_of_configs_are_accepted(config: Path) -> None:
    """The tables of every config that comes with the project can be combined as they are."""
    from_tables(tomli.loads(config.read_text()).get("converters", []), str(config))
