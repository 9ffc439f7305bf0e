"""The values that RunState takes of a run and gives back to it: a snapshot, a mark of a step, a rank's own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.types import StateDict


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one step: live tensors by file name, and the state that is stored as typed JSON."""

    tensors: StateDict
    run: dict[str, Any]
    """Once per checkpoint: step, hyperparameters, schedulers, states."""
    rank: dict[str, Any]
    """Per rank: random generators, dataloader position."""
    components: tuple[str, ...] = ()
    volatile: frozenset[str] = frozenset()
    """Tensors that a forward pass may change: buffers and user states. Only an optimizer changes the others."""
    made: frozenset[str] = frozenset()
    """Tensors that the model's own code has made, perhaps in memory that it uses again. A save stages them at once."""

    def frozen_tensors(self) -> StateDict:
        """Return the tensors with copies of the volatile ones; the others do not change until an optimizer steps."""
        return {name: value.clone() if name in self.volatile else value for name, value in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """A copy of the state that the next step overwrites before `optimizer.step()`."""

    step: int
    counters: Snapshot
    """The state besides weights and optimizer state, and small buffers."""
    versions: dict[str, int]
    """Version counters of tensors too large to copy at every step, to show whether a tensor has changed since."""
    attributes: dict[str, tuple[Any, ...]]
    """Plain attributes of modules with state-dict code of their own, to show whether that code would return more."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that a rank takes over from the ranks' own files."""

    rng: dict[str, Any] | None
    """Generator states; None if the layout of ranks has changed, because then none belongs to this rank."""
    positions: Sequence[Any] = ()
    """The dataloader's state of each data-parallel rank, in their order; empty if none was stored."""
