"""Regular expressions that a file names, matched in bounded time: `re` backtracks, and `(a+)+$` would run for ever.

Owns a matcher that follows all ways through an expression at once, as a set of positions. It starts from `re`'s own
parse of the expression, and asks `re` itself whether one character or one anchor matches at a position.
Source: CPython, Lib/re/_parser.py and _compiler.py; Thompson, "Regular expression search algorithm" (1968).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

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


_Ways: TypeAlias = "Callable[[_Walk, int], int]"
"""Returns all positions at which an expression can end that starts at one of these positions."""


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
            return compiled(walk, 1) != 0
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
def _compiled(text: str, literal: bool) -> _Ways:
    """Return an expression as `re` matches it if it is `literal`, because that is quick, else translated."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_CHARS} are allowed")
    if literal:
        whole = re.compile(text)
        return lambda walk, at: int(whole.match(walk.text) is not None)
    parsed = _parser.parse(text)
    return _sequence(parsed, parsed.state.flags)


def _sequence(nodes: Any, flags: int) -> _Ways:
    """Translate a parsed expression. Raises: ValueError for one that needs backtracking."""
    parts = [_translated(operation.name, argument, operation, flags) for operation, argument in nodes.data]
    return lambda walk, at: functools.reduce(lambda positions, part: part(walk, positions), parts, at)


def _translated(name: str, argument: Any, operation: Any, flags: int) -> _Ways:
    match name:
        case "ANY" | "AT" | "IN" | "LITERAL" | "NOT_LITERAL":
            one = _compiler.compile(_parser.SubPattern(_parser.State(), [(operation, argument)]), flags)
            width = 0 if name == "AT" else 1
            return lambda walk, at: sum(1 << p for p in walk.each(at) if one.match(walk.text, p)) << width
        case "SUBPATTERN":
            _, added, removed, inner = argument
            return _sequence(inner, _compiler._combine_flags(flags, added, removed))  # noqa: SLF001
        case "BRANCH" | "FAILURE":
            ways = [_sequence(way, flags) for way in argument[1]] if argument else []
            return lambda walk, at: functools.reduce(int.__or__, [way(walk, at) for way in ways], 0)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, repeated = int(argument[0]), int(argument[1]), _sequence(argument[2], flags)
            return lambda walk, at: walk.repeat(repeated, least, most, at)
        case "ASSERT" | "ASSERT_NOT":
            direction, inner = argument
            behind, seen = inner.getwidth()[0] if direction < 0 else None, _sequence(inner, flags)
            if name == "ASSERT":
                return lambda walk, at: walk.look(seen, behind, at)
            return lambda walk, at: at & ~walk.look(seen, behind, at)
        case _:
            raise ValueError(f"it holds {_UNBOUNDED.get(name, name)}, which is not matched in bounded time")


class _Walk:
    """One comparison of an expression with a text. A set of positions is an integer: bit p stands for position p."""

    def __init__(self, text: str, most: int) -> None:
        self.text = text
        self._most = most
        self.steps = 0

    def count(self, steps: int) -> None:
        """Count steps. Raises: ValueError if they are too many."""
        self.steps += steps
        if self.steps > self._most:
            raise ValueError(f"its regular expressions take more than {MAX_STEPS} steps to compare with the names")

    def repeat(self, inner: _Ways, least: int, most: int, positions: int) -> int:
        """Return the ends of `least` to `most` matches, one after the other."""
        for _ in range(least):
            before, positions = positions, inner(self, positions)
            self.count(1)
            if positions in (0, before):  # at the latest after as many rounds as the text has characters
                break
        ends = new = positions
        for _ in range(most - least):
            new = inner(self, new) & ~ends
            self.count(1)
            if not new:
                break
            ends |= new
        return ends

    def look(self, inner: _Ways, behind: int | None, positions: int) -> int:
        """Return the positions at which a match begins, or at which one of `behind` characters ends."""
        if behind is None:
            return sum(1 << p for p in self.each(positions) if inner(self, 1 << p))
        return positions & inner(self, positions >> behind)

    def each(self, positions: int) -> Iterator[int]:
        """Yield the positions of a set, and count each."""
        while positions:
            lowest = positions & -positions
            positions ^= lowest
            self.count(1)
            yield lowest.bit_length() - 1
