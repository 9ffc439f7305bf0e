"""Every Python block of README.md and docs/ runs, each page in an empty folder, its blocks one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ckpt.training.run_file import read_run

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"use-in-torchtitan.md"}  # tests/torchtitan/test_page.py runs it inside torchtitan
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text() and page.name not in ELSEWHERE
]
TOML_PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```toml" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    """A reader who copies the page's blocks in order gets no error."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", TOML_PAGES, ids=lambda page: page.name)
def test_the_toml_on_a_page_is_understood(page: Path, tmp_path: Path) -> None:
    """A reader who copies a page's tables into the smallest file there is has no fault in it."""
    for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        path = tmp_path / "page.toml"
        smallest = [] if "output_folder" in block else ['output_folder = "outputs/page"']
        smallest += [] if "[model]" in block else ['model = { flavor = "debug-0.5m" }']
        path.write_text("\n".join([*smallest, block]))
        read_run(str(path))


def test_the_links_between_pages_lead_somewhere() -> None:
    """Every relative link of README.md and docs/ names a file that is there."""
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
