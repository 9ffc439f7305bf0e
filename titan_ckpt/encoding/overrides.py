"""Command-line overrides: `--checkpoint.save.interval 10` is set in a config's raw TOML, before it is checked.

Owns the syntax of flags and values, and where a value is placed. Keys and types are checked when the whole config is
bound (toml.py), so that a flag and a line of the file get the same error and the same "did you mean".

This module is used instead of tyro because absent tables (`X | None`) and elements of arrays of tables must be set by
their dotted path; tyro derives flags from a complete default object and spells such fields as subcommands.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import tomli

from titan_ckpt.errors import refuse


def apply_overrides(raw: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `raw` with every `--table.key VALUE` or `--table.key=VALUE` of `argv` set in it.

    A value is parsed as TOML (`10`, `true`, `["rng"]`, `{ latest = 3 }`), else it is a string. Missing tables are made;
    a number addresses an element of an array of tables, and the number after the last one adds an element.
    Raises: ConfigError for words that are not such flags; whether a key exists is checked when the config is bound.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(raw))
    problems: list[str] = []
    given: set[str] = set()
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not flag.startswith("--"):
            problems.append(f"expected --table.key VALUE, found {flag!r}")
            continue
        if not equals and (not words or words[0].startswith("--")):
            problems.append(f"{flag}: needs a value: {flag} VALUE")
            continue
        if not equals:
            text = words.pop(0)
        if flag in given:
            problems.append(f"{flag}: given twice")
        given.add(flag)
        keys = flag.removeprefix("--").split(".")
        if fault := _place(merged, keys, _parse(text)) if all(keys) else "no such key":
            problems.append(f"{flag}: {fault}")
    refuse(*problems, source="command line")
    return merged


def _parse(text: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    value = parsed["value"]
    return value if len(parsed) == 1 and isinstance(value, (bool, int, float, str, list, dict)) else text


def _place(tree: dict[str, Any], keys: Sequence[str], value: Any) -> str | None:
    """Set `value` at `keys` in place; return the reason if that is impossible."""
    node: Any = tree
    for depth, key in enumerate(keys):
        last = depth + 1 == len(keys)
        path = ".".join(keys[:depth])
        if isinstance(node, dict):
            slot: Any = key
        elif not isinstance(node, list):
            return f"{path} is a value and has no keys"
        elif not key.isdecimal():
            return f"{path} is an array: name an element, such as {path}.0.{key}"
        elif int(key) > len(node):
            return f"{path} has {len(node)} elements, so the next is {path}.{len(node)}"
        else:
            slot = int(key)
            node += [None] * (slot == len(node))
        if last:
            node[slot] = value
        elif isinstance(node, list) and node[slot] is None:
            node[slot] = {}
        elif isinstance(node, dict) and slot not in node:
            node[slot] = [] if keys[depth + 1].isdecimal() else {}
        node = node[slot]
    return None
