"""Run the zoo and write its verdicts to docs/compatibility.md: `make zoo`, or `python -m tests.zoo optimizers modules`.

A module `tests/zoo/test_*.py` takes part if it has `rows()`: (configuration, verdict, note) of every case. The
first line of its docstring is the heading. `FLOORS` says how many rows whose names have an end must be exact. Given
names of such modules, the sections of the others stay as they are. The exit status is 1 if any case is silently
different, or fewer are exact than a floor says.
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
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.zoo.worlds import Row

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MARK = "<!-- The rest is written by `make zoo`. -->\n"
_SECTION = "\n## "
_VERDICTS = ("exact", "refused", "different")
_LIBRARIES = ("torch", "transformers", "peft", "torchao")


def main(wanted: Sequence[str]) -> int:
    """Collect rows, rewrite their sections below the page's mark, and return the exit status."""
    known = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py"))
    if unknown := set(wanted) - set(known):
        sys.exit(f"no part of the zoo: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = False
    for name in wanted or known:
        module = importlib.import_module(f"tests.zoo.test_{name}")
        if hasattr(module, "rows"):
            heading = (module.__doc__ or module.__name__).splitlines()[0].rstrip(".")
            rows: list[Row] = module.rows()
            floors: Mapping[str, int] = getattr(module, "FLOORS", {})
            failed |= any(verdict == "different" for _, verdict, _ in rows)
            failed |= any(_exact(rows, end) < floor for end, floor in floors.items())
            PAGE.write_text(with_section(PAGE.read_text(), heading, rows, floors))
            sys.stdout.write(f"{heading}: {_counts(rows)}\n")
    return int(failed)


def with_section(page: str, heading: str, rows: Sequence[Row], floors: Mapping[str, int]) -> str:
    """Return the page with the section of this heading replaced or added, and the versions of the libraries."""
    head, _, rest = page.partition(MARK)
    sections = {text.partition("\n")[0]: text.strip() for text in rest.split(_SECTION)[1:]}
    sections[heading] = "\n".join(_section(heading, rows, floors)).strip()
    written = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    body = "".join(f"{_SECTION}{sections[name]}\n" for name in sorted(sections))
    return f"{head}{MARK}\nVerdicts with {written}.\n{body}"


def _counts(rows: Sequence[Row]) -> str:
    verdicts = [verdict for _, verdict, _ in rows]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in _VERDICTS)


def _exact(rows: Sequence[Row], end: str) -> int:
    return sum(verdict == "exact" and name.endswith(end) for name, verdict, _ in rows)


def _section(heading: str, rows: Sequence[Row], floors: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of a section: the counts, a table of what is not exact, and the names of what is."""
    yield f"{heading}\n\n{_counts(rows)}.\n"
    for end, floor in floors.items():
        which = f" of {sum(name.endswith(end) for name, _, _ in rows)} with `{end}`" if end else ""
        yield f"{_exact(rows, end)}{which} are exact; at least {floor} have to be.\n"
    if others := [row for row in rows if row[1] != "exact"]:
        yield "| configuration | verdict | reason |\n|---|---|---|"
        yield from (f"| {name} | {verdict} | {note.replace('|', '/')} |" for name, verdict, note in others)
        yield ""
    yield "Exact: " + "; ".join(name for name, verdict, _ in rows if verdict == "exact") + ".\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
