"""Regular expressions that a file names, matched in bounded time: `re` backtracks, and `(a+)+$` would run for ever.

Owns a matcher that follows all ways through an expression at once, as a set of positions. It starts from `re`'s own
parse of the expression, and asks `re` itself whether one character or one anchor matches at a position.
Source: CPython, Lib/re/_parser.py and _compiler.py; Thompson, "Regular expression search algorithm" (1968).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

_parser: Any = importlib.import_module("re._parser")  # private, and the only parser of this language
_compiler: Any = importlib.import_module("re._compiler")

MAX_CHARS = 2_000
"""Longest expression, and longest name that is compared with one."""
MAX_PATTERNS = 10_000
"""More of them than modules cannot be compared in MAX_STEPS."""
MAX_STEPS = 10_000_000
"""Limit of the steps of all lookups in one table together: some seconds."""
_LITERAL = re.compile(r"(?:[\w./-]|\\[^\w\s])*")
"""Expressions that are names of modules, as PEFT writes most, escaped or not: their match takes linear time."""
_UNBOUNDED = {
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


@dataclass(frozen=True, slots=True)
class _Test:
    """One character (width 1) or one anchor (width 0)."""

    pattern: re.Pattern[str]
    width: int


@dataclass(frozen=True, slots=True)
class _Branch:
    ways: tuple[_Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    least: int
    most: int
    inner: _Sequence


@dataclass(frozen=True, slots=True)
class _Look:
    """A lookahead, or a lookbehind of `width` characters."""

    inner: _Sequence
    width: int | None
    wanted: bool


_Sequence: TypeAlias = "tuple[_Test | _Branch | _Repeat | _Look, ...]"


class ForeignPatterns:
    """A table from a file that is keyed by regular expressions, and looked up as PEFT does it."""

    def __init__(self, table: Mapping[str, float]) -> None:
        self._table = table
        self._known: dict[str, float | None] = {}
        self._steps = 0

    def first(self, module: str) -> float | None:
        """Return the value of the first expression that matches the module's name or its end; None without any.

        Raises: ValueError if all lookups together take too long, or for an expression that `pattern_fault` refuses.
        Source: peft, utils/other.py get_pattern_key.
        """
        if module not in self._known:
            matches = (value for pattern, value in self._table.items() if self._matches(pattern, module))
            self._known[module] = next(matches, None)
        return self._known[module]

    def _matches(self, pattern: str, module: str) -> bool:
        walk = _Walk(module, MAX_STEPS - self._steps)
        try:
            walk.count(1)
            compiled = _compiled(rf"(.*\.)?({pattern})$", _LITERAL.fullmatch(pattern) is not None)
            if len(module) > MAX_CHARS:
                raise ValueError(f"a module's name has {len(module)} characters; at most {MAX_CHARS} are compared")
            if isinstance(compiled, re.Pattern):
                return compiled.match(module) is not None
            return walk.run(compiled, 1) != 0
        finally:
            self._steps += walk.steps


def pattern_fault(pattern: str) -> str | None:
    """Return why a file's expression is none that is matched here, or None."""
    try:
        _compiled(pattern, _LITERAL.fullmatch(pattern) is not None)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=4096)
def _compiled(text: str, literal: bool) -> re.Pattern[str] | _Sequence:
    """Return an expression as `re` compiles it if it is `literal`, because that is quick, else translated."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_CHARS} are allowed")
    if literal:
        return re.compile(text)
    parsed = _parser.parse(text)
    return tuple(_translated(parsed, parsed.state.flags))


def _translated(nodes: Any, flags: int) -> Iterator[_Test | _Branch | _Repeat | _Look]:
    """Yield the operations of a parsed expression. Raises: ValueError for one that needs backtracking."""
    for operation, argument in nodes.data:
        match operation.name:
            case "ANY" | "AT" | "IN" | "LITERAL" | "NOT_LITERAL" as name:
                alone = _parser.SubPattern(_parser.State(), [(operation, argument)])
                yield _Test(_compiler.compile(alone, flags), 0 if name == "AT" else 1)
            case "SUBPATTERN":
                _, added, removed, inner = argument
                yield from _translated(inner, _compiler._combine_flags(flags, added, removed))  # noqa: SLF001
            case "BRANCH":
                yield _Branch(tuple(tuple(_translated(way, flags)) for way in argument[1]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                yield _Repeat(int(least), int(most), tuple(_translated(inner, flags)))
            case "ASSERT" | "ASSERT_NOT" as name:
                direction, inner = argument
                width = inner.getwidth()[0] if direction < 0 else None
                yield _Look(tuple(_translated(inner, flags)), width, name == "ASSERT")
            case "FAILURE":
                yield _Branch(())
            case name:
                raise ValueError(f"it holds {_UNBOUNDED.get(name, name)}, which is not matched in bounded time")


class _Walk:
    """One comparison of an expression with a text. A set of positions is an integer: bit p stands for position p."""

    def __init__(self, text: str, most: int) -> None:
        self._text = text
        self._most = most
        self.steps = 0

    def run(self, sequence: _Sequence, starts: int) -> int:
        """Return all positions at which the sequence can end that starts at one of `starts`."""
        positions = starts
        for node in sequence:
            match node:
                case _Test():
                    positions = sum(1 << p for p in self._each(positions) if node.pattern.match(self._text, p))
                    positions <<= node.width
                case _Branch():
                    positions = functools.reduce(int.__or__, [self.run(way, positions) for way in node.ways], 0)
                case _Repeat():
                    positions = self._repeated(node, positions)
                case _Look():
                    positions = self._looked(node, positions)
                case _:
                    assert_never(node)
        return positions

    def count(self, steps: int) -> None:
        """Count steps. Raises: ValueError if they are too many."""
        self.steps += steps
        if self.steps > self._most:
            raise ValueError(f"its regular expressions take more than {MAX_STEPS} steps to compare with the names")

    def _repeated(self, node: _Repeat, positions: int) -> int:
        for _ in range(node.least):
            before, positions = positions, self.run(node.inner, positions)
            self.count(1)
            if positions in (0, before):  # at the latest after as many rounds as the text has characters
                break
        ends = new = positions
        for _ in range(node.most - node.least):
            new = self.run(node.inner, new) & ~ends
            self.count(1)
            if not new:
                break
            ends |= new
        return ends

    def _looked(self, node: _Look, positions: int) -> int:
        if node.width is None:
            holds = sum(1 << p for p in self._each(positions) if self.run(node.inner, 1 << p))
        else:  # a match of fixed width that ends at p began at p - width
            holds = positions & self.run(node.inner, positions >> node.width)
        return holds if node.wanted else positions & ~holds

    def _each(self, positions: int) -> Iterator[int]:
        while positions:
            lowest = positions & -positions
            positions ^= lowest
            self.count(1)
            yield lowest.bit_length() - 1
