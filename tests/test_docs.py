"""What README.md and docs/ say is so: imports, tables, links, messages and names.

tests/test_wheel.py runs every Python block, each page in an empty folder, its blocks one after another.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import titan_ckpt
from titan_ckpt import errors
from titan_ckpt.training.run_file import read_run

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "tutorial.md",  # tests/test_wheel.py runs it with the wheel alone
    "use-in-torchtitan.md",  # tests/torchtitan/test_page.py runs it inside torchtitan
}
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text() and page.name not in ELSEWHERE
]
TOML_PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```toml" in page.read_text()
]


FOUND_BY_IMPORT_TORCH = {
    "torch.cuda", "torch.distributed", "torch.nn", "torch.nn.functional", "torch.optim", "torch.optim.lr_scheduler",
}  # fmt: skip


def program(page: Path) -> str:
    """Return a page's blocks as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_imports_the_modules_it_names(page: Path) -> None:
    """Pages run where much is imported already; a reader's `torch.a.b` would fail if nothing imports `torch.a`."""
    tree = ast.parse(program(page))
    imported, roots = set(FOUND_BY_IMPORT_TORCH), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
            roots |= {alias.name.partition(".")[0] for alias in node.names if alias.asname is None}
        elif isinstance(node, ast.ImportFrom):
            imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {name for name in named if name.partition(".")[0] in roots and name in sys.modules}
    unknown = {name for name in modules if not any(f"{known}.".startswith(f"{name}.") for known in imported)}
    assert unknown == set()


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


def test_the_messages_of_the_troubleshooting_page_are_the_products() -> None:
    """A reader who searches the page for a message finds it: what the first column quotes stands in the source."""
    sources = [path.read_text() for room in ("titan_ckpt", "converters") for path in (ROOT / room).rglob("*.py")]
    text = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources)).replace(
        '\\"', '"'
    )  # a message is of several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)`", page, flags=re.MULTILINE)
    assert len(quoted) > 30
    assert [part for quote in quoted for part in quote.split(" … ") if part not in text] == []


def test_the_api_page_has_every_public_name() -> None:
    """Every public name and every error has a line on the page; the site's build finds each of them."""
    page = (ROOT / "docs" / "api.md").read_text()
    names = [line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
    every_error = {name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")}
    assert {*titan_ckpt.__all__, *every_error} - set(names) == set()
    assert len(api()) == len(set(api()))


def api() -> list[str]:
    """Return the full names on the API page."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)


def test_what_the_docs_import_is_public() -> None:
    """A reader who copies a page's code uses only names of the API page, wherever the page imports them from."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "examples").glob("*.py")]
    imports = re.compile(r"^\s*from (titan_ckpt[.\w]*) import ([\w, ]+)", flags=re.MULTILINE)
    used = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for page in pages
        for module, names in imports.findall(page.read_text())
        for name in names.split(",")
    }
    assert len(used) > 50
    public = [found(name) for name in api() if "torchtitan" not in name]
    assert not [name for name in used - {*api()} if not any(found(name) is value for value in public)]


def found(name: str) -> Any:
    """Return what has a name: a module, or something in one."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute, None) or import_module(name)
