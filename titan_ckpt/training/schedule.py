"""The learning rate of each step as a factor of its peak. Pure; torch's LambdaLR applies it to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from titan_ckpt.encoding.named import is_import_name
from titan_ckpt.training.config import RunConfig, ScheduleConfig


def rate_factor(config: ScheduleConfig, num_steps: int) -> Callable[[int], float]:
    """Return a function from the index of an optimizer step, 0 to num_steps - 1, to its factor.

    Warm-up rises linearly and reaches 1 at its last step; its length is rounded up, so every ratio above zero has one.
    Then the factor falls to `min_ratio`, which it reaches after the last step: linearly from the end of warm-up
    (linear), along half a cosine (cosine), or linearly over the last `decay_ratio` of all steps (wsd: warm-up, stable,
    decay).
    """
    warmup = math.ceil(config.warmup_ratio * num_steps)
    decay = max(num_steps - warmup, 1)
    if config.kind == "wsd":
        decay = min(math.ceil(config.decay_ratio * num_steps), decay)

    def factor(index: int) -> float:
        if index < warmup:
            return (index + 1) / warmup
        left = min(max((num_steps - index) / max(decay, 1), 0.0), 1.0)
        return config.min_ratio + (1 - config.min_ratio) * _shape(config, left)

    return factor


def schedule_record(config: RunConfig, num_steps: int) -> dict[str, Any]:
    """Return the settings that the learning rate of a step depends on, by their keys; a checkpoint records them."""
    settings = {f"schedule.{k}": v for k, v in asdict(config.schedule).items() if v != {}}
    return {"training.steps": num_steps, **settings}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return every setting that differs, from its old value to its new one; "" if all are the same.

    A checkpoint of an earlier version records nothing, and nothing is known to have changed.
    """
    changed = (name for name in now if name in before and before[name] != now[name])
    return ", ".join(f"{name} from {before[name]} to {now[name]}" for name in changed)


def own_schedule_faults(before: Mapping[str, Any], now: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return what a schedule of one's own would go on with, although this run's settings say something different.

    `state`: the state of the scheduler after the load, which holds what it was built with. A schedule that was saved
    without a record, or by the same settings, has no faults.
    """
    if not before or not any(is_import_name(record["schedule.kind"]) for record in (before, now)):
        return []
    names = ["schedule.kind", "schedule.settings"]
    if before["training.steps"] in (state.get("steps"), state.get("total_steps")):
        names.append("training.steps")
    pairs = ((name, before.get(name, {}), now.get(name, {})) for name in names)
    return [f"{name} is {new}, and the checkpoint's schedule has {old}" for name, old, new in pairs if old != new]


def _shape(config: ScheduleConfig, left: float) -> float:
    """Return how much of the fall remains, from 1 to 0, when the share `left` of its steps remains."""
    match config.kind:
        case "constant":
            return 1.0
        case "linear" | "wsd":
            return left
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case _:
            raise AssertionError(f"{config.kind}: one's own schedule has no factor")
