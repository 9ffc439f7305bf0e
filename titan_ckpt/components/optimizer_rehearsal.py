"""A rehearsal of optimizers before the first step: whether their state can be stored, and whether it comes back.

Owns the copy of an optimizer over tiny parameters, its steps and the comparison. Live objects are only read, and the
generators are put back. An optimizer whose attributes hold more than plain data is not rehearsed, because its code may
reach live objects through them; what it keeps is checked after its first step.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from titan_ckpt.components import quantised_state
from titan_ckpt.components.optimizer import OptimizerState
from titan_ckpt.components.optimizer_content import OF_TORCH, innermost, read
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CheckpointError, StateEncodingError, listed
from titan_ckpt.geometry.chunks import info_of, local_tensor
from titan_ckpt.geometry.nested import memory_order
from titan_ckpt.rng import generators_kept
from titan_ckpt.weights.inner_tensors import is_made_of_others

logger = logging.getLogger(__name__)

_SIDE = 8
_PER_GROUP = 3
_MAX_GROUPS = 8
_MAX_NUMEL = 1 << 10
_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_COPIED = frozenset({"param_groups", "state", "step", *_TABLES})
"""`step`: schedulers put a function there that steps the live optimizer."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NEXT_STEP = (
    "Keep its state in optimizer.state, or return all of it from state_dict(), as numbers, text, tensors and "
    "containers of them; or leave the optimizer out of checkpoints: checkpoint.components"
)


def rehearse(optimizers: Sequence[Any]) -> list[str]:
    """Return a line for every optimizer whose state could not be stored or would not come back."""
    faults: dict[str, None] = {}
    with generators_kept():
        for optimizer in map(innermost, optimizers):
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            fault = _misaligned(optimizer)
            if fault is None and not type(optimizer).__module__.startswith(OF_TORCH):
                with torch.compiler.set_stance("force_eager"):
                    fault = _fault(optimizer)
            if fault is not None:
                faults[f"{name}: {fault}"] = None
    return list(faults)


def _misaligned(optimizer: Optimizer) -> str | None:
    """Return why quantised state of a sharded parameter cannot be stored."""
    if not quantised_state.quantises(optimizer):
        return None
    sharded = {
        (p.shape, p.placements): p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)
    }
    for parameter in sharded.values():
        if quantised_state.uneven(optimizer, parameter):
            return (
                f"it quantises the shards of a parameter of shape {list(parameter.shape)} on some ranks and not on "
                "others, so its state is no one tensor. Choose sizes that the ranks divide, or another optimizer"
            )
        made = optimizer._new_buffer(parameter, True)  # type: ignore[attr-defined]  # noqa: SLF001
        if is_made_of_others(made):
            try:
                quantised_state.parts(made, f"the state of a parameter of shape {list(parameter.shape)}")
            except StateEncodingError as error:
                return str(error)
    return None


def _fault(optimizer: Optimizer) -> str | None:
    """Return why the optimizer cannot be resumed; None if it can, or cannot be rehearsed."""
    try:
        read(optimizer)
    except StateEncodingError as error:
        return str(error)
    try:
        whole = _tiny(optimizer)
        _steps(whole, 1, 2, 3)
    except Exception as error:  # any error: code that needs more than tiny parameters says nothing about its state
        logger.debug("%s cannot be rehearsed: %s", type(optimizer).__qualname__, error)
        return None
    first, other = _tiny(optimizer), _tiny(optimizer)
    _steps(first, 1, 2)
    try:
        groups = OptimizerState([first], _named(first)).split()[1][0]
        if kept := _not_json(groups):
            return f"its state cannot be stored: {listed(kept)}. {_NEXT_STEP}"
        _carry_over(first, other)
        equal = _same(first, other)
        _steps(other, 3)
    except CheckpointError as error:
        return f"{error}. {_NEXT_STEP}"
    except Exception as error:
        return f"its state cannot be carried over: {type(error).__name__}: {error}. {_NEXT_STEP}"
    if equal and _same(other, whole):
        return None
    _steps(first, 3)
    if not _same(first, whole):  # its steps differ by chance, or depend on time
        return None
    return f"after a resume its steps would not be those of a run without a stop. {_NEXT_STEP}"


