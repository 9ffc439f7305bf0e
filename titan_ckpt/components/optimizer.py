"""Optimizer state by parameter name: tensors for the tensor file, everything else once per parameter group.

Owns the flattening and its inverse. Knows no files. DCP flattens hyperparameters per parameter, which costs 11 scalar
blobs per AdamW parameter; this module stores those of a group once, and also a `step` that all its parameters share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import TensorInfo, info_of, plain
from titan_ckpt.geometry.nested import give_tensors, names_of, take_tensors
from titan_ckpt.types import StateDict

logger = logging.getLogger(__name__)

PREFIX = "optimizer."
_NOT_STORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Parameters are stored by name; foreach, fused, capturable and differentiable are choices of the current run."""
_START_AFRESH = 'or start the optimizer afresh: checkpoint.resume.exclude = ["optimizer"]'
_LISTED = 8

Group = dict[str, Any]
"""{"hyperparameters": ..., "shared": 0-d state that is equal for all its parameters, "fqns": [...], "stateless": fqns
that were never stepped, "own": fqn -> name -> other state that is no tensor, or that nests tensors}"""
Groups = list[list[Group]]
"""The groups of each optimizer."""


class OptimizerState:
    """The state of any number of optimizers over disjoint parameters, addressed by fqn."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        """Bind optimizers to the names of their parameters.

        Raises: LoadMismatchError for a parameter without a name, or in two optimizers.
        """
        self.optimizers = list(optimizers)
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

        Tensors alias the live state.
        """
        tensors: StateDict = {}
        return tensors, [[self._describe(o, group, tensors) for group in o.param_groups] for o in self.optimizers]

    def _describe(self, optimizer: Optimizer, group: Mapping[str, Any], tensors: StateDict) -> Group:
        scalars: dict[str, dict[str, Any]] = {}
        own: dict[str, dict[str, Any]] = {}
        fqns = [self._names[parameter] for parameter in group["params"]]
        stateless = []
        for fqn, parameter in zip(fqns, group["params"], strict=True):
            state = optimizer.state.get(parameter)
            if not state:
                stateless.append(fqn)
                continue
            for name, value in state.items():
                if isinstance(value, (dict, list, tuple)):
                    own.setdefault(fqn, {})[name] = take_tensors(value, f"{PREFIX}{fqn}.{name}", tensors)
                elif isinstance(value, torch.Tensor) and (value.dim() or isinstance(value, DTensor)):
                    tensors[f"{PREFIX}{fqn}.{name}"] = plain(value)
                else:
                    scalars.setdefault(name, {})[fqn] = value
        shared = {}
        for name, values in scalars.items():
            if len(values) == len(fqns) - len(stateless) and _all_equal(list(values.values())):
                shared[name] = _frozen(next(iter(values.values())))
                continue
            for fqn, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{PREFIX}{fqn}.{name}"] = plain(value)
                else:
                    own.setdefault(fqn, {})[name] = value
        hyperparameters = {k: _frozen(v) for k, v in group.items() if k not in _NOT_STORED}
        return {"hyperparameters": hyperparameters, "shared": shared, "fqns": fqns, "stateless": stateless, "own": own}

    def destinations(self, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for every stored one, and the keys of parameters that this rank does not train.

        It is the live tensor if that has the same shape and dtype, otherwise a new one, laid out as the optimizer would
        make it. Nothing is attached to an optimizer until `apply`.
        """
        out: StateDict = {}
        strangers = []
        for key, info in available.items():
            fqn, name = self._parse(key)
            if fqn is None:
                strangers.append(key)
                continue
            optimizer, parameter = self._owners[fqn]
            live = optimizer.state.get(parameter, {}).get(name)
            if isinstance(live, torch.Tensor) and info_of(live) == info:
                out[key] = plain(live)
            elif not info.shape and (parameter.dim() or name == "step"):
                out[key] = torch.empty((), dtype=info.dtype)
            elif info.shape == tuple(parameter.shape):
                # as optimizers do: for a float8-aware parameter zeros_like returns a plain tensor, empty_like does not
                out[key] = torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False).detach()
            else:
                out[key] = parameter.detach().new_empty(info.shape, dtype=info.dtype)
        return out, strangers

    def _parse(self, key: str) -> tuple[str | None, str]:
        """Split a key into the fqn of a parameter that this rank trains and a name of its state; both may have dots."""
        fqn = rest = key.removeprefix(PREFIX)
        while "." in fqn:
            fqn = fqn.rpartition(".")[0]
            if fqn in self._owners:
                return fqn, rest[len(fqn) + 1 :]
        return None, ""

    def match(self, groups: Groups) -> list[list[list[Group]]]:
        """Return for each live group the stored groups that hold its parameters; pure.

        Stored groups are matched by parameter names, so their optimizer may be a different one now (pipeline stages).
        Raises: LoadMismatchError listing every group whose parameters were grouped differently.
        """
        of_fqn = {fqn: group for optimizer in groups for group in optimizer for fqn in group["fqns"]}
        problems: list[str] = []
        matches: list[list[list[Group]]] = []
        for o, optimizer in enumerate(self.optimizers):
            matched_by: dict[int, int] = {}
            matches.append([])
            for i, group in enumerate(optimizer.param_groups):
                fqns = [self._names[p] for p in group["params"]]
                known = list({id(of_fqn[f]): of_fqn[f] for f in fqns if f in of_fqn}.values())
                matches[-1].append(known)
                where = f"group {i} of optimizer {o}"
                if fqns and not known:
                    problems.append(f"{where}: none of its {len(fqns)} parameters was trained there, such as {fqns[0]}")
                if any(matched_by.setdefault(id(g), i) != i for g in known):
                    problems.append(f"{where}: its parameters were in one group with others, such as {fqns[0]}")
                if len(known) > 1 and len({typed_json.dumps(g["hyperparameters"]) for g in known}) > 1:
                    problems.append(f"{where}: its parameters were in {len(known)} groups with other hyperparameters")
                if new := [f for f in fqns if f not in of_fqn]:
                    logger.warning("%s: %d parameters start without state: %s", where, len(new), new[:_LISTED])
        if problems:
            live, stored = [len(o.param_groups) for o in self.optimizers], [len(g) for g in groups]
            raise LoadMismatchError(
                f"the checkpoint has {len(stored)} optimizer(s) with {stored} parameter groups, this run {len(live)} "
                f"with {live}: {'; '.join(problems)}. Build the same groups, {_START_AFRESH}"
            )
        return matches

    def apply(self, tensors: StateDict, groups: Groups) -> None:
        """Attach filled tensors, shared scalars and hyperparameters to the optimizers.

        Raises: LoadMismatchError, as `match`; nothing is changed then.
        """
        matches = self.match(groups)
        nested = {name for o in groups for g in o for state in g["own"].values() for name in names_of(state)}
        by_fqn: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            fqn, name = self._parse(key)
            if fqn is not None and key not in nested:
                by_fqn.setdefault(fqn, {})[name] = value
        for optimizer, matched in zip(self.optimizers, matches, strict=True):
            for group, stored_groups in zip(optimizer.param_groups, matched, strict=True):
                for stored in stored_groups:
                    for name, value in stored["hyperparameters"].items():
                        group[name] = _like(value, group.get(name))
                    self._attach(optimizer, group, stored, by_fqn, tensors)

    def _attach(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        stored: Group,
        by_fqn: Mapping[str, Mapping[str, torch.Tensor]],
        tensors: StateDict,
    ) -> None:
        on_device = bool(group.get("capturable") or group.get("fused"))
        inside, stateless = set(stored["fqns"]), set(stored["stateless"])
        for parameter in group["params"]:
            fqn = self._names[parameter]
            if fqn in stateless:
                optimizer.state.pop(parameter, None)
            elif fqn in inside:
                own = by_fqn.get(fqn, {}) | give_tensors(stored["own"].get(fqn, {}), tensors)
                state = {name: _frozen(value) for name, value in stored["shared"].items()} | own
                optimizer.state[parameter] = {n: _placed(n, v, parameter, on_device) for n, v in state.items()}


def merge_groups(of_ranks: Sequence[Groups]) -> Groups:
    """Merge the groups of all ranks: a pipeline stage's optimizer lists only its own parameters.

    Groups with the same index, hyperparameters and shared state become one group.
    """
    merged: Groups = []
    by_key: dict[tuple[int, int, bytes], Group] = {}
    for groups in of_ranks:
        merged += [[] for _ in groups[len(merged) :]]
        for o, optimizer in enumerate(groups):
            for i, group in enumerate(optimizer):
                key = o, i, typed_json.dumps([group["hyperparameters"], group["shared"]])
                if key not in by_key:
                    by_key[key] = {**group, "fqns": [], "stateless": [], "own": {}}
                    merged[o].append(by_key[key])
                known = by_key[key]
                for part in ("fqns", "stateless"):
                    known[part] = list(dict.fromkeys([*known[part], *group[part]]))
                known["own"] |= group["own"]
    return merged


def misfit(strangers: Sequence[str]) -> LoadMismatchError:
    """Return the error for stored state of parameters that no rank trains."""
    fqns = sorted({key.removeprefix(PREFIX).rpartition(".")[0] for key in strangers})
    return LoadMismatchError(
        f"optimizer state does not fit this run's parameters: {len(fqns)} trained there and not here: "
        f"{', '.join(fqns[:_LISTED])}. Train the same parameters, {_START_AFRESH}"
    )


def _frozen(value: Any) -> Any:
    """Return a copy of a tensor, because optimizers and schedulers change live ones in place; return others as is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _like(stored: Any, live: Any) -> Any:
    """Return a stored hyperparameter in the type and device of the live one: a learning rate may be a tensor or not."""
    if isinstance(live, torch.Tensor) and isinstance(stored, (int, float, torch.Tensor)):
        return torch.as_tensor(stored, dtype=live.dtype, device=live.device)
    if isinstance(live, (int, float)) and isinstance(stored, torch.Tensor) and not stored.dim():
        return stored.item()
    return stored


def _placed(name: str, value: Any, parameter: nn.Parameter, on_device: bool) -> Any:
    """Return state with a 0-d tensor moved to the device where optimizers expect it.

    Source: torch/optim/optimizer.py, _process_value_according_to_param_policy.
    """
    if not isinstance(value, torch.Tensor) or value.dim() or isinstance(value, DTensor):
        return value
    return value.to(parameter.device) if on_device or name != "step" else value


def _all_equal(values: list[Any]) -> bool:
    first = values[0]
    if all(isinstance(v, torch.Tensor) for v in values):
        if any(v.dtype != first.dtype for v in values):
            return False
        one_device = all(v.device == first.device for v in values)
        stacked = torch.stack([v.detach() if one_device else v.detach().cpu() for v in values])  # one transfer for all
        return bool((stacked == stacked[0]).all())
    return all(type(v) is type(first) and v == first for v in values)
