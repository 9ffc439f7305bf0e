"""Optimizer state by parameter name: tensors for the tensor file, everything else in groups that typed JSON can hold.

DCP flattens hyperparameters per parameter, which costs 11 scalar blobs per AdamW parameter; here those of a group are
stored once, and also a `step` that all its parameters share. Owns the decision what is stored once per group, what is a
tensor of its own, and what cannot be stored; also when the placements of a tensor are stored, and the room that is made
by them at a load: most state has the shape and placements of its parameter, or is replicated, and then nothing is
stored. optimizer.py owns the way back.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.optim import Optimizer

from titan_ckpt.components import optimizer_content, quantized_state
from titan_ckpt.components.optimizer_content import PREFIX, OptimizerContent
from titan_ckpt.errors import LoadMismatchError, StateEncodingError
from titan_ckpt.geometry.chunks import TensorInfo, is_made_of_others, plain
from titan_ckpt.geometry.nested import Taken, address, memory_order, placeholder, take_tensors, tensors_in
from titan_ckpt.types import StateDict

Group = dict[str, Any]
"""{"classes": as `class_names` returns them, "hyperparameters": ..., "shared": 0-d state that is equal for all its
parameters, "fqns": [...], "stateless": fqns that were never stepped, "own": fqn -> name -> other state that is no
tensor, that nests tensors, or whose tensor has another order of dims in memory than its parameter or is there twice}.
The first group of an optimizer may have "beside": what belongs to no parameter."""

Groups = list[list[Group]]
"""The groups of each optimizer."""
NOT_STORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Parameters are stored by name; foreach, fused, capturable and differentiable are choices of the current run."""
_CONTAINERS = (dict, list, tuple, deque)
_ATOMS = (bool, int, float, complex, str, type(None))


class NamedOptimizers:
    """The state of any number of optimizers over disjoint parameters, addressed by fqn."""

    def __init__(self, optimizers: Sequence[Any], names: Mapping[nn.Parameter, str]) -> None:
        """Bind optimizers, or wrappers of them, to the names of their parameters.

        Raises: LoadMismatchError for a parameter without a name, or in two optimizers.
        """
        self._wrappers = list(optimizers)
        self.optimizers = [optimizer_content.innermost(optimizer) for optimizer in optimizers]
        self._names = names
        self._owners: dict[str, tuple[Optimizer, nn.Parameter]] = {}
        for optimizer in self.optimizers:
            for i, parameter in ((i, p) for group in optimizer.param_groups for i, p in enumerate(group["params"])):
                if parameter not in names:
                    raise LoadMismatchError(
                        f"parameter {i} (shape {list(parameter.shape)}) of {type(optimizer).__name__} is in no model "
                        "part: pass every module the optimizer trains in model_parts, and build the optimizer after "
                        "anything that replaces parameters"
                    )
                fqn = names[parameter]
                if fqn in self._owners:
                    raise LoadMismatchError(f"{fqn} is trained by two optimizers: give each parameter to one")
                self._owners[fqn] = optimizer, parameter

    def split(self) -> tuple[StateDict, Groups]:
        """Return (tensors by `optimizer.<fqn>.<name>`, groups with everything else).

        Tensors alias the live state, or what an optimizer's own state_dict() made.
        Raises: StateEncodingError for state that cannot be stored.
        """
        tensors: StateDict = {}
        groups: Groups = []
        for o, (wrapper, optimizer) in enumerate(zip(self._wrappers, self.optimizers, strict=True)):
            content = optimizer_content.read(optimizer)
            splitter = Splitter(optimizer, content, tensors)
            groups.append(splitter.groups(self._names))
            if beside := content.beside | optimizer_content.kept_by(wrapper):
                groups[-1][0]["beside"] = splitter.take(beside, f"{PREFIX}beside.{o}")
        return tensors, groups


