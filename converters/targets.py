"""Which modules of a model a list of names means.

Owns the matching: by last part of the name, by dotted suffix, by full name or by shell pattern. Changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import ConverterError
from titan_ckpt.model_wrapper import clean_fqn

_WILD = frozenset("*?[")
_LISTED = 8
_LINES = 12


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


def in_lines(problems: Sequence[str]) -> str:
    """Return problems one below the other; of many alike, as a deep model has them, the first."""
    more = [f"and {len(problems) - _LINES} more"] if len(problems) > _LINES else []
    return "".join(f"\n  {line}" for line in [*problems[:_LINES], *more])


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


def replaceable_linears(model: nn.Module, excluded: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Return the linear modules to exchange, by fqn: all but the excluded ones, which are the output head if None.

    Raises: ConverterError for names that match nothing, and for modules that are sharded or are no plain nn.Linear.
    """
    linears = {clean_fqn(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if excluded is None:
        kept = {fqn for fqn in linears if fqn == "output" or matches(fqn, "lm_head")}
    else:
        kept = set(select(list(linears), excluded, "linear module"))
    chosen = {fqn: module for fqn, module in linears.items() if fqn not in kept}
    problems = []
    for fqn, module in chosen.items():
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            problems.append(f"{fqn}: is a {kind}, whose own computation would be lost; add it to exclude_modules")
        elif isinstance(module.weight, DTensor):
            problems.append(f"{fqn}: is sharded already; convert the model first, then parallelise it")
    if problems:
        raise ConverterError(f"{len(problems)} module(s) cannot be exchanged{in_lines(problems)}")
    if not chosen:
        raise ConverterError(f"no linear module to exchange: the model has {len(linears)}, all excluded")
    return chosen
