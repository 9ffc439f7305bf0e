"""The content of one optimizer: state of its parameters, settings of its groups, and everything beside them.

Owns the two ways to read and to write it. An optimizer with torch's own `state_dict` is read and written directly, so
that no dtype is cast and tensors alias live memory. An optimizer that overrides `state_dict` or `load_state_dict`, or
has hooks on them, is asked for its state and given it back by its own methods. Knows no names of parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from titan_ckpt.errors import LoadMismatchError, StateEncodingError, counted
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.geometry.nested import DICTS

_WRAPPERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "schedulefree.wrap_schedulefree")
"""Modules of wrappers whose state dict is that of the optimizer inside; other wrappers speak for themselves."""

PREFIX = "optimizer."
"""Begins the names of an optimizer's tensors in files."""

PROVED = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.LBFGS,
    optim.Muon, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
})  # fmt: skip
"""Classes that change weights in `step` alone; a test calls all their other methods."""

State = Mapping[nn.Parameter, Mapping[Any, Any]]
_METHODS = ("state_dict", "load_state_dict")
_HOOKS = tuple(f"_optimizer_{method}_{when}_hooks" for method in _METHODS for when in ("pre", "post"))
OF_TORCH = ("torch.optim.", "torchao.optim.")
"""Modules of optimizers that tests/zoo proves; their `__setstate__` only completes the state of older releases."""


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """The content of one optimizer, as it is read or to be given back."""

    state: State
    """State of each parameter that was stepped."""
    groups: Sequence[Mapping[str, Any]]
    """Settings of each parameter group; "params" does not count."""
    beside: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """State that belongs to no parameter: "state": entries of `optimizer.state` under other keys; "state_dict": further
    entries of its state dict; "wrapper": what an object around the optimizer keeps."""


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer inside wrappers that are known to keep no state of their own.

    Raises: LoadMismatchError for an object that is no optimizer and wraps none.
    """
    optimizer = [*_layers(optimizer)][-1]
    if isinstance(optimizer, Optimizer) and hasattr(optimizer, "state"):
        return optimizer
    raise LoadMismatchError(
        f"{type(optimizer).__qualname__} has no state and groups as a torch.optim.Optimizer has: pass the "
        "optimizer that it wraps in optimizers, and what it keeps itself, if it has state_dict and load_state_dict, "
        "in states"
    )


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and, outermost first, those inside of it."""
    while optimizer is not None:
        yield optimizer
        is_wrapper = any(kind.__module__.startswith(_WRAPPERS) for kind in type(optimizer).__mro__)
        optimizer = (getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)) if is_wrapper else None


