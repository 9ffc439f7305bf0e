"""Every shell block of README.md, CONTRIBUTING.md and docs/ runs, or says why not; every command in it is understood.

A block that no test runs has a comment above it, `<!-- not run: REASON -->`. tests/test_wheel.py runs docs/tutorial.md,
tests/test_recipes.py the scripts of docs/parallel.md; this module runs the others.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from docs.examples import listings
from titan_ckpt.cli.main import _parsed, main
from titan_ckpt.training.run_file import read_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
KINDS = {"python", "toml", "json", "sh", "bash", "yaml", "console", "text", "py"}
"""The words after the fence: text is an illustration, py a part of a program that stands on the page in full."""
RUN_ELSEWHERE = {"tutorial.md"}


def commands(block: str) -> list[list[str]]:
    """Return the words of each command of a block."""
    lines = [line for line in block.replace("\\\n", " ").splitlines() if not re.match(r"\w+=", line)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def fault(words: list[str]) -> str | None:
    """Return what the program that is called would not understand of its arguments, as far as it can be told."""
    match words:
        case ["titan-ckpt" | "titan_ckpt", "train", config, *overrides]:
            known = (ROOT / config).is_file()
            read_run(str(ROOT / "configs/debug_pretrain.toml" if not known else ROOT / config), overrides)
        case ["titan-ckpt", *arguments]:
            _parsed(arguments)
        case ["python", "train.py", config, *overrides]:
            read_run(str(ROOT / config), overrides)
        case ["python", "-m", module, *_]:
            return None if importlib.util.find_spec(module) else f"no module {module}"
        case ["torchrun", *arguments]:
            from torch.distributed.run import get_args_parser

            given = get_args_parser().parse_args(arguments)
            program = ["titan_ckpt"] if given.module else ["python", given.training_script]
            return fault([*program, *given.training_script_args])
        case ["make", target]:
            declared = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            return None if target in " ".join(declared).split() else f"no target {target}"
        case ["pip", "install", package] if package.startswith("titan-ckpt"):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            return f"{package}" if set(re.findall(r"\w+", package.partition("[")[2])) - extras.keys() else None
        case ["pip" | "transformers" | "curl" | "touch" | "aws" | "gcloud" | "export" | "moto_server", *_]:
            return None
        case _:
            return f"nothing here can check {words[0]}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """No block is without a kind, so none is left out of the tests by mistake."""
    opened = re.findall(r"^```([^\n]*)\n(?:.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert set(opened) - KINDS == set()


@pytest.mark.parametrize("page", [page for page in PAGES if SHELL.search(page.read_text())], ids=lambda page: page.name)
def test_the_commands_on_a_page_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-commands, options, settings, files, extras and targets exist, also in blocks that cannot run here."""
    for _, block in SHELL.findall(page.read_text()):
        for words in commands(block.replace("$small", "--training.batch_size 4")):
            try:
                assert fault(words) is None, words
            except SystemExit as end:
                pytest.fail(f"{words}: refused by its parser with {end.code}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that the pages speak of, in the folder where their commands are given."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        listings.make_run()
        listings.make_run("outputs/debug_pretrain", 200)  # a small one of that name, with its last step
    return folder


def test_a_block_that_is_not_marked_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands on the page; `save` finds no running job, and diff no difference."""
    monkeypatch.chdir(run)
    blocks = [
        b for page in PAGES if page.name not in RUN_ELSEWHERE for why, b in SHELL.findall(page.read_text()) if not why
    ]
    assert blocks
    for block in blocks:
        for words in commands(block):
            assert words[0] == "titan-ckpt", f"{words}: mark the block"
            assert main(words[1:]) == (2 if words[1] == "save" else 0), words


def test_the_listings_are_what_the_commands_print(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/tools.md shows them at 80 columns; figures may differ. `python -m docs.examples.listings` redraws them."""
    monkeypatch.chdir(run)

    def words(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if not re.match(r"[\w.]+\.weight +values", line)]  # in their order
        plain = [re.sub(r"[0-9a-f]{32}|-?\d[\d.e-]*(?: (?:min|h|s|d)\b)?|\bbest\b", "#", line) for line in lines]
        return [" ".join(line.split()) for line in plain]

    page = listings.PAGE.read_text()
    redrawn = listings.redrawn(page)
    assert words(redrawn) == words(page)
