"""Settings that a resume replaces: those of schedules, in their states and in an optimizer's groups, and of groups.

An object that is resumed goes on with the settings of its checkpoint; this module says which of this run's they
replace. Owns the names that torch's schedulers give to their settings. Restores nothing.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from titan_ckpt.errors import listed

_MOMENTA = frozenset({"momentum", "betas"})
_IN_GROUPS = frozenset({"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""Settings of schedules that torch keeps in an optimizer's groups."""
GROUP_SETTINGS = _IN_GROUPS | {"initial_lr"}
_OF_GROUPS = frozenset({"base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums"})
"""Names under which a state has a value for each group."""
_STATE_LABELS = {
    "base_lrs": "lr",
    "max_lrs": "max_lr",
    "min_lrs": "min_lr",
    "base_momentums": "base_momentum",
    "max_momentums": "max_momentum",
    "lr_lambdas": "lr_lambda",
    "total_size": "steps of a cycle",
    "step_ratio": "share of a cycle that rises",
    "_milestones": "milestones",
    "_anneal_func_type": "anneal_strategy",
    "_schedule_phases": "last steps of its phases",
}
"""Settings that a state of torch holds under another name than the constructor's argument, and how a log line calls
them. Source: torch/optim/lr_scheduler.py and torch/optim/swa_utils.py."""


def changed_settings(states: Sequence[Any]) -> frozenset[str]:
    """Return the settings of an optimizer that schedulers change, by their states; some of torch change momentum, too.

    Source: torch/optim/lr_scheduler.py, `cycle_momentum` of CyclicLR and OneCycleLR.
    """
    inner = [changed_settings(state["_schedulers"]) for state in states if _is_of_several(state)]
    cycle = any(type(state) is dict and state.get("cycle_momentum") for state in states)
    return frozenset({"lr"} if states else ()).union(_MOMENTA if cycle else (), *inner)


def kept_in_groups(states: Sequence[Any]) -> frozenset[str]:
    """Return the names under which schedulers keep settings of their own in an optimizer's groups."""
    return _IN_GROUPS | ({"initial_lr"} if any(map(_has_phases, states)) else frozenset())


def with_rate_of_start(settings: frozenset[str]) -> frozenset[str]:
    """Return settings of an optimizer's groups, and with the rate the one that torch's schedules start from."""
    return settings | {"initial_lr"} if "lr" in settings else settings


def of_other_optimizers(schedulers: Sequence[Any], optimizers: Sequence[Any]) -> list[str]:
    """Return a line for each schedule of an optimizer whose groups and parameters none of these optimizers has."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    known = {id(value) for group in groups for value in (group, *group.get("params", ()))}
    lines = []
    for i, scheduler in enumerate(schedulers):
        live = _live(scheduler)
        driven = getattr(live, "optimizer", None) if isinstance(live, LRScheduler) else None
        own = [value for group in getattr(driven, "param_groups", ()) for value in (group, *group["params"])]
        if own and known.isdisjoint(map(id, own)):
            lines.append(f"lr_schedulers[{i}] ({type(live).__name__}) sets the rates of {type(driven).__name__}")
    return lines


def _live(scheduler: Any) -> Any:
    """Return the schedule that accelerate has wrapped, or the one itself."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) else scheduler


def goes_on(component: str, lines: Sequence[str]) -> list[str]:
    """Return the warning that a component goes on with stored settings in the place of this run's, and how it does not.

    `lines`: of `differences`; without any there is no warning.
    """
    settings = f"the {component.replace('_', ' ')} goes on with the checkpoint's {listed(lines)}"
    how = f'with checkpoint.resume.exclude = ["{component}"] it starts afresh with this run\'s'
    return [f"{settings}; {how}"] if lines else []


def differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Yield a line for each of these settings that both have and whose value has changed."""
    for name in (name for name in now if name in names and name in before):
        values = before[name], now[name]
        if name in _OF_GROUPS and not all(isinstance(value, list | tuple) for value in values):
            continue  # not as torch has it
        old, new = (_shown(name, value) for value in values)
        if str(old) != str(new):  # numpy's numbers and Python's are the same settings
            yield f"{_STATE_LABELS.get(name, name)} = {old} and not {new}"


def replaced_settings(schedulers: Sequence[Any], stored: Sequence[Any], own: frozenset[str] = frozenset()) -> list[str]:
    """Return a line for each setting of a schedule that the stored state of the schedule replaces by another value.

    Settings are what torch calls so, and arguments of the constructor; a schedule that is no LRScheduler has only the
    rates from which it starts, if its state is that of one of torch. `own`: labels of settings that are left out.
    """
    lines: dict[str, None] = {}
    for scheduler, before in zip(schedulers, stored, strict=False):
        live = _live(scheduler)
        lines |= dict.fromkeys(_replaced(live, before, live.state_dict()))
    return [line for line in lines if line.partition(" = ")[0] not in own]


def _replaced(scheduler: Any, before: Any, now: Any) -> Iterator[str]:
    """Yield the lines of one schedule by its two states. `scheduler`: None inside an object that is no LRScheduler."""
    if type(before) is not dict or type(now) is not dict:
        return
    if _is_of_several(before) and _is_of_several(now):
        parts = getattr(scheduler, "_schedulers", None) or repeat(None)
        for part, old, new in zip(parts, before["_schedulers"], now["_schedulers"], strict=False):
            yield from _replaced(part, old, new)
    yield from differences(before, now, _setting_names(scheduler, now))
    if isinstance(scheduler, ReduceLROnPlateau):
        yield from _rates_of_plateau(before, now)


def _is_of_several(state: Any) -> bool:
    return type(state) is dict and isinstance(state.get("_schedulers"), list | tuple)


def _has_phases(state: Any) -> bool:
    """Return whether a scheduler is a OneCycleLR, which computes every rate from those in the groups."""
    if _is_of_several(state):
        return any(map(_has_phases, state["_schedulers"]))
    return type(state) is dict and "_schedule_phases" in state


def _setting_names(scheduler: Any, state: Mapping[str, Any]) -> set[str]:
    names = {"base_lrs"}
    if isinstance(scheduler, LRScheduler):
        names |= _STATE_LABELS.keys() | inspect.signature(type(scheduler)).parameters.keys()
    return names - {"last_epoch", *(["base_lrs"] if _has_phases(state) else [])}


def _shown(name: str, value: Any) -> Any:
    """Return a setting as a log line shows it."""
    if name == "_schedule_phases":
        return [phase.get("end_step") for phase in value if type(phase) is dict]
    if name in _OF_GROUPS:
        return ", ".join(dict.fromkeys(str(_number(each)) for each in value))
    return sorted(value.elements()) if isinstance(value, Counter) else _number(value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _rates_of_plateau(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each stored rate to which a ReduceLROnPlateau cannot have lowered the rate of a new one.

    It stores no rate that it started from.
    """
    if now["last_epoch"] or not before.keys() >= {"_last_lr", "min_lrs", "factor"}:
        return []
    rates = zip(before["_last_lr"], now["_last_lr"], before["min_lrs"], strict=False)
    return [
        f"lr = {float(old)} and not {float(new)}"
        for old, new, least in rates
        if not _is_lowered(float(new), float(old), before["factor"], least)
    ]


def _is_lowered(rate: float, to: float, factor: float, least: float) -> bool:
    while rate > to and not math.isclose(rate, to, rel_tol=1e-6):
        rate, last = max(rate * factor, least), rate
        if rate >= last:
            return False
    return math.isclose(rate, to, rel_tol=1e-6)
