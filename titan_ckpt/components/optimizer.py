"""The way of stored optimizer state back to optimizers, by parameter name. optimizer_split.py stores it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.components import optimizer_content as contents
from titan_ckpt.components import optimizer_split, quantized_state, schedules
from titan_ckpt.components.optimizer_content import PREFIX, OptimizerContent
from titan_ckpt.components.optimizer_split import (
    NOT_STORED,
    Group,
    Groups,
    NamedOptimizers,
    placements_unlike,
    room,
    room_like,
)
from titan_ckpt.components.quantized_state import QUANTIZED
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import LoadMismatchError, counted, listed
from titan_ckpt.geometry.chunks import TensorInfo, info_of, is_made_of_others, plain
from titan_ckpt.geometry.nested import address, give_tensors, layouts_of, names_of
from titan_ckpt.types import StateDict
from titan_ckpt.weights.names import prefix_in

logger = logging.getLogger(__name__)

_RUN_CHOICES = NOT_STORED - {"params"}
_START_AFRESH = 'or start the optimizer afresh: checkpoint.resume.exclude = ["optimizer"]'
_RATES = frozenset({"lr", "initial_lr"})
_FIXED_BY_KIND = frozenset({"decoupled_weight_decay"})
"""Settings of groups that say which kind of optimizer it is, if its constructor has no such argument."""

_Placed = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""id of a tensor -> the tensor itself, so that no other one gets its id, and the one that takes its place."""


