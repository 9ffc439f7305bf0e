"""Pure decisions about steps: is a save due, and which committed steps have expired. Touches no folder."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from titan_ckpt.config import KeepConfig, SaveConfig


def is_due(step: int, save: SaveConfig | None, last_step: bool) -> bool:
    """Say whether the state after `step` optimizer steps is to be saved."""
    if save is None:
        return False
    on_interval = step > 0 and step % save.interval == 0
    return last_step or on_interval or (save.first_step and step == 1)


def expired_steps(
    steps: Sequence[int], keep: KeepConfig | None, protected: AbstractSet[int] = frozenset()
) -> list[int]:
    """Return the steps to remove, oldest first; call it with committed, valid steps only.

    `protected` steps stay whatever the rules say: the one resumed from, pinned ones.
    """
    if keep is None:
        return []
    return sorted(set(steps) - _kept(sorted(set(steps)), keep) - protected)


def _kept(ascending: Sequence[int], keep: KeepConfig) -> set[int]:
    """Return the union of what each rule keeps; a step that no rule keeps has expired."""
    newest = set(ascending[-(keep.latest or 1) :])
    every = {step for step in ascending if keep.every is not None and step % keep.every == 0}
    return newest | every
