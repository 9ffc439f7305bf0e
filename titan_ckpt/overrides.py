"""Command-line overrides: `--checkpoint.save.interval 10` set in a config's raw TOML, before anything is checked.

Owns the spelling of flags and values, and where they land. Whether a key exists, and what it may hold, is asked when
the whole is bound (strict_toml.py), so a flag and a line of the file get the same answer and the same "did you mean".

A few lines here and not tyro: a table that is absent (`X | None`) and an element of an array of tables must be set by
their dotted path, while tyro derives flags from a complete default object and spells such fields as subcommands.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import tomli

from titan_ckpt.errors import ConfigError


def apply_overrides(raw: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `raw` with every `--table.key VALUE` or `--table.key=VALUE` of `argv` set in it.

    A value is read as TOML (`10`, `true`, `["rng"]`, `{ latest = 3 }`) and is a string where that fails. Tables on the
    way are made; a number addresses an element of an array of tables, one past its end adds one.
    Raises: ConfigError for what is no such flag; whether a key exists is asked when it is bound.
    """
    merged, problems = merge_overrides(raw, argv)
    if problems:
        raise ConfigError(problems, "command line")
    return merged


def merge_overrides(raw: Mapping[str, Any], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Do as `apply_overrides`, and return the faults instead of raising them."""
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
            problems.append(f"{flag}: needs a value, such as {flag} true")
            continue
        if not equals:
            text = words.pop(0)
        if flag in given:
            problems.append(f"{flag}: given twice")
        given.add(flag)
        keys = flag.removeprefix("--").split(".")
        if fault := _place(merged, keys, _parse(text)) if all(keys) else "no such key":
            problems.append(f"{flag}: {fault}")
    return merged, problems


def _parse(text: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    value = parsed["value"]
    return value if len(parsed) == 1 and isinstance(value, (bool, int, float, str, list, dict)) else text


def _place(tree: dict[str, Any], keys: Sequence[str], value: Any) -> str | None:
    """Set `value` at `keys` in place; return why that cannot be, if so."""
    here: Any = tree
    for depth, key in enumerate(keys):
        last = depth + 1 == len(keys)
        at = ".".join(keys[:depth])
        if isinstance(here, dict):
            slot: Any = key
        elif not isinstance(here, list):
            return f"{at} is a value and has no keys"
        elif not key.isdecimal():
            return f"{at} is an array: name an element, such as {at}.0.{key}"
        elif int(key) > len(here):
            return f"{at} has {len(here)} elements, so the next is {at}.{len(here)}"
        else:
            slot = int(key)
            here += [None] * (slot == len(here))
        if last:
            here[slot] = value
        elif isinstance(here, list) and here[slot] is None:
            here[slot] = {}
        elif isinstance(here, dict) and slot not in here:
            here[slot] = [] if keys[depth + 1].isdecimal() else {}
        here = here[slot]
    return None
