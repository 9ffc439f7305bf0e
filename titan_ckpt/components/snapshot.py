"""The state of a run at one step, as a save takes it: now, or at a step that was marked.

Owns which tensors a step has and which of them a save must copy at once. run_state.py has the objects, and gives back.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from titan_ckpt.components.files import STATES
from titan_ckpt.components.gradients import Unused
from titan_ckpt.components.optimizer import PREFIX as OPTIMIZER
from titan_ckpt.components.optimizer_content import innermost
from titan_ckpt.components.run_state import RunState, taken_state
from titan_ckpt.errors import SaveError, listed
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import Watched
from titan_ckpt.weights.own_state import plain_attributes
from titan_ckpt.weights.stored_names import MODEL
from titan_ckpt.weights.wrapper import ModelState, require_memory

_COPIED_BYTES = 1 << 20


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
    watched: Watched = field(default_factory=lambda: Watched({}))
    """Weights and optimizer state, which must not change before they are copied or written."""

    @property
    def buffers(self) -> frozenset[str]:
        """Return the names of the model's buffers."""
        return frozenset(name for name in self.volatile if name.startswith(MODEL))

    def renamed(self, names: Mapping[str, str]) -> Snapshot:
        """Return the snapshot with some tensors under other names."""
        tensors = {names.get(name, name): value for name, value in self.tensors.items()}
        return replace(self, tensors=tensors, volatile=frozenset(names.get(name, name) for name in self.volatile))

    def frozen_tensors(self) -> StateDict:
        """Return the tensors with copies of the volatile ones; the others do not change until an optimizer steps."""
        return {name: value.clone() if name in self.volatile else value for name, value in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """A copy of the state that the next step overwrites before `optimizer.step()`."""

    step: int
    counters: Snapshot
    """The state besides weights and optimizer state, and small buffers."""
    large: dict[str, tuple[torch.Tensor, int]]
    """Tensors too large to copy at every step, each with its version counter, to show whether it has changed since."""
    trained: tuple[list[torch.Tensor], list[int], list[int], list[int]]
    """The optimizers' parameters; their version counters; the addresses of their values, or the counters of their
    shards; the version counters of the optimizers' state."""
    attributes: dict[str, tuple[Any, ...]]
    """Plain attributes of modules with state-dict code of their own, to show whether that code would return more."""
    unused: Unused
    """Gradients that no step of an optimizer had used."""


def take_snapshot(run_state: RunState, step: int, model: ModelState, *, model_only: bool = False) -> Snapshot:
    """Return the run at `step`. Tensors alias live memory; everything else has the values of this moment.

    `model_only`: the model and its extra state, nothing else.
    Raises: StateEncodingError for tensors that hold no values.
    """
    require_memory(model.tensors)
    tensors: StateDict = _named(model)
    run: dict[str, Any] = {"step": step}
    if "model" not in run_state.left_out and (extra := run_state.model.extra_state() | model.values):
        run["model"] = extra
    if model_only:
        rank, components = {"layout": run_state.layout}, ["model"]
    else:
        if (optimizer := run_state.optimizer) is not None:
            optimizer_tensors, run["optimizer"] = optimizer.split()
            tensors |= optimizer_tensors
        counters = _counters(run_state)
        run |= counters.run
        tensors |= counters.tensors
        rank, components = counters.rank, run_state.components()
    volatile = _volatile(tensors, run_state, model)
    made = frozenset(MODEL + fqn for fqn in model.made)
    watched = Watched({name: value for name, value in tensors.items() if name not in volatile})
    return Snapshot(tensors, run, rank, tuple(components), volatile, made, watched)


def large_tensors(run_state: RunState, model: ModelState) -> Snapshot:
    """Return the tensors of the model and the optimizers, as `take_snapshot` does; asks nothing else of the run."""
    optimizer = run_state.optimizer
    tensors = _named(model) | (optimizer.split()[0] if optimizer is not None else {})
    return Snapshot(tensors, {}, {}, volatile=_volatile(tensors, run_state, model))


def _volatile(tensors: Collection[str], run_state: RunState, model: ModelState) -> frozenset[str]:
    """Return the tensors that belong to no optimizer and are no parameters."""
    parameters = {MODEL + fqn for fqn in run_state.model.parameter_names().values()}
    parameters |= {MODEL + fqn for fqn in model.made_of_parameters()}
    return frozenset(n for n in tensors if not n.startswith(OPTIMIZER) and not _is_in(n, parameters))


def take_mark(run_state: RunState, step: int, unused: Unused) -> Mark:
    """Record the state that the next step changes before `optimizer.step()`, so that this step can still be saved.

    Cheap: it copies generators, counters, buffers and small state, and takes the version counters of large state.
    """
    counters = _counters(run_state)
    run = counters.run | ({"model": run_state.model.extra_state()} if run_state.has_extra_state else {})
    # State dicts may alias live state; generator states are copies already, and large.
    rank = {name: value if name == "rng" else copy.deepcopy(value) for name, value in counters.rank.items()}
    marked = Snapshot({}, copy.deepcopy(run), rank)
    volatile = counters.tensors | {MODEL + fqn: value for fqn, value in run_state.model.buffers().items()}
    large = {}
    for name, value in volatile.items():
        if value.nbytes <= _COPIED_BYTES or value.is_inference():
            marked.tensors[name] = value.clone()
        else:
            large[name] = value, value._version  # noqa: SLF001 - torch has no other name for it
    return Mark(step, marked, large, _trained(run_state), plain_attributes(run_state.model.parts), unused)


def _trained(run_state: RunState) -> tuple[list[torch.Tensor], list[int], list[int], list[int]]:
    """Return what an optimizer's step changes, as `Mark.trained` has it. Every step calls it: it makes no names."""
    optimizers = [innermost(optimizer) for optimizer in run_state.optimizers]
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    states = chain.from_iterable(s.values() for o in optimizers for s in o.state.values() if isinstance(s, dict))
    moments = [value for value in states if isinstance(value, torch.Tensor)]
    if all(type(p) is nn.Parameter for p in parameters):
        places = [p.data_ptr() for p in parameters]
    else:
        places = _versions([local_tensor(p) for p in parameters])
    return parameters, _versions(parameters), places, _versions(moments)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; those made in inference mode have none, and then none is returned."""
    try:
        return [tensor._version for tensor in tensors]  # noqa: SLF001 - torch has no other name for it
    except RuntimeError:
        return []


@contextmanager
def as_marked(run_state: RunState, mark: Mark) -> Iterator[None]:
    """Put the marked copies of buffers into the live ones, so that the model's own code returns the marked step."""
    copies = mark.counters.tensors
    pairs = [(v, copies[MODEL + fqn]) for fqn, v in run_state.model.buffers().items() if MODEL + fqn in copies]
    now = [value.clone() for value, _ in pairs]
    with torch.no_grad():
        for value, marked in pairs:
            value.copy_(marked)
        try:
            yield
        finally:
            for (value, _), own in zip(pairs, now, strict=True):
                value.copy_(own)


def snapshot_of_mark(run_state: RunState, mark: Mark, model: ModelState) -> Snapshot:
    """Return the run at a marked step, if no optimizer has stepped since. `model`: its state, read `as_marked`.

    Raises: SaveError for large state that has changed since.
    """
    now = take_snapshot(run_state, mark.step, model)
    hidden = {MODEL + fqn: value for own in model.own for fqn, value in own.hidden.items()}
    changed = [n for n, (value, version) in mark.large.items() if value._version != version]  # noqa: SLF001
    changed += [n for n, (value, _) in mark.large.items() if hidden.get(n, value) is not value]
    if (trained := _trained(run_state))[1:] != mark.trained[1:]:
        names = {id(parameter): MODEL + fqn for parameter, fqn in run_state.model.parameter_names().items()}
        pairs = zip(trained[0], zip(*trained[1:3], strict=False), zip(*mark.trained[1:3], strict=False), strict=False)
        moved = [p for p, trace, marked in pairs if trace != marked]
        changed += [names.get(id(p), "a parameter beside the model") for p in moved] or ["the optimizer's state"]
    attributes = plain_attributes(run_state.model.parts)
    within = tuple(own.prefix for own in model.own if own.made)
    changed += [n for n, marked in mark.attributes.items() if n.startswith(within) and attributes.get(n) != marked]
    if changed:
        raise SaveError(f"step {mark.step} can no longer be saved: {listed(changed, ', ', ' ')} changed after its end")
    marked = mark.counters.tensors | {name: value for name, (value, _) in mark.large.items()}
    stored = now.tensors.keys() - now.made
    tensors = {name: value for name, value in now.tensors.items() if not name.startswith(STATES)}
    tensors |= {name: value for name, value in marked.items() if name in stored or name.startswith(STATES)}
    run = now.run | mark.counters.run
    if "model" in now.run:
        run["model"] = now.run["model"] | mark.counters.run.get("model", {})
    volatile = now.volatile | (marked.keys() & tensors.keys())
    return Snapshot(tensors, run, mark.counters.rank, now.components, volatile, now.made, now.watched)


def _counters(run_state: RunState) -> Snapshot:
    """Return state besides weights and optimizer state; generators last, because the others may use them."""
    run: dict[str, Any] = {}
    rank: dict[str, Any] = {}
    tensors: StateDict = {}
    if run_state.lr_schedulers:
        run["lr_scheduler"] = [s.state_dict() for s in run_state.lr_schedulers]
    if run_state.dataloader is not None:
        rank["data_parallel"] = [run_state.data_rank.rank, run_state.data_rank.size]
        rank["dataloader"] = run_state.dataloader.state_dict()
    if run_state.states:
        run["states"] = {name: taken_state(name, state, tensors) for name, state in run_state.states.items()}
    rank["layout"] = run_state.layout
    if "rng" not in run_state.left_out:
        rank["rng"] = run_state.rng.state_dict()
    return Snapshot(tensors, run, rank)


def _named(model: ModelState) -> StateDict:
    return {MODEL + fqn: value for fqn, value in model.tensors.items()}


def _is_in(name: str, parameters: Collection[str]) -> bool:
    """Return whether a tensor is one of these parameters, or inside of one."""
    while name not in parameters:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True
