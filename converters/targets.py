"""Select modules of a model by a list of names.

Owns the matching: by last part of the name, by dotted suffix, by full name or by shell pattern. Changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from titan_ckpt.errors import ConverterError, listed
from titan_ckpt.weights.low_rank import matches

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
