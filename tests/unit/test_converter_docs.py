"""docs/write-a-converter.md: its converter keeps every law, and is as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "write-a-converter.md"
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)

# Here and not in a namespace of its own: pytest collects the page's test class, and ranks import it by name.
exec(compile("\n".join(BLOCKS), PAGE.name, "exec"), globals())


def test_the_example_is_short() -> None:
    """A whole converter takes fewer than 60 lines."""
    lines = BLOCKS[0].splitlines()
    assert len([line for line in lines if line.strip()]) < 60


def test_the_page_defines_its_test() -> None:
    """The class that proves the laws comes from the page."""
    assert "TestGain" in globals()