class Splitter:
    """Splits one optimizer; its tensors are put into `tensors`, which aliases them."""

    def __init__(self, optimizer: Optimizer, content: OptimizerContent, tensors: StateDict) -> None:
        self._optimizer = optimizer
        self._content = content
        self._tensors = tensors
        self._repeated = _repeated(content)
        sharded = (p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor))
        self._mesh = next((parameter.device_mesh for parameter in sharded), None)

    @functools.cached_property
    def _taken(self) -> Taken:
        """Return what was taken out of state that is no plain tensor, which few optimizers have."""
        return Taken(repeated=self._repeated)

    def groups(self, names: Mapping[nn.Parameter, str]) -> list[Group]:
        """Return the groups of the optimizer with everything that is no tensor of its own."""
        live = self._optimizer.param_groups
        return [self._group(g["params"], s, names) for g, s in zip(live, self._content.groups, strict=True)]

    def take(self, value: Any, path: str) -> Any:
        """Take the tensors out of state that belongs to no parameter."""
        self._taken.layout = partial(placements_beside, mesh=self._mesh, path=path)
        return take_tensors(value, path, self._tensors, self._taken)

    def _group(
        self, parameters: Sequence[nn.Parameter], settings: Mapping[str, Any], names: Mapping[nn.Parameter, str]
    ) -> Group:
        scalars: dict[str, dict[str, Any]] = {}
        own: dict[str, dict[Any, Any]] = {}
        fqns = [names[parameter] for parameter in parameters]
        stateless = []
        for fqn, parameter in zip(fqns, parameters, strict=True):
            state = self._content.state.get(parameter)
            if not state:
                stateless.append(fqn)
                continue
            shape, order = parameter.shape, None if isinstance(parameter, DTensor) else parameter.stride()
            for name, value in state.items():
                is_named = type(name) is str and "." not in name  # it comes back as this name
                if is_named and self._is_like(shape, order, value):
                    self._tensors[f"{PREFIX}{fqn}.{name}"] = value
                elif is_named and self._is_scalar(value):
                    scalars.setdefault(name, {})[fqn] = value
                elif (rest := self._stored(fqn, name, value, parameter, is_named)) is not None:
                    own.setdefault(fqn, {})[name] = rest
        shared = {}
        for name, values in scalars.items():
            if len(values) == len(fqns) - len(stateless) and _all_equal(list(values.values())):
                shared[name] = frozen(next(iter(values.values())))
                continue
            for fqn, value in values.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[f"{PREFIX}{fqn}.{name}"] = plain(value)
                else:
                    own.setdefault(fqn, {})[name] = value
        hyperparameters = {k: frozen(v) for k, v in settings.items() if k not in NOT_STORED}
        return {
            "classes": class_names(type(self._optimizer)),
            "hyperparameters": hyperparameters,
            "shared": shared,
            "fqns": fqns,
            "stateless": stateless,
            "own": own,
        }

    def _is_like(self, shape: torch.Size, order: tuple[int, ...] | None, value: Any) -> bool:
        """Return whether this is a plain tensor like its plain parameter: a short way to what `_stored` would find."""
        return (
            type(value) is torch.Tensor
            and order is not None
            and len(shape) > 0
            and value.shape == shape
            and value.layout is torch.strided
            and value.stride() == order
            and not (self._repeated or value.requires_grad or value.is_meta)
        )

    def _is_scalar(self, value: Any) -> bool:
        """Return whether the state is a number or the like, which a group may store once for all its parameters."""
        if isinstance(value, torch.Tensor):
            return not value.dim() and not isinstance(value, DTensor) and not self._is_repeated(value)
        return not isinstance(value, _CONTAINERS)

    def _stored(self, fqn: str, name: Any, value: Any, parameter: nn.Parameter, is_named: bool) -> Any:
        """Store one entry of a parameter's state. Return what "own" holds of it; None if a tensor is all that it is."""
        path = f"{PREFIX}{fqn}.{name}"
        if isinstance(value, torch.Tensor) and not is_made_of_others(value):
            value = plain(value)
            if value.layout is not torch.strided or value.is_meta:
                kind = "a tensor without memory" if value.is_meta else f"a tensor of layout {value.layout}"
                raise StateEncodingError(f"{path}: {kind} cannot be stored as optimizer state; make it dense", path)
            is_as_new = _is_laid_out_like_new(value, parameter) and placements_unlike(parameter, value) is None
            if is_named and is_as_new and not self._is_repeated(value):
                self._tensors[path] = value  # its name and its shape are all that a load needs to make it
                return None
        self._taken.layout = partial(placements_unlike, parameter)
        if not isinstance(value, torch.Tensor):
            return take_tensors(value, path, self._tensors, self._taken)
        if is_made_of_others(value):
            return quantized_state.take(self._optimizer, value, path, self._tensors, self._taken)
        return placeholder(value, path, self._tensors, self._taken)

    def _is_repeated(self, value: torch.Tensor) -> bool:
        return bool(self._repeated) and address(value) in self._repeated


def class_names(kind: type[Optimizer]) -> list[str]:
    """Return the names of a class and of its bases that are optimizers, nearest first, without torch's Optimizer."""
    return [base.__name__ for base in kind.__mro__ if issubclass(base, Optimizer) and base is not Optimizer]


