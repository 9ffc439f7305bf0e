"""docs/systems.md: what it promises has a test, and the test is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTS = {"A": 9, "B": 5, "C": 5, "D": 9, "E": 2, "F": 12, "T": 20}
ROWS = {f"{letter}{i}" for letter, count in COUNTS.items() for i in range(1, count + 1)}


def test_every_test_that_the_table_names_exists() -> None:
    """`path::test` and `path` are real; `::test` is of the path named before it, `::prefix_` of at least one test."""
    missing: list[str] = []
    rows: set[str] = set()
    path = ""
    for line in (ROOT / "docs" / "systems.md").read_text().splitlines():
        if not (row := re.match(r"\| ([A-Z]\d+) \|", line)):
            continue
        named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", line.rsplit("|", 2)[1])
        if named:
            rows.add(row[1])
        for file, test in named:
            path = file or path
            tests = _functions(ROOT / path)
            if not tests or (test and test not in tests and not (test.endswith("_") and test in "".join(tests))):
                missing.append(f"{row[1]}: {path}::{test}")
            if row[1] in ROWS and row[1][0] != "T" and not (test or path).startswith(f"test_{row[1].lower()}_"):
                missing.append(f"{row[1]}: {path}::{test} is not named after it")
    assert missing == []
    assert ROWS - rows == set(), "rows without a test"


@functools.cache
def _functions(path: Path) -> list[str]:
    if not path.is_file():
        return []
    nodes = ast.walk(ast.parse(path.read_text()))  # laws are methods
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
