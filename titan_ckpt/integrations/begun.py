"""Puts back what hooks of a trainer set once more when a resumed training begins, although a step has restored it.

Owns what hooks change beside weights: which parameters train, the numbers of an optimizer's groups, and the state of
the user's own objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn


class Switches:
    """Attributes of parameters and modules that hooks switch in training, such as requires_grad."""

    def __init__(self, switches: Iterable[tuple[str, Any, str]]) -> None:
        """Note the values of `switches`: a name, the object, and its attribute."""
        self._first = [
            (f"{name} {attribute}", value, attribute, getattr(value, attribute)) for name, value, attribute in switches
        ]

    def changed(self) -> dict[str, bool]:
        """Return those that have been switched since the object was built, with their values now."""
        now = ((key, getattr(value, attribute), first) for key, value, attribute, first in self._first)
        return {key: value for key, value, first in now if value != first}

    def restore(self, changed: dict[str, bool]) -> None:
        """Switch them as `changed` says, and all others as they were at first."""
        for key, value, attribute, first in self._first:
            if getattr(value, attribute) != (wanted := changed.get(key, first)):
                setattr(value, attribute, wanted)


def trained(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield which parameters of a module train, as switches."""
    for name, value in module.named_parameters():
        yield name, value, "requires_grad"


class Groups:
    """The numbers of optimizers' parameter groups, as they were when the object was built."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._settings = [deepcopy({k: v for k, v in group.items() if k != "params"}) for group in self._groups]

    def restore(self) -> None:
        """Set them again."""
        for group, settings in zip(self._groups, self._settings, strict=True):
            group.update(deepcopy(settings))


class Restored:
    """The state of an object of the user's own, which a hook may set anew when a resumed training begins."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the object's own."""
        state: dict[str, Any] = self._value.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it to the object, and keep a copy."""
        self._loaded = deepcopy(state_dict)
        self._value.load_state_dict(state_dict)

    def restore(self) -> None:
        """Give it to the object again."""
        if self._loaded is not None:
            self._value.load_state_dict(deepcopy(self._loaded))
