"""Keeps what code switches in training and no state dict holds: what trains, dropout, and PEFT's adapters.

Owns the comparison with the values at the start, so that a step holds only what has been switched since.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from torch import nn

_OF_PEFT = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of PEFT's layers: which adapters take part, with which factor, and which are in the weights now."""


class Switches:
    """Attributes of parameters and modules that code switches in training, such as requires_grad."""

    def __init__(self, switches: Iterable[tuple[str, Any, str]]) -> None:
        """Note the values of `switches`: a name, the object, and its attribute."""
        self._first = [
            (f"{name} {attribute}", value, attribute, deepcopy(getattr(value, attribute)))
            for name, value, attribute in switches
        ]

    def changed(self) -> dict[str, Any]:
        """Return those that have been switched since the object was built, with their values now."""
        now = ((key, getattr(value, attribute), first) for key, value, attribute, first in self._first)
        return {key: deepcopy(value) for key, value, first in now if value != first}

    def restore(self, changed: dict[str, Any]) -> None:
        """Switch them as `changed` says, and all others as they were at first."""
        for key, value, attribute, first in self._first:
            if getattr(value, attribute) != (wanted := changed.get(key, first)):
                setattr(value, attribute, deepcopy(wanted))


def switches_of(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield a module's switches: which parameters and statistics train, how much is dropped, what PEFT's layers do."""
    for name, value in module.named_parameters():
        yield name, value, "requires_grad"
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the base of all, without a public name
            yield name, part, "p"
        if isinstance(part, nn.modules.batchnorm._NormBase):  # noqa: SLF001 - as above
            yield name, part, "track_running_stats"
        for attribute in _OF_PEFT if is_of_peft(part) else ():
            value = vars(part).get(attribute, getattr(type(part), attribute, None))
            values = value.values() if isinstance(value, dict) else ()
            if isinstance(value, (str, bool, list, dict)) and all(isinstance(v, (int, float)) for v in values):
                yield name, part, attribute


def modules_of_peft(models: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """Return PEFT's modules with their names; a model is not walked if PEFT was never imported."""
    if "peft" not in sys.modules:
        return []
    return [found for model in models for found in model.named_modules() if is_of_peft(found[1])]


def is_of_peft(value: Any) -> bool:
    """Return whether the class of an object, or one that it extends, is PEFT's."""
    return _any_of_peft(type(value).__mro__)


@cache
def _any_of_peft(kinds: tuple[type, ...]) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in kinds)
