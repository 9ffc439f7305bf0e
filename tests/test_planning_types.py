"""The types that plan a save, a load, an export and its proof are those of docs/inside.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLANNING = (
    "distributed/sharing", "formats/dcp/dcp", "formats/native/header", "formats/native/rank_file",
    "formats/native/reader", "formats/native/writer", "formats/publish/exchange", "formats/publish/plan",
    "formats/publish/proof", "formats/publish/write", "formats/quantized/open", "formats/reading/engine",
    "formats/reading/slices", "formats/safetensors/container", "geometry/chunks",
    "geometry/requests",
)  # fmt: skip
"""Modules whose values say where parts of tensors lie. Those of others may be listed too."""


def values_of(module: str) -> set[str]:
    """Return the classes of a module that are values: dataclasses, named tuples, and objects of a few slots."""
    tree = ast.parse((ROOT / "titan_ckpt" / f"{module}.py").read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            above = [*map(ast.unparse, node.bases), *map(ast.unparse, node.decorator_list)]
            slots = any(isinstance(line, ast.Assign) and "__slots__" in ast.unparse(line) for line in node.body)
            if slots or any(text.startswith(("NamedTuple", "dataclass")) for text in above):
                names.add(f"{module.replace('/', '.')}.{node.name}")
    return names


def test_the_docs_list_every_type_that_plans() -> None:
    """A new type has a line; a type that is gone has none."""
    section = (ROOT / "docs" / "inside.md").read_text().partition("## The types that plan\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {name for module in PLANNING for name in values_of(module)} <= set(listed)
    gone = [name for name in listed if name not in values_of(name.rpartition(".")[0].replace(".", "/"))]
    assert not gone
