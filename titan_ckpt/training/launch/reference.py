"""The settings of a run file as a reference: every key with its type, its default and what it does.

Everything comes from the dataclasses: types and defaults from their fields, sentences from the strings under the
fields. `titan-ckpt train --list` prints it, and docs/configuration.md holds it as a page.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from titan_ckpt.encoding.named import converter_tables
from titan_ckpt.encoding.toml import describe, fields_of, tables_in
from titan_ckpt.training.config import RunConfig


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    name: str
    kind: str
    """The values that it may hold, in words."""
    default: str
    """As TOML writes it; "required", or "absent"."""
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a run file."""

    header: str
    """As TOML writes it, such as [checkpoint.save]; "" for the keys above all tables."""
    text: str
    keys: tuple[Key, ...]


def tables() -> list[Table]:
    """Return every table, outer ones first; kinds of [[converters]] that an installed package reads come last."""
    found = [*_tables(RunConfig, "", array=False)]
    reader = converter_tables()
    for kind, config in sorted(reader.kinds().items()) if reader is not None else []:
        keys = tuple(key for key in _keys(config) if key.name != "kind")
        first = Key("kind", f'"{kind}"', "required", "Which converter this table is of.")
        found.append(Table("[[converters]]", _summary(config), (first, *keys)))
    return found


def as_text() -> str:
    """Return the reference for a terminal, at most 100 columns wide."""
    out = []
    for table in tables():
        out += ["", table.header or "above all tables", *textwrap.wrap(table.text, 96)]
        for key in table.keys:
            out.append(f"  {key.name} = {key.default}" if key.default not in ("required", "absent") else
                       f"  {key.name}  ({key.default})")  # fmt: skip
            out += textwrap.wrap(f"{key.kind}. {key.text}", 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(out[1:]) + "\n"


def as_markdown() -> str:
    """Return the page docs/configuration.md."""
    out = [
        "# Configuration",
        "",
        "Every key of a run file. `python -m titan_ckpt.training.launch.reference` makes this page from the source;",
        "`titan-ckpt train --list` prints the same, with the converters that are installed. A key can be set on the",
        "command line too: `--checkpoint.save.interval 10`. A default of `absent` is described in the last column.",
    ]
    for table in tables():
        kind = next((key.kind for key in table.keys if key.name == "kind" and table.header == "[[converters]]"), "")
        title = f"`{table.header}`" + (f" with `kind = {kind}`" if kind else "") if table.header else "Above all tables"
        out += ["", f"## {title}", "", *textwrap.wrap(table.text, 120), "", "| key | type | default | |"]
        out += ["|---|---|---|---|"]
        out += [f"| `{k.name}` | {_cell(k.kind)} | `{_cell(k.default)}` | {_cell(k.text)} |" for k in table.keys]
    return "\n".join(out) + "\n"


def _tables(cls: type[Any], path: str, *, array: bool) -> Iterator[Table]:
    keys = tuple(key for key in _keys(cls) if key.kind)
    header = "" if not path else f"[[{path}]]" if array else f"[{path}]"
    if keys or not path:
        yield Table(header, _summary(cls), keys)
    for name, kind in fields_of(cls).items():
        for inner in tables_in(kind):
            yield from _tables(inner, f"{path}.{name}".lstrip("."), array="tuple[" in str(kind))


def _keys(cls: type[Any]) -> Iterator[Key]:
    """Yield the settings of a dataclass that are no tables."""
    types, texts = fields_of(cls), field_texts(cls)
    for field in dataclasses.fields(cls):
        if field.name in types and not tables_in(types[field.name]):
            yield Key(field.name, _kind(types[field.name]), _default(field), texts.get(field.name, ""))


def _kind(annotation: Any) -> str:
    """Return what a setting may hold; of an array also what each of its values may be."""
    arms = [arm for arm in get_args(annotation) if arm is not NoneType] if NoneType in get_args(annotation) else []
    inner = arms[0] if len(arms) == 1 else annotation
    if get_origin(inner) is tuple:
        values = get_args(inner)
        each = describe(values[0])
        return (
            f"an array of any length, each {each}" if Ellipsis in values else f"an array of {len(values)}, each {each}"
        )
    if get_origin(inner) in (dict, Mapping):
        value = get_args(inner)[1]
        return "a table" if value is Any else f"a table, each value {describe(value)}"
    return describe(annotation)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "required"
    return "absent" if value is None else as_toml(value)


def as_toml(value: Any) -> str:
    """Return a default as TOML writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return "{}"
    return f"{value:_}" if type(value) is int and value >= 10_000 else json.dumps(value)


def field_texts(cls: type[Any]) -> dict[str, str]:
    """Return the string under each field of a dataclass, in one line; own fields come after inherited ones."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), "a dataclass is a class"
        field = ""
        for node in tree.body:
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if field and isinstance(text, str):
                found[field] = " ".join(text.split())
            field = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
    return found


def _summary(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - the page
