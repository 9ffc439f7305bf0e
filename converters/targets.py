"""Which modules of a model a list of names means.

Owns the matching: by last part of the name, by dotted suffix, by full name or by shell pattern. Changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from titan_ckpt.errors import ConverterError
from titan_ckpt.model_wrapper import clean_fqn

_WILD = frozenset("*?[")
_LISTED = 8


def matches(fqn: str, target: str) -> bool:
    """Say whether `target` means the module: a pattern matches all of its name, anything else a dotted suffix of it."""
    if _WILD.intersection(target):
        return fnmatchcase(fqn, target)
    return fqn == target or fqn.endswith(f".{target}")


def select(fqns: Sequence[str], targets: Iterable[str], what: str) -> list[str]:
    """Return the modules that any target means, in the model's order.

    Raises: ConverterError listing every target that means nothing, each with its near misses.
    """
    targets = tuple(targets)
    unmatched = [target for target in targets if not any(matches(fqn, target) for fqn in fqns)]
    if unmatched:
        lines = "\n  ".join(f"{target!r} matches no {what}{_near(target, fqns)}" for target in unmatched)
        raise ConverterError(f"{len(unmatched)} name(s) match nothing in this model\n  {lines}")
    return [fqn for fqn in fqns if any(matches(fqn, target) for target in targets)]


def _near(target: str, fqns: Sequence[str]) -> str:
    """Suggest names: close spellings, else the last parts that there are."""
    if not fqns:
        return ": the model has none"
    depth = target.count(".") + 1
    names = list(dict.fromkeys(".".join(fqn.split(".")[-depth:]) for fqn in fqns))
    if near := difflib.get_close_matches(target, names, n=3, cutoff=0.6):
        return f". Did you mean {' or '.join(near)}?"
    last = list(dict.fromkeys(fqn.rsplit(".", 1)[-1] for fqn in fqns))
    more = ", ..." if len(last) > _LISTED else ""
    return f". There are: {', '.join(last[:_LISTED])}{more}"


def plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the model's linear modules by fqn; a subclass has a forward of its own, which a replacement would drop."""
    return {clean_fqn(name): module for name, module in model.named_modules() if type(module) is nn.Linear}


def excluded(fqns: Sequence[str], names: Sequence[str] | None) -> set[str]:
    """Return the modules that stay as they are; without `names` the output head, if the model has one.

    Raises: ConverterError for names that match nothing.
    """
    if names is None:
        return {fqn for fqn in fqns if fqn == "output" or matches(fqn, "lm_head")}
    return set(select(fqns, names, "linear module"))
