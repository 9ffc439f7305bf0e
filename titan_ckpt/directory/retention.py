"""Pure decision which committed steps have expired; touches no folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from titan_ckpt.config import KeepConfig


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Data of a committed step that the rules use."""

    unix_seconds: float
    metrics: Mapping[str, float]


def expired_steps(
    steps: Sequence[int],
    keep: KeepConfig | None,
    protected: AbstractSet[int] = frozenset(),
    facts: Mapping[int, StepFacts] = MappingProxyType({}),
) -> list[int]:
    """Return the steps to remove, oldest first; `steps` are committed, valid steps.

    `protected` steps, such as pinned ones and the one resumed from, always stay. A rule that uses `facts` keeps no step
    that has none, but all steps stay until one has the metric of `keep.best`.
    """
    if keep is None:
        return []
    return sorted(set(steps) - _kept(sorted(set(steps)), keep, facts) - protected)


def _kept(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """Return the union of the steps that each rule keeps; the others have expired."""
    newest = set(ascending[-(keep.latest or 1) :])
    every = {step for step in ascending if keep.every_steps is not None and step % keep.every_steps == 0}
    known = [step for step in ascending if step in facts]
    if lacks_metric(keep, [facts[step] for step in known]):
        return set(ascending)
    return newest | every | _first_of_each_span(known, keep, facts) | _best(known, keep, facts)


def lacks_metric(keep: KeepConfig, facts: Iterable[StepFacts]) -> bool:
    """Return whether no step has the metric that decides which are the best: it may come, or be misspelled."""
    return keep.best is not None and all(keep.metric_name not in of_step.metrics for of_step in facts)


def _first_of_each_span(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """Return the first step of each span of so many hours as `every` says.

    A span starts with the step that is kept, so that a second decision after the removal keeps the same steps.
    """
    kept: set[int] = set()
    if keep.every_seconds is None:
        return kept
    start = -math.inf
    for step in ascending:
        if abs(facts[step].unix_seconds - start) >= keep.every_seconds:  # abs: a clock may have been put back
            kept.add(step)
            start = facts[step].unix_seconds
    return kept


def _best(ascending: Sequence[int], keep: KeepConfig, facts: Mapping[int, StepFacts]) -> set[int]:
    """Return the best steps by `keep.metric`; of equal values, the newer step is better."""
    if keep.best is None:
        return set()
    name, sign = keep.metric_name, -1.0 if keep.metric.startswith("max:") else 1.0
    rated = [step for step in ascending if name in facts[step].metrics]
    return set(sorted(rated, key=lambda step: (sign * facts[step].metrics[name], -step))[: keep.best])
