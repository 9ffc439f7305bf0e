"""Puts back what hooks of a trainer set once more when a resumed training begins, although a step has restored it.

Owns the numbers of an optimizer's groups and the state of the user's own objects; components/known/switches.py has
what else hooks change beside weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch


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
