"""docs/use-in-torchtitan.md runs inside torchtitan, and its table has every setting."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.torchtitan.runs import config, distributed
from titan_ckpt.integrations.torchtitan.settings import SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "use-in-torchtitan.md").read_text()


@distributed(1)
def _page(assets: Path, folder: Path) -> None:
    assert config(assets, folder).checkpoint.enable  # the shim for CPU is in place
    folder.mkdir(exist_ok=True)
    (folder / "assets").symlink_to(assets)
    os.chdir(folder)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), "use-in-torchtitan.md", "exec"), {})


def test_the_page_runs(assets: Path, tmp_path: Path) -> None:
    """A reader who copies the page's blocks in order gets what the page says."""
    _page(assets, tmp_path)


def test_the_page_names_every_setting() -> None:
    """No setting is missing from the table on the page."""
    table = PAGE.partition("## What each setting means")[2].partition("\n## ")[0]
    assert [name for name in SETTINGS if f"`{name}`" not in table] == []