def switches(optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers whose `eval` turns the weights of training into those of evaluation (schedulefree's).

    accelerate's wrapper has an `eval` for every optimizer.
    """
    layers = [layer for optimizer in optimizers for layer in _layers(optimizer)]
    own = [layer for layer in layers if not type(layer).__module__.startswith("accelerate.")]
    return [layer for layer in own if callable(getattr(layer, "eval", None))]


def steppers(optimizers: Sequence[Any]) -> list[Optimizer] | None:
    """Return the optimizers whose step hooks run before any weight changes, one for each; None if one has no such hook.

    A wrapper that is no optimizer itself may change weights before it calls the optimizer inside (schedulefree's does).
    """
    inner = [innermost(optimizer) for optimizer in optimizers if isinstance(optimizer, Optimizer)]
    hookable = [optimizer for optimizer in inner if hasattr(optimizer, "_optimizer_step_pre_hooks")]
    return hookable if len(hookable) == len(optimizers) else None


def kept_by(wrapper: Any) -> dict[str, dict[Any, Any]]:
    """Return what schedulefree's wrapper keeps beside the optimizer: whether its weights are those of training."""
    has_mode = not isinstance(wrapper, Optimizer) and hasattr(wrapper, "train_mode")
    return {"wrapper": {"train_mode": wrapper.train_mode}} if has_mode else {}


def speaks_for_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own `state_dict` differs, or may differ, from that of torch."""
    kind = type(optimizer)
    overrides = any(m in vars(optimizer) or getattr(kind, m) is not getattr(Optimizer, m) for m in _METHODS)
    return overrides or any(getattr(optimizer, hooks, None) for hooks in _HOOKS)


def read(optimizer: Optimizer) -> OptimizerContent:
    """Return the content of an optimizer; tensors alias what it holds or what its `state_dict` made.

    Raises: StateEncodingError for state of a tensor that is in none of its groups; what its `state_dict` raises.
    """
    if not speaks_for_itself(optimizer):
        return _read_directly(optimizer)
    try:
        own = optimizer.state_dict()
    except Exception as error:
        raise StateEncodingError(
            f"{type(optimizer).__qualname__}.state_dict() fails, so it cannot be saved: {type(error).__name__}: "
            f"{error} Take an optimizer that returns its state on every rank, such as one over parameters that "
            "fully_shard() has sharded"
        ) from error
    order = [*_numbers(optimizer)]
    groups: Any = own.get("param_groups") if type(own) in DICTS else None
    if not _lists(groups, optimizer) or type(own.get("state")) not in DICTS:
        return OptimizerContent({}, [{} for _ in optimizer.param_groups], {"state_dict": {"": own}})
    state = own["state"]
    keyed = {i for i, value in state.items() if type(i) is int and i < len(order) and type(value) in DICTS}
    beside = {
        "state": {key: value for key, value in state.items() if key not in keyed},
        "state_dict": {key: value for key, value in own.items() if key not in ("state", "param_groups")},
    }
    of_parameters = {order[i]: state[i] for i in sorted(keyed)}
    return OptimizerContent(of_parameters, groups, {name: part for name, part in beside.items() if part})


def _read_directly(optimizer: Optimizer) -> OptimizerContent:
    parameters = {*parameters_of(optimizer)}
    live: dict[Any, Any] = optimizer.state
    others = {key: value for key, value in live.items() if key not in parameters}
    if lost := [key for key in others if isinstance(key, torch.Tensor)]:
        raise StateEncodingError(
            f"{type(optimizer).__qualname__} has state of {counted(len(lost), 'tensor')} in none of its parameter "
            f"groups, such as one of shape {list(lost[0].shape)}. Delete it from optimizer.state, or give them a group"
        )
    state = {p: live[p] for p in live if p in parameters} if others else live
    if strange := [own for own in state.values() if own and type(own) not in DICTS]:
        raise StateEncodingError(
            f"{type(optimizer).__qualname__} keeps a {type(strange[0]).__qualname__} as the state of a parameter; "
            "only a dict can be stored"
        )
    return OptimizerContent(state, optimizer.param_groups, {"state": others} if others else {})


def give(optimizer: Optimizer, content: OptimizerContent) -> None:
    """Give an optimizer its content. Groups have their settings, without "params".

    Raises: LoadMismatchError if its own `load_state_dict` does not take the content.
    """
    if not speaks_for_itself(optimizer):
        _give_directly(optimizer, content)
        return
    beside = content.beside.get("state_dict", {})
    index = _numbers(optimizer)
    state: dict[Any, Any] = {index[p]: dict(own) for p, own in content.state.items()}
    pairs = zip(content.groups, optimizer.param_groups, strict=True)
    numbered = [{**group, "params": [index[p] for p in live["params"]]} for group, live in pairs]
    whole = {"state": state | content.beside.get("state", {}), "param_groups": numbered} | beside
    give_state(optimizer, beside.get("", whole), "optimizer")
    for parameter, own in content.state.items():
        live: Any = optimizer.state.get(parameter)
        for key in live.keys() & own.keys() if type(live) in DICTS else ():
            live[key] = _uncast(own[key], live[key])


def give_state(value: Any, state: Any, component: str) -> None:
    """Give an object of a component its state. Raises: LoadMismatchError if it does not take that."""
    try:
        value.load_state_dict(state)
    except Exception as error:
        raise LoadMismatchError(
            f"{type(value).__qualname__}.load_state_dict() does not take the state that was stored: "
            f"{type(error).__name__}: {error}. Build the {component.rpartition('_')[2]} as in the run that saved, or "
            f'start it afresh: checkpoint.resume.exclude = ["{component}"]'
        ) from error


def _give_directly(optimizer: Optimizer, content: OptimizerContent) -> None:
    for group, live in zip(content.groups, optimizer.param_groups, strict=True):
        live.update(group)
    others = content.beside.get("state", {})
    parameters = {*parameters_of(optimizer)}
    state: dict[Any, Any] = optimizer.state
    for key in [k for k in state if (k not in content.state if k in parameters else k not in others)]:
        del state[key]
    state.update({parameter: dict(own) for parameter, own in content.state.items()})
    state.update(others)
    owner = next(kind for kind in type(optimizer).__mro__ if "__setstate__" in vars(kind))
    if not owner.__module__.startswith(OF_TORCH):  # it may derive attributes from the state, as after torch's own load
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups; every step asks for them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _numbers(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the number by which torch's `state_dict` calls each parameter."""
    return {parameter: i for i, parameter in enumerate(dict.fromkeys(parameters_of(optimizer)))}


def _lists(groups: Any, optimizer: Optimizer) -> bool:
    """Return whether these are the live groups with numbers for parameters, as torch's `state_dict` lists them."""
    index = _numbers(optimizer)
    numbers = [[index[p] for p in group["params"]] for group in optimizer.param_groups]
    return type(groups) is list and [g.get("params") if type(g) is dict else None for g in groups] == numbers


def _uncast(given: Any, loaded: Any) -> Any:
    """Return the given value if the loaded one is what torch's `load_state_dict` makes of it, else the loaded one.

    It casts state to the dtype of the parameter, turns text into other text and drops the length of a deque.
    Source: torch/optim/optimizer.py, load_state_dict, `_cast`.
    """
    if isinstance(given, torch.Tensor) and isinstance(loaded, torch.Tensor):
        same = given.shape == loaded.shape and given.dtype is not loaded.dtype
        cast = same and torch.equal(local_tensor(given).to(loaded.dtype), local_tensor(loaded).to(given.device))
        return given.to(loaded.device) if cast else loaded
    if isinstance(given, str) and isinstance(loaded, str):
        return given
    if isinstance(given, deque) and isinstance(loaded, deque) and len(given) == len(loaded):
        return deque(map(_uncast, given, loaded), given.maxlen)
    if type(given) in (list, tuple) and type(loaded) is type(given) and len(given) == len(loaded):
        return type(given)(map(_uncast, given, loaded))
    if type(given) in DICTS and type(loaded) is dict and given.keys() == loaded.keys():
        return {key: _uncast(given[key], loaded[key]) for key in given}
    return loaded
