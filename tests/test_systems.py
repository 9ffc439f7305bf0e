"""docs/systems.md: every row has a test, which is there and runs by default, or the row says that it is not built."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "systems.md").read_text()
COUNTS = {"A": 9, "B": 5, "C": 5, "D": 9, "E": 2, "F": 14, "G": 13, "T": 20}
ROWS = {f"{letter}{i}" for letter, count in COUNTS.items() for i in range(1, count + 1)}
NAMED_AFTER_THEIR_ROW = "ABCDEF"
"""Tests of these rows begin with the row, as test_b1_ does; those of G and T are named for what they show."""


def test_every_test_that_the_table_names_exists() -> None:
    """`path::test` and `path` are real; `::test` is of the path named before it, `::prefix_` of at least one test."""
    missing: list[str] = []
    rows: set[str] = set()
    path = ""
    for line in PAGE.splitlines():
        if not (row := re.match(r"\| (?:([A-Z]\d+) )?\|", line)):
            continue
        proof = line.rsplit("|", 2)[1].strip()
        named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", proof)
        if row[1] not in {*ROWS, None} or not (named or proof == "not built"):
            missing.append(f"{row[1]}: names no test, and is not said to be not built: {proof}")
        rows.add(row[1] or "")
        for file, test in named:
            path = file or path
            tests = _functions(ROOT / path)
            if not tests or (test and test not in tests and not (test.endswith("_") and test in "".join(tests))):
                missing.append(f"{row[1]}: {path}::{test}")
            begin = f"test_{row[1].lower()}_" if (row[1] or " ")[0] in NAMED_AFTER_THEIR_ROW else ""
            if not (test or path).startswith(begin):
                missing.append(f"{row[1]}: {path}::{test} is not named after it")
            if "pytest.mark.full" in tests.get(test, []):
                missing.append(f"{row[1]}: {path}::{test} runs with FULL=1 alone")
    assert missing == []
    assert ROWS - rows == set(), "rows that the page does not have"


@functools.cache
def _functions(path: Path) -> dict[str, list[str]]:
    """Return the functions and classes of a module, each with its decorators."""
    if not path.is_file():
        return {}
    nodes = ast.walk(ast.parse(path.read_text()))  # laws are methods
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: [ast.unparse(decorator) for decorator in node.decorator_list] for node in named}
