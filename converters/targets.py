"""Select modules of a model by a list of names, and name modules so that PEFT selects them.

Owns the matching: by last part of the name, by dotted suffix, by full name or by shell pattern. Changes nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from titan_ckpt.errors import ConverterError, listed
from titan_ckpt.weights.lora import matches

_LISTED = 8
_LINES = 12


def select(fqns: Sequence[str], targets: Iterable[str], what: str) -> list[str]:
    """Return the modules that any target selects, in the model's order.

    Raises: ConverterError listing every target that selects nothing, each with the nearest names.
    """
    targets = tuple(targets)
    unmatched = [target for target in targets if not any(matches(fqn, target) for fqn in fqns)]
    if unmatched:
        lines = "\n  ".join(f"{target!r} matches no {what}{_near(target, fqns)}" for target in unmatched)
        raise ConverterError(f"{len(unmatched)} name(s) match nothing in this model\n  {lines}")
    return [fqn for fqn in fqns if any(matches(fqn, target) for target in targets)]


def in_lines(problems: Sequence[str]) -> str:
    """Return the problems one per line; only the first few of many, because a deep model has many alike."""
    return "\n  " + listed(problems, "\n  ", most=_LINES)


def _near(target: str, fqns: Sequence[str]) -> str:
    """Return a suggestion: names with a close spelling, else the existing last parts of names."""
    if not fqns:
        return ": the model has none"
    depth = target.count(".") + 1
    names = list(dict.fromkeys(".".join(fqn.split(".")[-depth:]) for fqn in fqns))
    if near := difflib.get_close_matches(target, names, n=3, cutoff=0.6):
        return f". Did you mean {' or '.join(near)}?"
    last = list(dict.fromkeys(fqn.rsplit(".", 1)[-1] for fqn in fqns))
    more = ", ..." if len(last) > _LISTED else ""
    return f". There are: {', '.join(last[:_LISTED])}{more}"


def ends_of(adapted: Collection[str], every: Collection[str]) -> list[str] | str:
    """Return target_modules that select exactly the adapted modules: PEFT compares the ends of names.

    Last parts of names if these suffice, else full names, else a pattern that must match the full name.
    """
    last = {last_part(module) for module in adapted}
    selected = {module for module in every if last_part(module) in last}
    if selected == {*adapted} and not any(part.isdigit() for part in last):
        return sorted(last)
    if not any(_is_end(module, every) for module in adapted):
        return sorted(adapted)
    return "|".join(map(re.escape, sorted(adapted)))


def pattern_of(module: str, every: Collection[str]) -> str:
    """Return the key of a module in rank_pattern and alpha_pattern, which PEFT compares with the ends of names."""
    return f"^{re.escape(module)}" if _is_end(module, every) else module


def last_part(module: str) -> str:
    """Return the name of a module in the one that holds it."""
    return module.rpartition(".")[2]


def _is_end(module: str, every: Collection[str]) -> bool:
    return any(other.endswith(f".{module}") for other in every)