def _repeated(content: OptimizerContent) -> frozenset[int]:
    """Return the addresses that several tensors in the state of parameters have."""
    values = [value for state in content.state.values() for value in state.values()]
    if all(type(value) is torch.Tensor and value.layout is torch.strided for value in values):
        pointers = {value.data_ptr() for value in values}  # in one go, because there are many
        if len(pointers) == len(values) and 0 not in pointers:
            return frozenset()
    starts = Counter(address(tensor) for value in values for tensor in tensors_in(value))
    return frozenset(start for start, count in starts.items() if count > 1)


def _is_laid_out_like_new(value: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Return whether a new tensor for this state would have the same order of dims in memory."""
    if value.shape == parameter.shape:
        return value.stride() == parameter.stride() or memory_order(value) == memory_order(parameter)
    return memory_order(value) is None


def frozen(value: Any) -> Any:
    """Return a copy of a tensor, because optimizers and schedulers change live ones in place; return others as is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _all_equal(values: list[Any]) -> bool:
    """Return whether values have the same type and the same bits."""
    first = values[0]
    if all(isinstance(v, torch.Tensor) for v in values):
        if any(v.dtype != first.dtype for v in values):
            return False
        one_device = all(v.device == first.device for v in values)
        stacked = torch.stack([v.detach() if one_device else v.detach().cpu() for v in values])  # one transfer for all
        rows = stacked.view(torch.uint8).view(len(values), -1)  # 0.0 and -0.0 are different states, and a NaN is one
        return bool((rows == rows[0]).all())
    return type(first) in _ATOMS and all(type(v) is type(first) and repr(v) == repr(first) for v in values)


def placements_unlike(parameter: torch.Tensor, value: torch.Tensor) -> list[str] | None:
    """Return the placements of state of a parameter; None if `room_like` makes them without being told.

    A list without entries stands for a plain tensor beside a sharded parameter.
    """
    if not isinstance(value, DTensor):
        return [] if value.dim() and isinstance(parameter, DTensor) else None
    if isinstance(parameter, DTensor):
        same_shape = value.shape == parameter.shape
        expected = parameter.placements if same_shape else (Replicate(),) * parameter.device_mesh.ndim
        if value.placements == expected:
            return None
    return _texts(value)


def placements_beside(value: torch.Tensor, mesh: DeviceMesh | None, path: str) -> list[str] | None:
    """Return the placements of a tensor that belongs to no parameter.

    Raises: StateEncodingError for a tensor on another mesh than the parameters' first one.
    """
    if not isinstance(value, DTensor):
        return None
    texts = _texts(value)
    if value.device_mesh != mesh or texts is None:
        raise StateEncodingError(
            f"{path}: a sharded tensor {list(value.shape)} that is state of no parameter is not sharded as parameters "
            "are, so it cannot be stored. Keep it in the state of a parameter",
            path,
        )
    return texts


def room_like(parameter: nn.Parameter, info: TensorInfo, placements: Sequence[str] | None) -> torch.Tensor:
    """Return a tensor to fill with state of a parameter, laid out as the optimizer would make it."""
    if placements is not None:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        return room(info, parameter.device, mesh, placements)
    if info.shape == tuple(parameter.shape):
        # as optimizers do: for a float8-aware parameter zeros_like returns a plain tensor, empty_like does not
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False).detach()
    return parameter.detach().new_empty(info.shape, dtype=info.dtype)


def room(
    info: TensorInfo, device: torch.device, mesh: DeviceMesh | None, placements: Sequence[str] | None
) -> torch.Tensor:
    """Return a tensor to fill; it is replicated if its placements are those of a mesh with other axes."""
    if not placements or mesh is None:
        return torch.empty(info.shape, dtype=info.dtype, device=device)
    parsed = [Replicate() if text == "R" else Shard(int(text[1:])) for text in placements]
    if len(parsed) != mesh.ndim or any(getattr(placement, "dim", -1) >= len(info.shape) for placement in parsed):
        parsed = [Replicate()] * mesh.ndim
    return zeros(info.shape, dtype=info.dtype, device_mesh=mesh, placements=parsed)


def _texts(value: DTensor) -> list[str] | None:
    """Return placements as text; None for those that cannot be made by name."""
    if any(not isinstance(placement, Replicate) and type(placement) is not Shard for placement in value.placements):
        return None
    return [f"S{placement.dim}" if isinstance(placement, Shard) else "R" for placement in value.placements]
