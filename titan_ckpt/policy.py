"""Pure decisions about steps: is a save due, and which committed steps have expired. Touches no folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from titan_ckpt.config import ExportConfig, KeepConfig, SaveConfig


def is_due(step: int, save: SaveConfig | None, last_step: bool) -> bool:
    """Say whether the state after `step` optimizer steps is to be saved."""
    if save is None:
        return False
    on_interval = step > 0 and step % save.interval == 0
    return last_step or on_interval or (save.first_step and step == 1)


def due_exports(step: int, exports: Sequence[ExportConfig], last_step: bool) -> list[ExportConfig]:
    """Return which exports are to be made of the weights after `step` optimizer steps."""
    return [e for e in exports if last_step or (e.interval is not None and step > 0 and step % e.interval == 0)]


def expired_exports(steps: Sequence[int], step: int, export: ExportConfig) -> list[int]:
    """Return which exported steps to remove after the export of `step`: those of the interval up to it, but the newest.

    Later ones are of an abandoned run, from before it was rolled back: not counted, and not removed.
    """
    if export.interval is None or export.keep is None:
        return []
    return sorted(n for n in set(steps) if 0 < n <= step and n % export.interval == 0)[: -export.keep]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a rule may want to know of a committed step."""

    unix_seconds: float
    metrics: Mapping[str, float]


def expired_steps(
    steps: Sequence[int],
    keep: KeepConfig | None,
    protected: AbstractSet[int] = frozenset(),
    facts: Mapping[int, StepFacts] = MappingProxyType({}),
) -> list[int]:
    """Return the steps to remove, oldest first; call it with committed, valid steps only.

    `protected` steps stay whatever the rules say: the one resumed from, pinned ones. A rule that goes by facts keeps
    nothing among steps without them.
    """
    if keep is None:
        return []
    return sorted(set(steps) - _kept(sorted(set(steps)), keep, facts) - protected)


def _kept(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """Return the union of what each rule keeps; a step that no rule keeps has expired."""
    newest = set(ascending[-(keep.latest or 1) :])
    every = {step for step in ascending if keep.every is not None and step % keep.every == 0}
    known = [step for step in ascending if step in facts]
    return newest | every | _first_of_each_span(known, keep, facts) | _best(known, keep, facts)


def _first_of_each_span(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """A span begins with the step it keeps, so deciding again after a removal gives the same steps."""
    kept: set[int] = set()
    if keep.every_hours is None:
        return kept
    begin = -math.inf
    for step in ascending:
        if abs(facts[step].unix_seconds - begin) >= keep.every_hours * 3600:  # also where a clock was put back
            kept.add(step)
            begin = facts[step].unix_seconds
    return kept


def _best(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """Of equal values the newer step is the better one."""
    if keep.best is None:
        return set()
    sign = 1.0 if keep.mode == "min" else -1.0
    rated = [step for step in ascending if keep.metric in facts[step].metrics]
    return set(sorted(rated, key=lambda step: (sign * facts[step].metrics[keep.metric], -step))[: keep.best])