class OptimizerState(NamedOptimizers):
    """The state of any number of optimizers over disjoint parameters, addressed by fqn, and its way back to them."""

    def destinations(
        self, available: Mapping[str, TensorInfo], stored: Sequence[Sequence[Group]] = ()
    ) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for every stored one, and the keys of parameters that this rank does not train.

        It is the live tensor if that has the same shape and dtype, otherwise a new one, laid out as the optimizer would
        make it. Nothing is attached to an optimizer until `apply`.
        Raises: LoadMismatchError for quantized state that this layout cannot take.
        """
        out = self._quantized_rooms(available, stored)
        first = [group for optimizer in stored for group in optimizer[:1]]  # torchtitan may have none of an optimizer
        beside = dict(layout for group in first for layout in layouts_of(group.get("beside")))
        placements = dict(layout for optimizer in stored for group in optimizer for layout in layouts_of(group["own"]))
        strangers = []
        filled = {address(parameter) for _, parameter in self._owners.values()}
        mesh = next((p.device_mesh for _, p in self._owners.values() if isinstance(p, DTensor)), None)
        for key, info in available.items():
            if key in out:
                continue
            if key in beside:
                out[key] = room(info, self._device(), mesh, beside[key])
                continue
            fqn, name = parameter_of(key, self._owners)
            if fqn is None:
                strangers.append(key)
                continue
            optimizer, parameter = self._owners[fqn]
            live = optimizer.state.get(parameter, {}).get(name)
            layout = placements.get(key)
            # a new optimizer may have one tensor for several keys, or a parameter, until its steps replace it
            if _is_room(live, info, parameter, layout) and address(live) not in filled:
                filled.add(address(live))
                out[key] = plain(live)
            elif not info.shape and (parameter.dim() or name == "step") and layout is None:
                out[key] = torch.empty((), dtype=info.dtype)
            else:
                out[key] = room_like(parameter, info, layout)
        return out, strangers

    def _device(self) -> torch.device:
        return next(iter(self._owners.values()))[1].device

    def _room(self, fqn: str, name: str, stored: Mapping[str, Any]) -> Any:
        optimizer, parameter = self._owners[fqn]
        live = optimizer.state.get(parameter, {}).get(name)
        return quantized_state.room_for(optimizer, parameter, live, stored, f"{PREFIX}{fqn}.{name}")

    def _quantized_rooms(self, available: Mapping[str, TensorInfo], groups: Sequence[Sequence[Group]]) -> StateDict:
        """Return a tensor to fill for every tensor inside quantized state of a parameter that this rank trains."""
        out: StateDict = {}
        faults = []
        owns = (own for optimizer in groups for group in optimizer for own in group["own"].items())
        for fqn, name, stored in ((fqn, *item) for fqn, state in owns for item in state.items()):
            if fqn not in self._owners or type(stored) is not dict or QUANTIZED not in stored:
                continue
            path = f"{PREFIX}{fqn}.{name}"
            for part, value in quantized_state.parts(self._room(fqn, name, stored), path).items():
                key = next(names_of(stored["parts"].get(part)), f"{path}.{part}")
                out[key] = value
                if available.get(key) != info_of(value):
                    faults.append(f"{key} is {available.get(key)}, expected {info_of(value)}")
        if faults:
            raise LoadMismatchError(
                f"quantized optimizer state does not fit the shards of this run: {listed(faults)}. Resume on the "
                f"number of ranks that saved it, {_START_AFRESH}"
            )
        return out

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
                if not fqns:  # such as the one that transformers makes for weights without decay
                    known = [g for stored in groups[o : o + 1] for g in stored[i : i + 1] if not g["fqns"]]
                matches[-1].append(known)
                where = f"group {i} of optimizer {o}"
                if fqns and not known:
                    problems.append(f"{where}: none of its {len(fqns)} parameters was trained there, such as {fqns[0]}")
                if any(matched_by.setdefault(id(g), i) != i for g in known):
                    problems.append(f"{where}: its parameters were in one group with others, such as {fqns[0]}")
                if len(known) > 1 and len({typed_json.dumps(g["hyperparameters"]) for g in known}) > 1:
                    problems.append(f"{where}: its parameters were in {len(known)} groups with other hyperparameters")
                if fault := _fault_of_kind(optimizer, group, known):
                    problems.append(f"{where}: {fault}")
        if problems:
            live, stored = [len(o.param_groups) for o in self.optimizers], [len(g) for g in groups]
            raise LoadMismatchError(
                f"the checkpoint has {len(stored)} optimizer(s) with {stored} parameter groups, this run {len(live)} "
                f"with {live}: {'; '.join(problems)}. Build the same ones, {_START_AFRESH}"
            )
        return matches

    def replaced_arguments(self, groups: Groups, scheduled: frozenset[str]) -> list[str]:
        """Return a line for each argument of an optimizer's constructor that `apply` will replace by another value.

        `scheduled`: settings that change at every step.
        """
        arguments = [inspect.signature(type(optimizer)).parameters.keys() for optimizer in self.optimizers]
        return self.replaced_settings(groups, frozenset().union(*arguments) - _RUN_CHOICES - scheduled)

    def replaced_settings(self, groups: Groups, names: frozenset[str]) -> list[str]:
        """Return a line for each of these settings of the groups that `apply` will replace by another value."""
        lines: dict[str, None] = {}
        for optimizer, matched in zip(self.optimizers, self.match(groups), strict=True):
            for live, of_group in zip(optimizer.param_groups, matched, strict=True):
                stored = of_group[0]["hyperparameters"] if of_group else {}
                lines |= dict.fromkeys(schedules.differences(stored, live, names))
        return list(lines)

    def replaced_classes(self, groups: Groups) -> list[str]:
        """Return a line for each class of optimizer whose state `apply` gives to an unrelated class.

        Two classes are related if one has the other's name or is derived from a class of that name, and both or none
        are in schedulefree's wrapper. Unrelated ones are not refused, because classes are renamed and wrapped.
        """
        lines: dict[str, None] = {}
        wrapped = {
            optimizer for w, optimizer in zip(self._wrappers, self.optimizers, strict=True) if contents.kept_by(w)
        }
        for stored, group in ((optimizer[0], group) for optimizer in groups for group in optimizer):
            before, was_wrapped = group.get("classes"), "wrapper" in stored.get("beside", {})
            for owner in dict.fromkeys(self._owners[fqn][0] for fqn in group["fqns"] if fqn in self._owners):
                now, is_wrapped = optimizer_split.class_names(type(owner)), owner in wrapped
                if not before or not now:
                    continue
                if was_wrapped is not is_wrapped or (before[0] not in now and now[0] not in before):
                    lines[
                        f"the checkpoint's optimizer is of class {_called(before, was_wrapped)}, and this run's of "
                        f"class {_called(now, is_wrapped)}, which goes on with that state as it is. If these are not "
                        'two names of one optimizer, start it afresh: checkpoint.resume.exclude = ["optimizer"]'
                    ] = None
        return list(lines)

    def apply(self, tensors: StateDict, groups: Groups, kept: frozenset[str] = frozenset()) -> None:
        """Attach filled tensors, shared scalars and hyperparameters to the optimizers, but those that are `kept`.

        Raises: LoadMismatchError, as `match`; nothing is changed then.
        """
        matches = self.match(groups)
        trained = {fqn for optimizer in groups for group in optimizer for fqn in group["fqns"]}
        if new := [fqn for fqn in self._owners if fqn not in trained]:
            what = counted(len(new), "parameter starts", "parameters start")
            logger.warning("%s without optimizer state: %s", what, listed(new, ", ", " "))
        nested = {name for o in groups for g in o for state in g["own"].values() for name in names_of(state)}
        by_fqn: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            fqn, name = parameter_of(key, self._owners)
            if fqn is not None and key not in nested:
                by_fqn.setdefault(fqn, {})[name] = value
        for wrapper, optimizer, matched in zip(self._wrappers, self.optimizers, matches, strict=True):
            settings = [
                {name: live[name] for name in live.keys() & (_RUN_CHOICES | kept)}
                | {
                    name: _like(name, value, live.get(name), self._device())
                    for stored in of_group
                    for name, value in stored["hyperparameters"].items()
                    if name not in kept
                }
                for live, of_group in zip(optimizer.param_groups, matched, strict=True)
            ]
            state = self._states(optimizer, matched, by_fqn, tensors)
            beside = give_tensors(_beside_of(groups, matched), tensors)
            contents.give(optimizer, OptimizerContent(state, settings, beside))
            if "wrapper" in beside and contents.kept_by(wrapper):
                wrapper.train_mode = beside["wrapper"]["train_mode"]

    def _states(
        self,
        optimizer: Optimizer,
        matched: Sequence[Sequence[Group]],
        by_fqn: Mapping[str, Mapping[str, torch.Tensor]],
        tensors: StateDict,
    ) -> dict[nn.Parameter, dict[Any, Any]]:
        """Return the stored state of each parameter; a parameter that was not trained there keeps what it has."""
        stored = {fqn: group for groups in matched for group in groups for fqn in group["fqns"]}
        stateless = {fqn for groups in matched for group in groups for fqn in group["stateless"]}
        stepped = self._owners.keys() & stored.keys() - stateless
        owns = give_tensors({fqn: stored[fqn]["own"].get(fqn, {}) for fqn in stepped}, tensors)
        placed: _Placed = {}
        out: dict[nn.Parameter, dict[Any, Any]] = {}
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                fqn = self._names[parameter]
                if fqn in stepped:
                    own = {name: self._whole(fqn, name, value) for name, value in owns[fqn].items()}
                    shared = {name: optimizer_split.frozen(value) for name, value in stored[fqn]["shared"].items()}
                    state = shared | dict(by_fqn.get(fqn, {})) | own
                    out[parameter] = {n: _placed(n, v, parameter, on_device, placed) for n, v in state.items()}
                elif fqn not in stored and optimizer.state.get(parameter):
                    out[parameter] = optimizer.state[parameter]
        return out

    def _whole(self, fqn: str, name: str, value: Any) -> Any:
        """Return state that was stored in "own", its quantized tensors put together again."""
        if type(value) is dict and QUANTIZED in value:
            return quantized_state.fill(self._room(fqn, name, value), value["parts"], f"{PREFIX}{fqn}.{name}")
        return value


def parameter_of(key: str, fqns: Collection[str]) -> tuple[str | None, str]:
    """Split a key into the fqn of one of these parameters and a name of its state; both may have dots."""
    rest = key.removeprefix(PREFIX)
    fqn = prefix_in(rest.rpartition(".")[0], fqns)
    return fqn, "" if fqn is None else rest[len(fqn) + 1 :]


def _is_room(live: Any, info: TensorInfo, parameter: nn.Parameter, layout: Sequence[str] | None) -> bool:
    """Return whether the live state can be filled in place."""
    if not isinstance(live, torch.Tensor) or is_made_of_others(live) or info_of(live) != info:
        return False
    return not isinstance(parameter, DTensor) or placements_unlike(parameter, live) == layout


def _called(classes: Sequence[str], wrapped: bool) -> str:
    return f"{classes[0]} in schedulefree's wrapper" if wrapped else classes[0]


def _beside_of(groups: Groups, matched: Sequence[Sequence[Group]]) -> dict[str, Any]:
    """Return what the optimizer that trained these groups kept beside its parameters.

    Raises: LoadMismatchError if several optimizers did, and kept different state.
    """
    known = {id(group) for of_group in matched for group in of_group}
    kept = [optimizer[0].get("beside", {}) for optimizer in groups if any(id(group) in known for group in optimizer)]
    if len({typed_json.dumps(state) for state in kept}) > 1:
        raise LoadMismatchError(
            f"its parameters were trained by {len(kept)} optimizers that kept different state beside their parameters. "
            f"Build the same optimizers, {_START_AFRESH}"
        )
    return kept[0] if kept else {}


def misfit(strangers: Sequence[str]) -> LoadMismatchError:
    """Return the error for stored state of parameters that no rank trains."""
    fqns = sorted({key.removeprefix(PREFIX).rpartition(".")[0] for key in strangers})
    return LoadMismatchError(
        f"optimizer state does not fit this run's parameters: {len(fqns)} trained there and not here: "
        f"{listed(fqns, ', ', ' ')}. Train the same parameters, {_START_AFRESH}"
    )


def _like(name: str, stored: Any, live: Any, device: torch.device) -> Any:
    """Return a stored hyperparameter as this run has it: a learning rate may be a tensor or not, by this run's choice.

    `device`: of a tensor that the optimizer has not made yet; they are stored without a device.
    """
    is_number = isinstance(live, (int, float))
    if name in _RATES and isinstance(live, torch.Tensor) and isinstance(stored, (int, float, torch.Tensor)):
        return torch.as_tensor(stored, dtype=live.dtype, device=live.device)
    if name in _RATES and is_number and isinstance(stored, torch.Tensor) and not stored.dim():
        return stored.item()
    if isinstance(stored, torch.Tensor):
        return stored.to(live.device if isinstance(live, torch.Tensor) else device)
    return stored


def _fault_of_kind(optimizer: Optimizer, group: Group, stored: Sequence[Group]) -> str | None:
    """Return why stored groups are those of another kind of optimizer; its state would be kept and mean nothing.

    Another version of the same one has more settings or fewer, and not both. torch's AdamW is an Adam with a setting
    that no argument of AdamW can change.
    """
    name, parameters = type(optimizer).__name__, inspect.signature(type(optimizer)).parameters.keys()
    arguments = parameters & group.keys() - NOT_STORED
    for settings in (known["hyperparameters"] for known in stored):
        lacking, foreign = arguments - settings.keys(), settings.keys() - group.keys() - schedules.GROUP_SETTINGS
        if lacking and foreign:
            mine, theirs = (listed(sorted(names), ", ", " ") for names in (lacking, foreign))
            return f"{name} has the settings {mine}, and the checkpoint's optimizer {theirs}"
        for fixed in _FIXED_BY_KIND - parameters:
            if (before := settings.get(fixed)) is not None and before != group.get(fixed, before):
                return f"{name} has {fixed} = {group[fixed]}, and the checkpoint's optimizer {before}"
    return None


def _placed(name: str, value: Any, parameter: nn.Parameter, on_device: bool, placed: _Placed) -> Any:
    """Return state with a 0-d tensor moved to the device where optimizers expect it; one tensor stays one.

    Source: torch/optim/optimizer.py, _process_value_according_to_param_policy.
    """
    if not isinstance(value, torch.Tensor) or value.dim() or isinstance(value, DTensor):
        return value
    if not on_device and name == "step":
        return value
    return placed.setdefault(id(value), (value, value.to(parameter.device)))[1]
