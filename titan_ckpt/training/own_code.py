"""Code of one's own that a run file names as "package.module:Name": data, optimizers, schedules, callbacks.

Owns what each is called with. All names are imported before anything is built (`check_names`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset, IterDataPipe

from titan_ckpt.encoding.named import import_named, is_import_name, make_named
from titan_ckpt.errors import ConfigError, collected, refuse
from titan_ckpt.process import held_generators
from titan_ckpt.training.config import OptimizerConfig, RunConfig
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.sequences import MapDataset
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.weights.initialize import NamePattern


def check_names(config: RunConfig) -> None:
    """Import everything that the run's settings name. Raises: ConfigError listing all names that lead nowhere."""
    problems: list[str] = []
    for setting, name in _names(config):
        with collected(problems):
            import_named(name, setting)
    refuse(*problems)


def _names(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that holds a name of one's own code, with the name."""
    single = {
        "model.name": config.model.name,
        "data.dataset": config.data.dataset,
        "optimizer.name": config.optimizer.name,
        "schedule.kind": config.schedule.kind,
    }
    yield from ((setting, str(name)) for setting, name in single.items() if is_import_name(name))
    yield from ((f"model.initial_values.{p!r}.function", v["function"]) for p, v in config.model.initial_values.items())
    yield from ((f"callbacks.{i}", name) for i, name in enumerate(config.callbacks))


def make_patterns(config: RunConfig) -> list[NamePattern]:
    """Return what fills the parameters by `model.initial_values`. Raises: ConfigError for settings that do not fit."""
    made, problems = [], []
    for pattern, table in config.model.initial_values.items():
        function = import_named(table["function"], f"model.initial_values.{pattern!r}.function")
        settings = {k: v for k, v in table.items() if k != "function"}
        try:
            inspect.signature(function).bind(torch.empty(0), **settings)
        except TypeError as error:
            problems.append(f"model.initial_values.{pattern!r}: {table['function']!r}: {error}")
        made.append(NamePattern(pattern, partial(function, **settings)))
    refuse(*problems)
    return made


def make_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that `config.name` names, over `groups`, which carry their weight decay.

    Raises: ConfigError, also if it knows no weight decay and the settings ask for one.
    """
    settings = {"lr": config.lr, **config.settings}
    made = make_named(Optimizer, "optimizer.name", config.name, groups, settings=settings)
    if config.weight_decay and "weight_decay" not in made.defaults:
        raise ConfigError([f"optimizer.weight_decay: {config.name!r} has none; set it to 0.0"])
    return made


def make_scheduler(config: RunConfig, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the schedule that `schedule.kind` names; it is offered the run's number of steps. Raises: ConfigError."""
    offered = {"steps": steps, "total_steps": steps}
    settings, name = config.schedule.settings, config.schedule.kind
    return make_named(LRScheduler, "schedule.kind", name, optimizer, settings=settings, offered=offered)


def make_dataset(config: RunConfig, ranks: Ranks, tokenizer: object) -> IterableDataset[Batch]:
    """Return this rank's share of the data that `data.dataset` names. Collective if it is map-style.

    Raises: ConfigError, also for map-style data that deals itself, is not the same on every rank, or draws from a
        generator of its own, which no step holds.
    """
    data, setting = config.data, "data.dataset"
    assert data.dataset is not None, "asked for by name"
    share = {"rank": ranks.data_rank, "num_ranks": ranks.data_size}
    offered = {**share, "sequence_length": data.sequence_length, "seed": config.seed, "tokenizer": tokenizer}
    made: Any = make_named(object, setting, data.dataset, settings=data.settings, offered=offered)
    if isinstance(made, IterableDataset) and not isinstance(made, IterDataPipe):
        return made
    parameters = inspect.signature(import_named(data.dataset, setting)).parameters
    takes = {name: parameter.kind for name, parameter in parameters.items() if name not in data.settings}
    problem = ""
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        problem = f"makes a {type(made).__name__}, expected an IterableDataset, or map-style data with a length"
        problem += ", and no DataPipe" * isinstance(made, IterDataPipe)
    elif taken := {name for name, kind in takes.items() if name in share or kind is inspect.Parameter.VAR_KEYWORD}:
        named = " and ".join(f"**{name}" if name not in share else name for name in sorted(taken))
        problem = f"takes {named}, and the run deals map-style data to the ranks: leave it out"
    elif held_generators([made]):
        problem = "holds a random generator, whose state no step holds: let __getitem__ seed one, or take the process's"
    num = -1 if problem else len(made)
    if ranks.sum(torch.tensor(int(num != ranks.of_first(num)), device=ranks.device)) and not problem:
        problem = f"has {num} samples on rank {ranks.rank}, and another number on others: give every rank the same data"
    if problem:
        raise ConfigError([f"{setting}: {data.dataset!r} {problem}"])
    order: Any = {**share, "shuffle": data.shuffle, "drop_last": bool(getattr(made, "drop_last", False) == 1)}
    return MapDataset(made, config.seed, **order)
