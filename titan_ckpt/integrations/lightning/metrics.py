"""Sums that Lightning and torchmetrics keep within an epoch: of logged values, and of the metrics of a module.

Neither is in a state dict: Lightning resets its own at an epoch's end, and a metric's states are not persistent. Owns
also what metrics set beside their states, such as the lowest value so far, and the metrics that a MetricTracker adds.
Source: lightning 2.6, pytorch/trainer/connectors/logger_connector/result.py; torchmetrics 1.9, metric.py.
"""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from titan_ckpt.components.classes import names_of
from titan_ckpt.components.unsaved_state import stored_by_code_of
from titan_ckpt.errors import ConfigError, LoadMismatchError, listed

_SETTINGS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_SUMS = ("value", "cumulated_batch_size")
_TRACKER = "wrappers.tracker.MetricTracker"
_OF_METRICS = {"_computed", "_defaults", "_persistent", "_reductions"}
"""Attributes of every metric: a cache of the result, and the tables of its states."""


def metrics_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the metrics of torchmetrics within a module, and the states of groups are those of their first members."""
    for _, collection in _of_kind(module, "collections.MetricCollection"):
        collection.values(copy_state=False)
    return _of_kind(module, "metric.Metric")


def state_of_metrics(trainer: Any) -> dict[str, Any]:
    """Return the sums of this epoch, and the metrics that callbacks and schedulers have seen last."""
    connector = trainer._logger_connector  # noqa: SLF001 - Lightning has no public name for these
    logged = trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - as above
    return {
        "seen": {name: value.detach() for name, value in trainer.callback_metrics.items()},
        "shown": {name: torch.as_tensor(value) for name, value in trainer.logged_metrics.items()},
        "first": connector._first_loop_iter,  # noqa: SLF001 - as above
        "hook": connector._current_fx,  # noqa: SLF001 - as above
        "logged": [_state_of_logged(key, metric) for key, metric in logged.items() if not metric.has_reset],
        "trackers": {name: len(tracker) for name, tracker in _of_kind(trainer.lightning_module, _TRACKER)},
        "held": {
            name: {"count": metric._update_count, "states": _states_of(metric), "beside": beside}  # noqa: SLF001 - as above
            for name, metric in metrics_of(trainer.lightning_module)
            if (beside := _beside(metric)) or metric._update_count  # noqa: SLF001 - as above
        },
    }


def hold_metrics(module: nn.Module, state: dict[str, Any]) -> None:
    """Set what the module's metrics hold. Raises: LoadMismatchError for a metric that the module lacks."""
    for name, tracker in _of_kind(module, _TRACKER):
        for added in [*tracker._modules][state["trackers"].get(name, 1) :]:  # noqa: SLF001 - its own del renames the first
            del tracker._modules[added]  # noqa: SLF001 - as above
        for _ in range(len(tracker), state["trackers"].get(name, 1)):
            tracker.increment()
    held = dict(metrics_of(module))
    if lacking := sorted(name for name in state["held"].keys() - held.keys() if state["held"][name]["count"]):
        raise LoadMismatchError(
            f"the step was saved within an epoch, with sums of the metrics {listed(lacking, ', ', ' ')}, which the "
            "module lacks: give it the same metrics, or resume a step of an epoch's end"
        )
    for name, metric in held.items():
        metric.reset()
        if name in state["held"]:
            stored = state["held"][name]
            for key, value in (stored["states"] | stored["beside"]).items():
                setattr(metric, key, _copied(value, metric.device))
            metric._update_count = stored["count"]  # noqa: SLF001 - as above


def load_metrics(trainer: Any, state: dict[str, Any]) -> None:
    """Set all of it. Raises: as hold_metrics."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop  # noqa: SLF001 - as above
    hold_metrics(trainer.lightning_module, state)
    results = loop._results  # noqa: SLF001 - as above
    results.clear()
    for stored in state["logged"]:
        results[stored["key"]] = _logged(trainer, type(results).__module__, stored)
    # not by trainer.callback_metrics, which would compute the epoch's from the sums of a part
    device = trainer.strategy.root_device
    seen, shown = ({k: v.to(device) for k, v in state[part].items()} for part in ("seen", "shown"))
    connector._callback_metrics, connector._logged_metrics = seen, shown  # noqa: SLF001 - as above
    connector._first_loop_iter, connector._current_fx = state["first"], state["hook"]  # noqa: SLF001 - as above


def _states_of(metric: Any) -> dict[str, Any]:
    values = {key: getattr(metric, key) for key in metric._defaults}  # noqa: SLF001 - as above
    return {key: [*value] if isinstance(value, list) else value for key, value in values.items()}


def _beside(metric: Any) -> dict[str, Any]:
    """Return what the metric's code sets beside its states."""
    kinds = [*type(metric).__mro__]
    kinds = kinds[: next(i for i, kind in enumerate(kinds) if kind.__module__ == "torchmetrics.metric")]
    names = {attribute.removeprefix("self.") for attribute in stored_by_code_of(kinds)} - metric._defaults.keys()  # noqa: SLF001 - as above
    return {name: vars(metric)[name] for name in sorted(names & vars(metric).keys() - _OF_METRICS)}


def _of_kind(module: nn.Module, kind: str) -> list[tuple[str, Any]]:
    """Return the parts of a module that are of a class of torchmetrics."""
    return [(name, part) for name, part in module.named_modules() if f"torchmetrics.{kind}" in names_of(type(part))]


def _copied(value: Any, device: torch.device) -> Any:
    """Return a stored state as a copy: members of a group are stored as one tensor, and each updates it in place."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), value)


def _state_of_logged(key: str, metric: Any) -> dict[str, Any]:
    """Return what `self.log` has noted under a key. Raises: ConfigError for a process group, which has no name."""
    meta = metric.meta
    if meta.sync.group is not None:
        raise ConfigError(
            [f"self.log({meta.name!r}, sync_dist_group=...): a step cannot name a process group: leave it out"]
        )
    return {
        "key": key,
        "settings": {name: getattr(meta, name) for name in (*_SETTINGS, "dataloader_idx", "metric_attribute")},
        "reduced": [meta.reduce_fx.__name__, meta.reduce_fx is getattr(builtins, meta.reduce_fx.__name__, None)],
        "synced": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": metric.is_tensor,
        "values": {name: getattr(metric, name) for name in _SUMS if metric.is_tensor and hasattr(metric, name)},
        "count": metric._update_count,  # noqa: SLF001 - as above
        "cache": metric._forward_cache,  # noqa: SLF001 - as above
    }


def _logged(trainer: Any, home: str, stored: dict[str, Any]) -> Any:
    """Return the same as an object of Lightning's. `home`: the module of its classes."""
    of_lightning = importlib.import_module(home)
    name, is_builtin = stored["reduced"]
    meta = of_lightning._Metadata(**stored["settings"], reduce_fx=getattr(builtins if is_builtin else torch, name))  # noqa: SLF001 - as above
    meta.sync = of_lightning._Sync(fn=trainer.strategy.reduce, **stored["synced"])  # noqa: SLF001 - as above
    metric = of_lightning._ResultMetric(meta, stored["is_tensor"])  # noqa: SLF001 - as above
    if not stored["is_tensor"]:
        metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    for key, value in stored["values"].items():
        setattr(metric, key, value)
    metric._update_count, metric._forward_cache = stored["count"], stored["cache"]  # noqa: SLF001 - as above
    return metric.to(trainer.strategy.root_device)
