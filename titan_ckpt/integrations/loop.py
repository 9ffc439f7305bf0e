"""LoopCheckpoint: a manager in the loop of somebody else's trainer, from the load to the end of the run.

Owns the order of load, save and guard, and what hooks of a trainer set once more when a resumed training begins: the
numbers of an optimizer's groups and the state of the user's own objects. components/known/switches.py has what else
hooks change beside weights. Knows no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.guard.run_guard import RunGuard
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.manager import CheckpointManager


class LoopCheckpoint:
    """The checkpoints of one trainer; its methods are called when the trainer's loop is at these points."""

    manager: CheckpointManager
    """The manager of the current or last run of the loop."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        self._config = config
        self._guard: RunGuard | None = None
        self.opened = ExitStack()
        self._completed = 0
        """The step that was loaded or saved last."""

    @property
    def stopped(self) -> str | None:
        """Return why the run has stopped before its last step, such as a signal, or None."""
        return None if self._guard is None else self._guard.stopped

    @property
    def is_resumed(self) -> bool:
        """Return whether a step was loaded or made."""
        return self._completed > 0

    def _load(self, new_manager: Callable[[], CheckpointManager]) -> int:
        """Load into what the trainer has built, and return the step."""
        self._guard = None
        self.manager = self.opened.enter_context(new_manager())
        self._completed = self.manager.load().step
        return self._completed

    def _watch(self) -> None:
        """Let signals, time limits and exceptions save the run; an exception must pass `opened`."""
        self._guard = self.opened.enter_context(RunGuard(self.manager))

    def _complete(
        self, step: int, metrics: Mapping[str, float], *, is_last: bool, force: bool = False, export: bool = True
    ) -> bool:
        """Save the step that has ended, if it is due. Return whether the guard stops the run.

        `export`: as of `_save`.
        """
        assert self._guard is not None
        self._completed = step
        self._save(metrics, is_last=is_last, force=force, export=export)
        return self._guard.step_ended(step, metrics)

    def _save(
        self, metrics: Mapping[str, float] | None, *, is_last: bool, force: bool = False, export: bool = True
    ) -> None:
        """Save the step that ended last, if it is due.

        `export`: False if a later call will make the last step's exports, or the step that is these weights alone.
        """
        if export or not (self._config.save and self._config.save.model_only_last):
            self.manager.save(self._completed, last_step=is_last, force=force, metrics=metrics, export=export)


def extend(value: Any, methods: type) -> None:
    """Put `methods` before those of an object's class, in place; the class keeps its name."""
    own = type(value)
    extended = type(own.__name__, (methods, own), {"__module__": own.__module__})
    object.__dict__["__class__"].__set__(value, extended)  # accelerate's loaders have a property of this name


class Iterated:
    """The methods of a trainer's wrapper around a loader that are different when the loader has a position."""

    titan_ckpt: PositionedLoader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.titan_ckpt)

    def next_epoch(self) -> None:
        """Leave the rest of this epoch out, before the save of the step after which the loop leaves it."""
        self.titan_ckpt.next_epoch()


def iterate_over(wrapper: Any, position: PositionedLoader, methods: type = Iterated) -> None:
    """Let a trainer's wrapper iterate over a PositionedLoader, in place, because the loop holds the wrapper already."""
    wrapper.titan_ckpt = position
    if not isinstance(wrapper, methods):  # else an earlier manager in this process has changed it
        extend(wrapper, methods)


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
        """Return the object's own, by the method that it has now."""
        return self._value.state_dict()  # type: ignore[no-any-return]  # the user's

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it to the object, and keep a copy."""
        self._loaded = deepcopy(state_dict)
        self._value.load_state_dict(state_dict)

    def restore(self) -> None:
        """Give it to the object again."""
        if self._loaded is not None:
            self._value.load_state_dict(deepcopy(self._loaded))
