"""Strict binding of TOML to frozen dataclasses: an invalid key, type or value is an error, never ignored.

Owns reading and binding to any dataclass; one ConfigError lists all faults. Knows no setting: the settings are in
config.py and beside the code that they configure.

A dataclass needs only annotations: int, float, str, bool, Path, Literal, nested dataclasses, `X | None`,
`tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, and unions of dataclasses told apart by a Literal field `kind`. A single
table is accepted as an array of one table. A dataclass may add
- `Annotated[X, Check(...)]` for a narrower value,
- `problems(self) -> Iterable[str]` for rules across fields, each line `field: cause`,
- `FOREIGN_KEYS: ClassVar[ForeignKeys]`, answers to keys that users of other tools will try,
- the base class `Checked`, or a `__post_init__` that calls `validate(self)`: objects built in code obey the same rules.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tomli

from titan_ckpt.errors import ConfigError, refuse, without_credentials

T = TypeVar("T")

_MAX_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class Check:
    """Narrow a value: `Annotated[int, Check("a positive integer (steps)", lambda n: n > 0)]`."""

    expected: str
    holds: Callable[[Any], object]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises: ConfigError if it is absent, unreadable, not TOML, or has a key twice."""
    try:
        # a named pipe that nobody writes to is empty, and would block for ever otherwise
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)  # a pipe that somebody writes to is waited for, as `<(...)` needs
            text = file.read(_MAX_BYTES + 1)
            if len(text) > _MAX_BYTES:
                raise ConfigError([f"more than {_MAX_BYTES} bytes; expected a run's settings"], str(path))
            return tomli.loads(text.decode())
    except tomli.TOMLDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1 :][:1]
        raise ConfigError([f"line {error.lineno}: {error.msg}: {''.join(line).strip()}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"not valid TOML: byte {error.start} is not UTF-8"], str(path)) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or arrays in arrays in arrays
        raise ConfigError([f"cannot be read: {error}"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from None


def from_dict(cls: type[T], raw: Mapping[str, Any], source: str = "config", path: str = "") -> T:
    """Return `raw` as a `cls`. Raises: ConfigError with one line per fault.

    `source` names the origin of `raw`, and `path` the table in it that `raw` is.
    """
    binder = _Binder(cls)
    bound = binder.table(cls, raw, path)
    refuse(*binder.problems, source=source)
    assert isinstance(bound, cls)
    return bound


def validate(config: Any) -> None:
    """Check every field of a dataclass that code builds; call it as the last line of `__post_init__`.

    Converts in place what TOML converts: a list becomes a tuple, an int in a float field becomes a float.
    Raises: ConfigError.
    """
    binder = _Binder(type(config))
    for name, kind in fields_of(type(config)).items():
        bound = binder.value(kind, getattr(config, name), name)
        if bound is not _BAD:
            object.__setattr__(config, name, bound)
    refuse(*(binder.problems or _cross_field(config)), source=type(config).__name__)


ForeignKeys = Mapping[str, str | Mapping[str, str]]
"""Key -> the whole answer; or whose key it is -> key -> the key here, or where it is."""


def foreign_keys(cls: type[Any]) -> dict[str, str]:
    """Return the answers to the keys that users of other tools will try in a table."""
    groups: ForeignKeys = getattr(cls, "FOREIGN_KEYS", {})
    plain = {key: answer for key, answer in groups.items() if isinstance(answer, str)}
    tables = {whose: keys for whose, keys in groups.items() if not isinstance(keys, str)}
    return plain | {key: f"{whose}; here: {here}" for whose, keys in tables.items() for key, here in keys.items()}


class Checked:
    """Base of dataclasses that are validated when code builds them, too."""

    __slots__ = ()

    def __post_init__(self) -> None:
        validate(self)


_BAD: Any = object()
"""Stands for a value whose fault was reported."""

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
}


@dataclass(frozen=True, slots=True)
class _Binder:
    """Binds one tree of values in one pass and gathers its problems."""

    root: type
    problems: list[str] = field(default_factory=list)

    def value(self, kind: Any, value: Any, path: str, expected: str | None = None) -> Any:
        """Return `value` as `kind`, or _BAD after reporting the fault; `expected` describes a narrower kind."""
        origin, args = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            return self._checked(args, value, path)
        if origin in (typing.Union, types.UnionType):
            return self._union(args, value, path, expected)
        if origin is Literal:
            known = any(value == arm and type(value) is type(arm) for arm in args)
            return value if known else self._not_literal(args, value, path)
        if dataclasses.is_dataclass(kind):
            return self.table(typing.cast("type[Any]", kind), value, path)
        if origin is tuple:
            return self._array(args, value, path)
        if origin in (dict, Mapping):
            return self._mapping(args[1], value, path)
        converted = _convert(kind, value)
        return converted if converted is not _BAD else self._expected(expected or _NAMES[kind], value, path)

    def table(self, cls: type[Any], value: Any, path: str) -> Any:
        """Return a Mapping as the dataclass `cls`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            return self._expected("a table", value, path)
        hints = fields_of(cls)
        self.problems.extend(_unknown(self.root, cls, hints, key, path) for key in value if key not in hints)
        arguments = {
            name: self.value(kind, value[name], _join(path, name)) for name, kind in hints.items() if name in value
        }
        for f in dataclasses.fields(cls):
            if f.name in hints and f.name not in value and f.default is MISSING and f.default_factory is MISSING:
                self.problems.append(f"{_join(path, f.name)}: required, expected {describe(hints[f.name])}")
                arguments[f.name] = _BAD
        if any(argument is _BAD for argument in arguments.values()):
            return _BAD
        try:
            built = cls(**arguments)
            faults: Sequence[str] = _cross_field(built)
        except ConfigError as error:
            faults = error.problems
        self.problems.extend(_join(path, line) for line in faults)
        return _BAD if faults else built

    def _expected(self, what: str, value: Any, path: str, words: Sequence[Any] = ()) -> Any:
        """Report a fault; the nearest of these words may be the one that was meant."""
        texts = [word for word in words if isinstance(word, str)]
        near = difflib.get_close_matches(value, texts, n=1) if type(value) is str else []
        more = f"; did you mean {_show(near[0])}?" if near else ""
        self.problems.append(f"{path}: expected {what}, found {_show(value)}{more}")
        return _BAD

    def _not_literal(self, arms: Sequence[Any], value: Any, path: str) -> Any:
        return self._expected(f"one of {', '.join(map(_show, arms))}", value, path, arms)

    def _checked(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        kind, *checks = args
        wanted = [check for check in checks if isinstance(check, Check)]
        bound = self.value(kind, value, path, wanted[0].expected if wanted else None)
        for check in wanted:
            if bound is not _BAD and not check.holds(bound):
                bound = self._expected(check.expected, value, path)
        return bound

    def _union(self, args: tuple[Any, ...], value: Any, path: str, expected: str | None) -> Any:
        if value is None and types.NoneType in args:
            return None
        arms = [arm for arm in args if arm is not types.NoneType]
        if len(arms) == 1:
            return self.value(arms[0], value, path, expected)
        if isinstance(value, Mapping):
            tagged = [arm for arm in arms if dataclasses.is_dataclass(arm)]
            return self._tagged(tagged, value, path) if tagged else self._no_arm(arms, value, path)
        texts = [arm for arm in arms if get_origin(arm) is Annotated and get_args(arm)[0] is str]
        if isinstance(value, str) and len(texts) == 1 and not any(get_origin(arm) is Literal for arm in arms):
            return self.value(texts[0], value, path)  # its own checks say more than the list of all arms
        for arm in arms:
            attempt = _Binder(self.root)
            bound = attempt.value(arm, value, path)
            if not attempt.problems:
                return bound
        return self._no_arm(arms, value, path)

    def _no_arm(self, arms: Sequence[Any], value: Any, path: str) -> Any:
        words = [word for arm in arms if get_origin(arm) is Literal for word in get_args(arm)]
        return self._expected(" or ".join(dict.fromkeys(map(describe, arms))), value, path, words)

    def _tagged(self, arms: Sequence[Any], value: Mapping[str, Any], path: str) -> Any:
        by_kind = {tag: arm for arm in arms for tag in get_args(fields_of(arm)["kind"])}
        tag = value.get("kind")
        if "kind" not in value:
            self.problems.append(f"{_join(path, 'kind')}: required, expected one of {', '.join(map(_show, by_kind))}")
            return _BAD
        if not isinstance(tag, str) or tag not in by_kind:
            return self._not_literal(tuple(by_kind), tag, _join(path, "kind"))
        return self.table(by_kind[tag], value, path)

    def _array(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if isinstance(value, Mapping) and tables_in(args[0]):
            element = self.value(args[0], value, path)
            return _BAD if element is _BAD else (element,)
        if not isinstance(value, (list, tuple)):
            return self._expected(_describe_array(args, value), value, path)
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            return self._expected(f"an array of {len(kinds)} values", value, path)
        bound = [self.value(kind, v, f"{path}.{i}") for i, (kind, v) in enumerate(zip(kinds, value, strict=True))]
        return _BAD if any(b is _BAD for b in bound) else tuple(bound)

    def _mapping(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self._expected("a table", value, path)
        bound = {key: self.value(kind, v, _join(path, _key(key))) for key, v in value.items()}
        return _BAD if any(b is _BAD for b in bound.values()) else bound


def _convert(kind: Any, value: Any) -> Any:
    """Return a scalar as `kind` if that loses nothing, else _BAD; a bool is not a number."""
    assert kind in _NAMES, f"no TOML value is a {kind}"
    if kind is Path:
        return Path(value) if isinstance(value, (str, Path)) and str(value) else _BAD
    if kind is float:
        most = sys.float_info.max  # an int may be larger
        finite = isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most
        return float(value) if finite else _BAD
    return value if type(value) is kind else _BAD


def _cross_field(built: Any) -> list[str]:
    rules: Callable[[], Iterable[str]] | None = getattr(built, "problems", None)
    return list(rules()) if rules else []


_FIELDS: dict[type[Any], dict[str, Any]] = {}
"""The answers of `fields_of`: evaluating annotations takes longer than binding the values."""


def fields_of(cls: type[Any]) -> Mapping[str, Any]:
    """Return the annotations of the fields that can be set, in order."""
    if cls not in _FIELDS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _FIELDS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    return _FIELDS[cls]


def tables_in(kind: Any) -> list[type[Any]]:
    """Return the dataclasses that an annotation allows, at any depth."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    if get_origin(kind) is Annotated:
        return tables_in(get_args(kind)[0])
    return [table for arm in get_args(kind) for table in tables_in(arm)]


def describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((m.expected for m in args[1:] if isinstance(m, Check)), describe(args[0]))
    if origin is Literal:
        return f"one of {', '.join(map(_show, args))}"
    if origin is tuple:
        return "an array of tables" if tables_in(args[0]) else "an array"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arm) for arm in args if arm is not types.NoneType)
    return _NAMES.get(kind, "a table")


def _describe_array(args: tuple[Any, ...], value: Any) -> str:
    """Return what a field that is an array expects instead of a value."""
    if tables_in(args[0]):
        return "an array of tables"
    if args[-1] is not Ellipsis:
        return f"an array of {len(args)} values"
    return f"an array, such as [{_show(value)}]" if isinstance(value, str) else "an array"


def _show(value: Any) -> str:
    """Return a value as TOML text; a table or an array is only described, and a URL without its user and query."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    if isinstance(value, (str, bool)):
        text = json.dumps(without_credentials(value) if isinstance(value, str) else value, ensure_ascii=False)
        return text if len(text) <= 80 else f'{text[:76]}..."'
    return "nothing" if value is None else str(value)


def _key(key: str) -> str:
    """Return a key as TOML text: quoted if it is not a plain word."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _join(path: str, line: str) -> str:
    return f"{path}.{line}" if path else line


def _unknown(root: type[Any], cls: type[Any], hints: Mapping[str, Any], key: str, path: str) -> str:
    """Return the message for a key that `cls`, at `path`, does not have."""
    where = _join(path, _key(key))
    if answer := foreign_keys(cls).get(key):
        return f"{where}: {answer}"
    itself = ".".join(part for part in where.split(".") if not part.isdecimal())
    leaves: dict[str, list[str]] = {}
    for known in dict.fromkeys(_paths(root, "", ())):
        if known != itself:  # a table of another `kind` in the same array may have this very key
            leaves.setdefault(known.rpartition(".")[2], []).append(known)
    near = leaves.get(key) or [_join(path, name) for name in difflib.get_close_matches(key, hints, n=1)]
    if not near:
        near = [p for leaf in difflib.get_close_matches(key, leaves, n=1, cutoff=0.7) for p in leaves[leaf]]
    if near:
        return f"{where}: unknown key; did you mean {' or '.join(near[:3])}?"
    return f"{where}: unknown key; known here: {', '.join(hints)}"


def _paths(cls: type[Any], path: str, above: tuple[type[Any], ...]) -> Iterator[str]:
    """Yield the dotted path of every key below `cls`; an element of an array has the array's path."""
    for name, kind in fields_of(cls).items():
        yield _join(path, name)
        for table in tables_in(kind):
            if table not in above:
                yield from _paths(table, _join(path, name), (*above, cls))
