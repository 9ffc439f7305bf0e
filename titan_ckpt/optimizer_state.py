"""Optimizer state by parameter name: tensors for the tensor file, everything else once per parameter group.

Owns the flattening and its inverse. Knows no files. Per-parameter flattening of hyperparameters, as DCP does it, costs
11 scalar blobs per AdamW parameter; a group's are stored once here, and so is a `step` that all its parameters share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.tensors import TensorInfo, info_of
from titan_ckpt.types import StateDict

PREFIX = "optimizer."
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How this run computes a step, not what: kept as this run chose."""


class OptimizerState:
    """The state of any number of optimizers over disjoint parameters, addressed by fqn."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        """Bind optimizers to the names of their parameters. Raises: LoadMismatchError for a nameless parameter."""
        self.optimizers = list(optimizers)
        self._names = names
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for i, parameter in enumerate(group["params"]):
                    if parameter not in names:
                        raise LoadMismatchError(
                            f"parameter {i} (shape {list(parameter.shape)}) of {type(optimizer).__name__} is in no "
                            "model part: pass every module the optimizer trains in model_parts"
                        )

    def split(self) -> tuple[StateDict, list[list[dict[str, Any]]]]:
        """Return (tensors by `optimizer.<fqn>.<name>`, per optimizer a list of groups of everything else).

        A 0-d value that all parameters of a group share goes to the group's `shared`; one that differs stays a tensor.
        Tensors alias the live state.
        """
        tensors: StateDict = {}
        groups: list[list[dict[str, Any]]] = []
        for optimizer in self.optimizers:
            described = []
            for group in optimizer.param_groups:
                scalars: dict[str, dict[str, Any]] = {}
                for parameter in group["params"]:
                    fqn = self._names[parameter]
                    for name, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor) and value.dim():
                            tensors[f"{PREFIX}{fqn}.{name}"] = value.detach()
                        else:
                            scalars.setdefault(name, {})[fqn] = value
                shared = {}
                for name, values in scalars.items():
                    if _all_equal(list(values.values())):
                        shared[name] = next(iter(values.values()))
                    else:
                        tensors.update({f"{PREFIX}{fqn}.{name}": torch.as_tensor(v) for fqn, v in values.items()})
                described.append(
                    {
                        "hyperparameters": {k: v for k, v in group.items() if k != "params"},
                        "shared": {
                            n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in shared.items()
                        },
                        "fqns": [self._names[p] for p in group["params"]],
                    }
                )
            groups.append(described)
        return tensors, groups

    def destinations(self, available: Mapping[str, TensorInfo]) -> StateDict:
        """Return a tensor to fill for every stored one, live where it exists with that shape and dtype, else new.

        A new one is laid out like its parameter. Nothing is attached to an optimizer until `apply`.
        Raises: LoadMismatchError for state of a parameter that no optimizer here trains.
        """
        owners = {self._names[p]: (o, p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        out: StateDict = {}
        strangers, misfits = [], []
        for key, info in available.items():
            fqn, name = key.removeprefix(PREFIX).rsplit(".", 1)
            if fqn not in owners:
                strangers.append(fqn)
                continue
            optimizer, parameter = owners[fqn]
            live = optimizer.state.get(parameter, {}).get(name)
            if isinstance(live, torch.Tensor) and info_of(live) == info:
                out[key] = live.detach()
            elif info.shape == tuple(parameter.shape):
                out[key] = torch.empty_like(parameter, dtype=info.dtype, requires_grad=False).detach()
            elif isinstance(parameter, DTensor) and info.shape:
                misfits.append(f"{key}: {info} for a parameter of {list(parameter.shape)}")
            else:
                out[key] = torch.empty(info.shape, dtype=info.dtype, device=parameter.device if info.shape else "cpu")
        problems = []
        if strangers:
            unique = sorted(set(strangers))
            problems.append(f"{len(unique)} trained there and not here: {', '.join(unique[:8])}")
        if misfits:
            problems.append(f"{len(misfits)} of a shape that cannot be placed: {'; '.join(misfits[:8])}")
        if problems:
            raise LoadMismatchError(
                "optimizer state does not fit this run's parameters: "
                + "; ".join(problems)
                + ". Train the same parameters, or start the optimizer afresh: "
                'checkpoint.resume.exclude = ["optimizer"]'
            )
        return out

    def apply(self, tensors: StateDict, groups: list[list[dict[str, Any]]]) -> None:
        """Attach filled tensors, shared scalars and hyperparameters to the optimizers.

        A group finds its stored one by the parameters they share, then by position.
        Raises: LoadMismatchError where the numbers of optimizers or groups differ; nothing is changed then.
        """
        here = [len(o.param_groups) for o in self.optimizers]
        there = [len(g) for g in groups]
        if here != there:
            raise LoadMismatchError(
                f"the checkpoint has {len(there)} optimizer(s) with {there} parameter groups, this run {len(here)} "
                f'with {here}: build the same groups, or use checkpoint.resume.exclude = ["optimizer"]'
            )
        by_fqn: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            fqn, name = key.removeprefix(PREFIX).rsplit(".", 1)
            by_fqn.setdefault(fqn, {})[name] = value
        for optimizer, stored_groups in zip(self.optimizers, groups, strict=True):
            position = {fqn: i for i, g in enumerate(stored_groups) for fqn in g["fqns"]}
            for index, group in enumerate(optimizer.param_groups):
                fqns = [self._names[p] for p in group["params"]]
                found = next((position[f] for f in fqns if f in position), index)
                stored = stored_groups[found]
                group.update({k: v for k, v in stored["hyperparameters"].items() if k not in _IMPLEMENTATION})
                on_device = bool(group.get("capturable") or group.get("fused"))
                has_tensors = any(fqn in by_fqn for fqn in fqns)
                for fqn, parameter in zip(fqns, group["params"], strict=True):
                    own = by_fqn.get(fqn, {})
                    if has_tensors and not own:  # a parameter that was never stepped has no state at all
                        optimizer.state.pop(parameter, None)
                        continue
                    state = {name: _fresh(value, parameter, on_device) for name, value in stored["shared"].items()}
                    optimizer.state[parameter] = state | own


def _fresh(value: Any, parameter: nn.Parameter, on_device: bool) -> Any:
    """Copy a shared scalar for one parameter: optimizers count steps in place."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().to(parameter.device if on_device else "cpu")


def _all_equal(values: list[Any]) -> bool:
    first = values[0]
    if all(isinstance(v, torch.Tensor) for v in values):
        if any(v.dtype != first.dtype for v in values):
            return False
        stacked = torch.stack([v.detach() for v in values])  # one transfer, not one per parameter
        return bool((stacked == stacked[0]).all())
    return all(type(v) is type(first) and v == first for v in values)