def _not_json(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `name: cause` of all state that typed JSON cannot hold; once if several parameters have it."""
    own = {str(name): value for group in groups for state in group["own"].values() for name, value in state.items()}
    settings = {str(name): value for group in groups for name, value in group["hyperparameters"].items()}
    every = [own, settings, *(group.get("beside", {}) for group in groups)]
    return [line for part in every for name, value in part.items() for line in typed_json.problems_of(value, name)]


def _tiny(optimizer: Optimizer) -> Optimizer:
    """Return a copy without state over a few tiny parameters.

    Raises: ValueError for an optimizer whose attributes reach more than plain data.
    """
    own = vars(optimizer)
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:  # noqa: SLF001
        raise ValueError("a global hook")
    if not {"param_groups", "state"} <= own.keys():
        raise ValueError("its groups are those of another object")
    groups = [_tiny_group(group) for group in optimizer.param_groups[:_MAX_GROUPS]]
    if strange := [name for name, value in own.items() if name not in _NOT_COPIED and not _is_plain(value)]:
        raise ValueError(f"attributes {strange}")
    made = type(optimizer).__new__(type(optimizer))
    vars(made).update({k: copy.deepcopy(v) for k, v in own.items() if k not in _NOT_COPIED})
    vars(made).update({name: OrderedDict() for name in _TABLES})
    vars(made).update(param_groups=groups, state=defaultdict(dict))
    if callable(getattr(made, "train", None)):  # schedulefree steps in this mode only
        made.train()  # type: ignore[attr-defined]
    return made


def _tiny_group(group: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if not _is_plain(rest):
        raise ValueError("a parameter group with more than plain data")
    kinds = {(p.dim(), p.dtype): p for p in group["params"]}
    torch.manual_seed(0)
    return copy.deepcopy(rest) | {"params": [_tiny_parameter(p) for p in list(kinds.values())[:_PER_GROUP]]}


def _tiny_parameter(parameter: torch.Tensor) -> nn.Parameter:
    if parameter.is_meta:
        raise ValueError("a parameter without memory")
    shape = [min(size, _SIDE) for size in parameter.shape]
    return nn.Parameter(torch.randn(shape).to(local_tensor(parameter).device, parameter.dtype))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind is torch.Tensor and value.numel() <= _MAX_NUMEL
    if kind in (dict, OrderedDict, defaultdict):
        return all(map(_is_plain, value.values()))
    return kind in _ATOMS or (kind in (list, tuple, set, frozenset) and all(map(_is_plain, value)))


def _steps(optimizer: Optimizer, *numbers: int) -> None:
    step: Any = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    given = [lambda: torch.ones((), requires_grad=True)] if needs_closure else []
    for number in numbers:
        torch.manual_seed(number)
        for parameter in _named(optimizer):
            parameter.grad = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)
        step(optimizer, *given)


def _carry_over(source: Optimizer, target: Optimizer) -> None:
    """Take state and weights over as a checkpoint does."""
    pairs = list(zip(_named(source).items(), _named(target), strict=True))
    with torch.no_grad():
        for (parameter, _), fresh in pairs:
            fresh.copy_(parameter)
    tensors, groups = OptimizerState([source], _named(source)).split()
    decoded = typed_json.loads(typed_json.dumps(groups, "optimizer"))
    state = OptimizerState([target], _named(target))
    filled, _ = state.destinations({key: info_of(value) for key, value in tensors.items()}, decoded)
    for key, value in filled.items():
        value.copy_(tensors[key])
    state.apply(filled, decoded)


def _named(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    return {p: f"p{i}" for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def _same(a: Optimizer, b: Optimizer) -> bool:
    return all(map(_equal, _named(a), _named(b))) and _equal(_stepped(a.state_dict()), _stepped(b.state_dict()))


def _stepped(state_dict: Any) -> Any:
    """Return a state dict without empty states, which mean as much as none."""
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not isinstance(state, dict):
        return state_dict
    return {**state_dict, "state": {k: v for k, v in state.items() if not isinstance(v, dict) or v}}


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values have the same types, bits and order of dims."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype is b.dtype and a.shape == b.shape and memory_order(a) == memory_order(b)
        return alike and bool(
            (a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all()
        )
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return repr(a) == repr(b)
