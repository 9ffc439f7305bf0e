"""Runs the parts of the zoo, judges their verdicts and writes them to docs/compatibility.md.

A module `tests/zoo/test_*.py` takes part if it has `rows()`: (configuration, verdict, note) of every case. The
first line of its docstring is the heading. `FLOORS` says how many rows whose names have an end must be exact. Given
names of such modules, the sections of the others stay as they are. The exit status is 1 if any case is silently
different, if fewer are exact than a floor says, or if one is not exact that the page has as exact.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from tests.zoo.worlds import Row

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MARK = "<!-- The rest is written by `make zoo`. -->\n"
_SECTION = "\n## "
_EXACT = "Exact: "
_VERDICTS = ("exact", "refused", "different")
_LIBRARIES = ("torch", "transformers", "peft", "trl", "torchao", "lightning")


def main(wanted: Sequence[str]) -> int:
    """Collect rows, rewrite their sections below the page's mark, and return the exit status."""
    known = parts()
    if unknown := set(wanted) - known.keys():
        sys.exit(f"no part of the zoo: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = False
    for name in wanted or known:
        part = known[name]
        rows: list[Row] = part.rows()
        page = PAGE.read_text()
        PAGE.write_text(with_section(page, heading(part), rows, floors(part)))
        sys.stdout.write(f"{heading(part)}: {_counts(rows)}\n")
        for fault in faults(rows, floors(part), exact_in(page, heading(part))):
            sys.stdout.write(f"  {fault}\n")
            failed = True
    return int(failed)


def parts() -> dict[str, ModuleType]:
    """Return the modules that take part, by their names without "test_"."""
    names = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py"))
    modules = {name: importlib.import_module(f"tests.zoo.test_{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "rows")}


def heading(part: ModuleType) -> str:
    """Return the heading of a part's section."""
    return (part.__doc__ or part.__name__).splitlines()[0].rstrip(".")


def floors(part: ModuleType) -> Mapping[str, int]:
    """Return how many rows of a part must be exact, by the ends of their names."""
    found: Mapping[str, int] = part.FLOORS
    return found


def faults(rows: Sequence[Row], floors: Mapping[str, int], before: frozenset[str]) -> Iterator[str]:
    """Yield a line for each reason why a run fails. `before`: the configurations that were exact."""
    yield from (f"different: {name}: {note}" for name, verdict, note in rows if verdict == "different")
    exact = [name for name, verdict, _ in rows if verdict == "exact"]
    for end, floor in floors.items():
        if (number := _number(exact, end)) < floor:
            yield f"{number}{f' with `{end}`' if end else ''} are exact; at least {floor} have to be"
    refused = {name: note for name, verdict, note in rows if verdict == "refused"}
    yield from (f"was exact: {name}: {refused.get(name, 'not tried')}" for name in sorted(before - {*exact}))


def exact_in(page: str, heading: str) -> frozenset[str]:
    """Return the configurations that a section of the page has as exact."""
    names = _sections(page).get(heading, "").partition(f"\n{_EXACT}")[2]
    return frozenset(names.removesuffix(".").split("; ")) if names else frozenset()


def with_section(page: str, heading: str, rows: Sequence[Row], floors: Mapping[str, int]) -> str:
    """Return the page with the section of this heading replaced or added, and the versions of the libraries."""
    sections = _sections(page)
    sections[heading] = "\n".join(_section(heading, rows, floors)).strip()
    written = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    body = "".join(f"{_SECTION}{sections[name]}\n" for name in sorted(sections))
    return f"{page.partition(MARK)[0]}{MARK}\nVerdicts with {written}.\n{body}"


def _sections(page: str) -> dict[str, str]:
    """Return the sections below the mark, by their headings."""
    sections = page.partition(MARK)[2].split(_SECTION)[1:]
    return {text.partition("\n")[0]: text.strip() for text in sections}


def _counts(rows: Sequence[Row]) -> str:
    verdicts = [verdict for _, verdict, _ in rows]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in _VERDICTS)


def _number(names: Sequence[str], end: str) -> int:
    return sum(name.endswith(end) for name in names)


def _section(heading: str, rows: Sequence[Row], floors: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of a section: the counts, a table of what is not exact, and the names of what is."""
    exact = [name for name, verdict, _ in rows if verdict == "exact"]
    yield f"{heading}\n\n{_counts(rows)}.\n"
    for end, floor in floors.items():
        which = f" of {_number([name for name, _, _ in rows], end)} with `{end}`" if end else ""
        yield f"{_number(exact, end)}{which} are exact; at least {floor} have to be.\n"
    if others := [row for row in rows if row[1] != "exact"]:
        yield "| configuration | verdict | reason |\n|---|---|---|"
        yield from (f"| {name} | {verdict} | {note.replace('|', '/')} |" for name, verdict, note in others)
        yield ""
    yield f"{_EXACT}{'; '.join(exact)}.\n"
