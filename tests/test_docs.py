"""What README.md and docs/ say is so: imports, tables, links, messages and names.

tests/test_wheel.py runs every Python block, each page in an empty folder, its blocks one after another.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints
from xml.dom import minidom

import lightning
import pytest
from transformers import TrainingArguments

import titan_ckpt
from docs.examples import api_index, benchmark_pictures
from titan_ckpt import CheckpointManager, RunGuard, converters, errors, testing
from titan_ckpt.converters import ModelConverter
from titan_ckpt.training.launch.reference import tables
from titan_ckpt.training.run_file import read_run

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "parallel.md",  # tests/distributed/test_elastic.py runs it under torchrun
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


FOR_ROOMS = {"ConverterConfig", "kinds", "lora", "updates"}
"""titan_ckpt.converters offers these to the other rooms alone."""


def test_the_api_page_has_every_public_name() -> None:
    """Every public name and every error has a line on the page, under a name that leads to it."""
    public = [found(name) for name in api() if "torchtitan" not in name]
    every_error = [name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")]
    offered = {titan_ckpt: titan_ckpt.__all__, errors: every_error, testing: testing.__all__}
    offered[converters] = [name for name in converters.__all__ if name not in FOR_ROOMS]
    missing = [
        f"{door.__name__}.{name}"
        for door, names in offered.items()
        for name in names
        if not any(getattr(door, name) is value for value in public)
    ]
    assert missing == []
    assert len(api()) == len(set(api()))


def api() -> list[str]:
    """Return the full names on the API page."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)


def test_the_table_of_the_api_page_has_a_sentence_for_every_name() -> None:
    """It is what `python -m docs.examples.api_index` writes, so a reader of the forge sees what each name is."""
    page = api_index.PAGE.read_text()
    assert page == api_index.redrawn(page)
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(rows) == len(api())
    assert [name for name, sentence in rows if not sentence.endswith(".")] == []


def test_what_the_docs_import_is_public() -> None:
    """A reader who copies a page's code uses only names of the API page, wherever the page imports them from."""
    used = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"^```(?:python|py)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            used |= imported(ast.parse(block))
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        used |= imported(ast.parse(example.read_text()))
    assert len(used) > 50
    public = [found(name) for name in api() if "torchtitan" not in name]
    assert not [name for name in used - {*api()} if not any(found(name) is value for value in public)]


def imported(tree: ast.AST) -> set[str]:
    """Return the full names of what a program imports from this package."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name != "titan_ckpt"}
    return {name for name in names if name.startswith("titan_ckpt.")}


@pytest.mark.parametrize("cls", [CheckpointManager, RunGuard, ModelConverter], ids=lambda cls: cls.__name__)
def test_what_public_methods_take_and_return_is_public(cls: type[Any]) -> None:
    """A reader who calls a method, or extends one in a subclass, finds the classes in its signature on the API page."""

    def classes(hint: Any) -> Iterator[type[Any]]:
        if isinstance(hint, type) and hint.__module__.startswith("titan_ckpt"):
            yield hint
        for part in get_args(hint):
            yield from classes(part)

    public = [found(name) for name in api() if "torchtitan" not in name]
    missing = set()
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            hints = get_type_hints(function, localns=imported_for_types(function)).values()
            missing |= {f"{name}: {one.__name__}" for hint in hints for one in classes(hint) if one not in public}
    assert missing == set()


def imported_for_types(function: Any) -> dict[str, Any]:
    """Return what the function's module imports under TYPE_CHECKING, and its own names."""
    names = dict(vars(sys.modules[function.__module__]))
    for node in ast.parse(inspect.getsource(sys.modules[function.__module__])).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), "imports", "exec"), names)
    return names


def test_code_fits_the_page() -> None:
    """No line of a block is cut on the forge or on the site; what a console prints is as it is printed."""
    wide = [
        f"{page.name}: {line}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if len(line) > 88 and kind != "console"
    ]
    assert wide == []


def test_the_pictures_of_the_benchmarks_are_drawn_from_their_tables() -> None:
    """`python -m docs.examples.benchmark_pictures` would change none of them."""
    wanted = dict(benchmark_pictures.pictures(benchmark_pictures.PAGE.read_text()))
    assert len(wanted) > 3
    stale = [file for file, svg in wanted.items() if (ROOT / "docs" / file).read_text() != svg]
    assert stale == []


def test_every_target_has_a_figure_and_the_benchmark_that_measures_it() -> None:
    """A target without a figure says that it was not measured; a module that is gone measures none."""
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Targets\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    assert rows[0] == ["work", "ratio: target", "here", "share of the limit: target", "here", "measured by"]
    assert len(rows) > 20
    for row in rows[1:]:
        assert len(row) == len(rows[0]), row
        targets = [(row[1], row[2]), (row[3], row[4])]
        assert any(target for target, _ in targets), row
        for target, figure in targets:
            assert bool(target) is bool(re.fullmatch(r"not measured|.*\d.*", figure)), row
        assert (ROOT / "benchmarks" / f"{row[5].strip('`')}.py").is_file(), row


def test_every_picture_is_well_formed() -> None:
    """A browser shows each of them."""
    pictures = [*(ROOT / "docs" / "pictures").glob("*.svg")]
    assert pictures
    for picture in pictures:
        minidom.parseString(picture.read_text())


def test_the_readme_has_measured_figures_only() -> None:
    """Each figure of its table stands on the page of the benchmarks, whose figures were measured."""
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    figures = re.findall(r"(?<=\| )[\d.]+x?(?= \|)", table)
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(figures) >= 30
    missing = [one for one in figures if not re.search(rf"(?<![\d.]){re.escape(one)}(?![\d.]*\d)", measured)]
    assert missing == []


def test_the_page_for_newcomers_names_settings_that_exist() -> None:
    """On the left those of transformers and Lightning, as they are installed; on the right ours."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    headers = {table.header.strip("[]") for table in tables()}
    keys = {f"{table.header.strip('[]')}.{key.name}".lstrip(".") for table in tables() for key in table.keys}
    theirs = {
        "`TrainingArguments`": {field.name for field in dataclasses.fields(TrainingArguments)},
        "`Trainer`": {*inspect.signature(lightning.Trainer).parameters},
        "`ModelCheckpoint`": {*inspect.signature(lightning.pytorch.callbacks.ModelCheckpoint).parameters},
    }
    unknown, tables_seen = [], []
    for head, body in re.findall(r"^\| (.+) \| run file \|\n\|---\|---\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE):
        tables_seen.append(head)
        for row in body.splitlines():
            left, right = re.findall(r"^\| (.*?) \| (.*) \|$", row)[0]
            unknown += [name for name in re.findall(r"`(\w+)`", left) if name not in theirs.get(head, {name})]
            named = re.findall(r"(?<![\w.\"])[a-z_]+(?:\.[a-z_]+)+", right)
            unknown += [name for name in named if name not in keys | headers]
    assert unknown == []
    assert len(tables_seen) == 5


def test_every_source_of_the_comparison_is_named_and_used() -> None:
    """A number in a cell leads to a source; a source without a cell is a leftover."""
    cells, _, sources = (ROOT / "docs" / "comparison.md").read_text().partition("## Sources")
    used = {number for group in re.findall(r"(?<!\w)\[([\d, ]+)\](?!\()", cells) for number in group.split(", ")}
    assert used == {*re.findall(r"^(\d+)\. ", sources, flags=re.MULTILINE)}


def found(name: str) -> Any:
    """Return what has a name: a module, or something in one."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute, None) or import_module(name)
