"""Run the whole zoo and write its verdicts to docs/compatibility.md: `make zoo`.

A module `tests/zoo/test_*.py` takes part if it has `rows()`: (configuration, verdict, note) of every case. The
first line of its docstring is the heading. The exit status is 1 if any case is silently different.
"""

from __future__ import annotations

import os
import sys

# Before torch or transformers are imported, also in the processes that rows() starts.
os.environ.update(
    TITAN_CKPT_ZOO="1",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

import importlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

Row = tuple[str, str, str]
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MARK = "<!-- The rest is written by `make zoo`. -->\n"
_LIBRARIES = ("torch", "transformers", "peft", "torchao")


def main() -> int:
    """Collect all rows, rewrite the page below its mark, and return the exit status."""
    text, different = [], 0
    for module in map(importlib.import_module, sorted(_modules())):
        if hasattr(module, "rows"):
            heading = (module.__doc__ or module.__name__).splitlines()[0].rstrip(".")
            rows: list[Row] = module.rows()
            different += sum(verdict == "different" for _, verdict, _ in rows)
            text.append("\n".join(_section(heading, rows)))
            sys.stdout.write(f"{heading}: {_counts(rows)}\n")
    written = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    head = PAGE.read_text().split(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\nVerdicts with {written}.\n\n" + "\n".join(text))
    return int(different > 0)


def _modules() -> Iterator[str]:
    return (f"tests.zoo.{path.stem}" for path in Path(__file__).parent.glob("test_*.py"))


def _counts(rows: Sequence[Row]) -> str:
    verdicts = [verdict for _, verdict, _ in rows]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in ("exact", "refused", "different"))


def _section(heading: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a section: the counts, a table of what is not exact, and the names of what is."""
    yield f"## {heading}\n\n{_counts(rows)}.\n"
    if others := [row for row in rows if row[1] != "exact"]:
        yield "| configuration | verdict | reason |\n|---|---|---|"
        yield from (f"| {name} | {verdict} | {note.replace('|', '/')} |" for name, verdict, note in others)
        yield ""
    yield "Exact: " + "; ".join(name for name, verdict, _ in rows if verdict == "exact") + ".\n"


if __name__ == "__main__":
    sys.exit(main())
