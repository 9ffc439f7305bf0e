"""A rehearsal of optimizers before the first step: whether their state can be stored, and whether it comes back.

Owns the copy of an optimizer over tiny parameters, its steps and the comparison. Live objects are only read; the caller
puts generators back. An optimizer whose attributes hold more than plain data and other optimizers is not rehearsed,
because its code may reach live objects through them: unsaved_state.py looks at its code and attributes instead, and
what it keeps in its state is checked after its first step. Attributes that the rehearsal has not changed are watched.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from titan_ckpt.components import quantized_state
from titan_ckpt.components.classes import class_name
from titan_ckpt.components.optimizer import OptimizerState
from titan_ckpt.components.optimizer_content import OF_TORCH, innermost, read, speaks_for_itself
from titan_ckpt.components.unsaved_state import faults, stored_by_code_of, unless_allowed
from titan_ckpt.components.watched import ATOMS, Watch
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CheckpointError, StateEncodingError, listed
from titan_ckpt.geometry.chunks import info_of, is_made_of_others, local_tensor
from titan_ckpt.geometry.nested import DICTS, memory_order
from titan_ckpt.process import generators_kept
from titan_ckpt.weights.live_memory import is_same

logger = logging.getLogger(__name__)

_SIDE = 8
_PER_GROUP = 3
_FEW = 32
"""A group of so many parameters is copied whole, because attributes may have a value for each."""
_MAX_GROUPS = 8
_FIRST, _LAST = 2, 12
"""Steps before the state is taken over for the first time, and of a whole rehearsal: some optimizers do something in
their first few steps alone, and some at every tenth."""
_MAX_NUMEL = 1 << 10
_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_COPIED = frozenset({"param_groups", "state", "step", *_TABLES})
"""`step`: schedulers put a function there that steps the live optimizer."""
_OF_EVERY = frozenset({"defaults", *_NOT_COPIED})
"""Attributes that every optimizer has, and that its steps do not use."""
_NEXT_STEP = (
    "Keep its state in optimizer.state, or return all of it from state_dict(), as numbers, text, tensors and "
    "containers of them; or leave the optimizer out of checkpoints: checkpoint.components"
)


def rehearse(
    optimizers: Sequence[Any], live: Sequence[nn.Module], allow: Collection[str], watch: Watch
) -> Iterator[str]:
    """Yield a line for every optimizer whose state could not be stored, or is not known to come back.

    Those of torch and torchao are proved, but for shards that torchao's quantize unevenly. `live`: the modules that
    they train. `allow`: full names of classes that may lose what they keep in attributes. `watch`: notes the attributes
    that these steps have not changed, and later ones might.
    """
    for optimizer in map(innermost, optimizers):
        name = class_name(optimizer)
        if (fault := _misaligned(optimizer)) is not None:
            yield f"{name}: {fault}"
        elif not name.startswith(OF_TORCH):
            with torch.compiler.set_stance("force_eager"):
                lines = [*_faults(optimizer, live, allow, watch)]
            yield from lines


def _misaligned(optimizer: Optimizer) -> str | None:
    """Return why quantized state of a sharded parameter cannot be stored."""
    if not quantized_state.quantizes(optimizer):
        return None
    sharded = {
        (p.shape, p.placements): p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)
    }
    for parameter in sharded.values():
        if quantized_state.uneven(optimizer, parameter):
            return (
                f"it quantizes the shards of a parameter of shape {list(parameter.shape)} on some ranks and not on "
                "others, so its state is no one tensor. Choose sizes that the ranks divide, or another optimizer"
            )
        made = optimizer._new_buffer(parameter, True)  # type: ignore[attr-defined]  # noqa: SLF001
        if is_made_of_others(made):
            try:
                quantized_state.parts(made, f"the state of a parameter of shape {list(parameter.shape)}")
            except StateEncodingError as error:
                return str(error)
    return None


def _faults(optimizer: Optimizer, live: Sequence[nn.Module], allow: Collection[str], watch: Watch) -> Iterator[str]:
    """Yield why an optimizer cannot be resumed: what its state dict leaves out or cannot give, as far as is known.

    A tiny copy is stepped, and others take its state over, early and late, and go on with it. If an optimizer cannot be
    rehearsed and has no state dict of its own, all attributes count that its code sets.
    """
    kinds, what = type(optimizer).__mro__, class_name(optimizer)
    try:
        read(optimizer)
    except StateEncodingError as error:
        yield f"{what}: {error}"
        return
    if (whole := _stepped_twin(optimizer)) is None:
        held = [("optimizer", optimizer)]
        yield from faults(held, None, allow, live=live, gives_state=speaks_for_itself, watch=watch)
        return
    first, fresh = _tiny(optimizer), _tiny(optimizer)
    _steps(first, 1, taken := _FIRST)
    constant = [name for name, value in _kept(whole).items() if _equal(value, _kept(fresh).get(name))]
    fault, is_equal, lost = None, True, list[str]()
    try:
        for last in (_LAST - 1, _LAST):  # each time another copy takes over
            if kept := _not_json(OptimizerState([first], _named(first)).split()[1][0]):
                raise StateEncodingError(f"its state cannot be stored: {listed(kept)}")
            _carry_over(first, other := _tiny(optimizer))
            is_equal, lost = is_equal and _same(first, other), _differing(first, other)
            for number in range(taken + 1, last + 1):
                _steps(first, number)
                _steps(other, number)
            taken, is_equal = last, is_equal and _same(first, other)
            lost = [name for name in _differing(first, other) if name in lost]  # not what each step sets before its use
    except CheckpointError as error:
        fault = f"{error}"
    except Exception as error:
        fault = f"its state cannot be carried over: {type(error).__name__}: {error}"
    if fault is not None:
        yield f"{what}: {fault}. {_NEXT_STEP}"
        return
    of_torch = {*stored_by_code_of(kind for kind in kinds if kind.__module__.startswith(OF_TORCH))}
    if lost := [f"self.{name}" for name in lost if f"self.{name}" not in of_torch]:
        reason = f"its steps change {listed(lost, ', ', ' ')}, and its state_dict() leaves that out. {_NEXT_STEP}"
        yield from unless_allowed(what, what, reason, allow)
    elif what not in allow:
        if not is_equal and _same(first, whole):  # else its steps differ by chance, or depend on time
            yield f"{what}: after a resume its steps would not be those of a run without a stop. {_NEXT_STEP}"
        names = [name for name in constant if f"self.{name}" not in of_torch]
        trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

        def values() -> dict[str, Any]:
            return {f"self.{name}": vars(optimizer).get(name) for name in names}

        watch.add(optimizer, what, what, values, trained, partial(_comes_back, optimizer, fresh))


def _differing(one: Optimizer, other: Optimizer) -> list[str]:
    """Return the attributes that differ."""
    theirs = _kept(other)
    return [name for name, value in _kept(one).items() if not _equal(value, theirs.get(name))]


def _comes_back(optimizer: Optimizer, fresh: Optimizer, name: str) -> bool:
    """Return whether the state dict of an optimizer holds an attribute. `fresh`: a tiny copy from before its change."""
    with generators_kept(), torch.compiler.set_stance("force_eager"):
        try:
            now = _tiny(optimizer)
            _steps(now, 1)
            _carry_over(now, fresh)
        except Exception:  # any error of its code: it does not come back
            return False
    return name.removeprefix("self.") not in _differing(now, fresh)


def _stepped_twin(optimizer: Optimizer) -> Optimizer | None:
    """Return a tiny copy after the last step; None if the optimizer cannot be rehearsed."""
    try:
        twin = _tiny(optimizer)
        _steps(twin, *range(1, _LAST + 1))
    except Exception as error:  # any error: code that needs more than tiny parameters says nothing about its state
        logger.debug("%s cannot be rehearsed: %s", type(optimizer).__qualname__, error)
        return None
    return twin


def _kept(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer beside those that every one has."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY}


def _not_json(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `name: cause` of all state that typed JSON cannot hold; once if several parameters have it."""
    own = {str(name): value for group in groups for state in group["own"].values() for name, value in state.items()}
    settings = {str(name): value for group in groups for name, value in group["hyperparameters"].items()}
    every = [own, settings, *(group.get("beside", {}) for group in groups)]
    return [line for part in every for name, value in part.items() for line in typed_json.problems_of(value, name)]


