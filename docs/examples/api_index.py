"""`python -m docs.examples.api_index`: redraw the table of docs/api.md, which has a sentence for each of its names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
_DOORS = ("titan_ckpt", "titan_ckpt.converters", "titan_ckpt.testing", "titan_ckpt.training.callbacks")
"""Packages that offer names of their modules, the shortest way first."""
_TABLE = re.compile(r"(?<=^\| name \| what it is \|\n\|---\|---\|\n)(?:\|.*\n)*", flags=re.MULTILINE)


def redrawn(page: str) -> str:
    """Return the page with its table as the docstrings say it now."""
    names = re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)
    return _TABLE.sub(lambda _: "".join(f"| `{way_to(name)}` | {sentence(name)} |\n" for name in names), page)


def way_to(name: str) -> str:
    """Return the shortest way to import what a full name names."""
    short = name.rpartition(".")[2]
    return next((f"{door}.{short}" for door in _DOORS if name.startswith(f"{door}.") and short in _exports(door)), name)


def sentence(name: str) -> str:
    """Return the first sentence of the docstring of a class, function or value in a module, or of a module."""
    text = _of_member(name)
    if text is None and (path := _file(name)):
        text = ast.get_docstring(ast.parse(path.read_text()))
    first = " ".join((text or "").partition("\n\n")[0].split())
    return (re.match(r".*?\.(?= |$)", first) or [""])[0].replace("|", "\\|").replace("<", "&lt;")


def _of_member(name: str) -> str | None:
    module, _, member = name.rpartition(".")
    path = _file(module)
    body = ast.parse(path.read_text()).body if path else []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == member:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom) and member in {alias.asname or alias.name for alias in node.names}:
            return _of_member(f"{node.module}.{member}")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == member for target in targets):
            return str(ast.literal_eval(after.value)) if isinstance(after, ast.Expr) else None
    return None


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _exports(door: str) -> list[str]:
    path = _file(door)
    assert path is not None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