def _tiny(optimizer: Optimizer) -> Optimizer:
    """Return a copy without state over a few tiny parameters, with copies of the optimizers that it holds.

    Raises: ValueError for an optimizer whose attributes reach more than plain data.
    """
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:  # noqa: SLF001
        raise ValueError("a global hook")
    torch.manual_seed(0)
    made: Optimizer = _Twins(optimizer).of(optimizer)
    return made


class _Twins:
    """Copies of an optimizer and of what its attributes hold; one object stays one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._made: dict[int, Any] = {}
        self._shapes = {p.shape for group in optimizer.param_groups for p in group["params"]}

    def of(self, value: Any) -> Any:
        """Return the copy of a value. Raises: ValueError for more than plain data and optimizers."""
        if id(value) not in self._made:
            kind = type(value)
            if isinstance(value, Optimizer):
                self._optimizer(value)
            elif isinstance(value, torch.Tensor):
                self._made[id(value)] = self._tensor(value)
            elif kind in DICTS:
                self._made[id(value)] = made = copy.copy(value)
                made.clear()
                made.update({self._made.get(id(k), k): self.of(v) for k, v in value.items() if self._is_here(k)})
            elif kind is list:
                self._made[id(value)] = made = []
                made += [self.of(item) for item in value if self._is_here(item)]
            elif kind in (tuple, set, frozenset):
                self._made[id(value)] = kind(map(self.of, value))
            elif kind in ATOMS:
                return value
            else:
                raise ValueError(f"a {kind.__qualname__}")
        return self._made[id(value)]

    def _is_here(self, value: Any) -> bool:
        """Return whether a value is no parameter that has no copy."""
        return not isinstance(value, nn.Parameter) or id(value) in self._made

    def _optimizer(self, value: Optimizer) -> None:
        own = vars(value)
        if not {"param_groups", "state"} <= own.keys():
            raise ValueError("its groups are those of another object")
        self._made[id(value)] = made = type(value).__new__(type(value))
        if id(value.param_groups) not in self._made:
            self._made[id(value.param_groups)] = [self._group(group) for group in value.param_groups[:_MAX_GROUPS]]
        vars(made).update({name: OrderedDict() for name in _TABLES})
        vars(made).update(param_groups=self._made[id(value.param_groups)], state=defaultdict(dict))
        vars(made).update({name: self.of(item) for name, item in own.items() if name not in _NOT_COPIED})
        if callable(getattr(made, "train", None)):  # schedulefree steps in this mode only
            made.train()  # type: ignore[attr-defined]

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) not in self._made:
            kinds = {(p.dim(), p.dtype): p for p in group["params"]}
            few = group["params"] if len(group["params"]) <= _FEW else [*kinds.values()][:_PER_GROUP]
            for parameter in few:
                if id(parameter) not in self._made:
                    self._made[id(parameter)] = _tiny_parameter(parameter)
            rest = {name: self.of(value) for name, value in group.items() if name not in ("params", "param_names")}
            self._made[id(group)] = rest | {"params": [self._made[id(parameter)] for parameter in few]}
        return self._made[id(group)]  # type: ignore[no-any-return]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if type(value) is not torch.Tensor or (value.numel() > _MAX_NUMEL and value.shape not in self._shapes):
            raise ValueError(f"a tensor {list(value.shape)}")
        part = value[tuple(slice(_SIDE) for _ in value.shape)] if value.shape in self._shapes else value
        return part.detach().clone()


def _tiny_parameter(parameter: torch.Tensor) -> nn.Parameter:
    if parameter.is_meta:
        raise ValueError("a parameter without memory")
    shape = [min(size, _SIDE) for size in parameter.shape]
    return nn.Parameter(torch.randn(shape).to(local_tensor(parameter).device, parameter.dtype))


def _steps(optimizer: Optimizer, *numbers: int) -> None:
    step: Any = type(optimizer).step
    takes = inspect.signature(step).parameters
    for number in numbers:
        torch.manual_seed(number)
        for parameter in _named(optimizer):
            parameter.grad = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)
        try:
            step(optimizer)
        except Exception:
            if "closure" not in takes:
                raise
            step(optimizer, partial(_loss, optimizer))  # an optimizer such as SAM needs it although it is optional


def _loss(optimizer: Optimizer) -> torch.Tensor:
    """Return a loss of the tiny weights, and set its gradients: a closure."""
    with torch.enable_grad():
        for parameter in _named(optimizer):
            parameter.grad = None
        loss = torch.stack([parameter.float().square().sum() for parameter in _named(optimizer)]).sum()
        loss.backward()
    return loss.detach()


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


def _content(optimizer: Optimizer) -> list[Any]:
    """Return the attributes of an optimizer that another one holds, its state, and the settings of its groups."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [_kept(optimizer), [dict(optimizer.state.get(p, {})) for p in _named(optimizer)], settings]


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
        return memory_order(a) == memory_order(b) and is_same(a, b)
    if isinstance(a, Optimizer):
        return _equal(_content(a), _content(b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return repr(a) == repr(b)
