"""The optimizers of a run as one component, and the schedulers of their groups' settings as another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from titan_ckpt.components import optimizer_content, schedules
from titan_ckpt.components.classes import class_name
from titan_ckpt.components.items.item import FlatFolder, Item, Leaves, Stored, flattened, nested, wrong_types
from titan_ckpt.components.optimizer import OptimizerState, parameter_of
from titan_ckpt.components.optimizer_content import PREFIX
from titan_ckpt.components.optimizer_rehearsal import rehearse
from titan_ckpt.components.optimizer_split import NOT_STORED, Group, Groups, NamedOptimizers
from titan_ckpt.components.watched import Watch
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ExportError, LoadMismatchError, SaveError, StateEncodingError, counted, listed
from titan_ckpt.geometry.chunks import TensorInfo, blocks_of, is_made_of_others, local_tensor
from titan_ckpt.geometry.nested import tensors_in
from titan_ckpt.types import StateDict, Stateful
from titan_ckpt.weights.wrapper import ModelWrapper

_PARTS_OF_GROUP: dict[str, type] = {
    "hyperparameters": dict,
    "shared": dict,
    "fqns": list,
    "stateless": list,
    "own": dict,
}
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


class Optimizers(Item):
    """All optimizers of a run, by `OptimizerState`. A step of theirs alone changes their tensors."""

    component = "optimizer"
    kind = list
    is_merged = True
    is_stepped = True

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: ModelWrapper,
        schedulers: Sequence[Stateful],
        own_settings: Callable[[Mapping[str, Any]], frozenset[str]],
        watch: Watch,
    ) -> None:
        """Bind to optimizers. `schedulers`: change settings of their groups. `own_settings`, `watch`: as of RunState.

        Raises: LoadMismatchError for parameters that are in no model part, or in two optimizers.
        """
        self.optimizers, self._model, self._schedulers = optimizers, model, schedulers
        self._own_settings, self._watch = own_settings, watch
        _ = self.state
        self.bound = OptimizerState((), {})
        """During a load, as `check` or `warnings` found it last: to name parameters is a walk over all modules."""

    @property
    def state(self) -> OptimizerState:
        """Return the optimizers' state by the current names of parameters, because a model may replace parameters."""
        return OptimizerState(self.optimizers, self._model.parameter_names())

    def check_scalers(self, saved: Collection[Any]) -> None:
        """Check that the run saves each GradScaler that scales an optimizer's gradients. Raises: LoadMismatchError."""
        scalers = [s for o in self.optimizers if isinstance(s := getattr(o, "scaler", None), GradScaler)]
        if any(scaler.is_enabled() and scaler not in list(saved) for scaler in scalers):
            raise LoadMismatchError(
                "an optimizer scales gradients by a GradScaler that would not be saved: pass it, "
                'states={"scaler": accelerator.scaler}'
            )

    def faults(self, allow: Collection[str]) -> list[str]:
        others = [o for o in self.optimizers if type(optimizer_content.innermost(o)) not in optimizer_content.PROVED]
        faults = [*dict.fromkeys(rehearse(others, self._model.parts, allow, self._watch))] if others else []
        return faults or typed_json.problems_of(self.value({}), self.key)

    def value(self, tensors: StateDict) -> Groups:
        split, groups = NamedOptimizers(self.optimizers, self._model.parameter_names()).split()
        tensors |= split
        return groups

    @staticmethod
    def merge(of_ranks: Sequence[Groups]) -> Groups:
        """Merge the groups of all ranks: a pipeline stage's optimizer lists only its own parameters.

        Groups with the same index, classes, hyperparameters and shared state become one group.
        Raises: SaveError if ranks hold different state of a parameter, or of none, so that one rank's would be lost.
        """
        merged: Groups = []
        by_key: dict[tuple[int, int, bytes], Group] = {}
        holders: dict[str, tuple[Group, bool, Any]] = {}
        faults: dict[str, None] = {}
        for groups in of_ranks:
            merged += [[] for _ in groups[len(merged) :]]
            for o, optimizer in enumerate(groups):
                for i, group in enumerate(optimizer):
                    key = o, i, typed_json.dumps([group["classes"], group["hyperparameters"], group["shared"]])
                    if key not in by_key:
                        by_key[key] = {**group, "fqns": [], "stateless": [], "own": {}}
                        merged[o].append(by_key[key])
                    known = by_key[key]
                    stateless = set(group["stateless"])
                    for fqn in group["fqns"]:
                        is_new, own = fqn in stateless, group["own"].get(fqn)
                        holder, was_new, first_own = holders.setdefault(fqn, (known, is_new, own))
                        if holder is not known or was_new is not is_new or not _same(first_own, own):
                            faults[fqn] = None
                    if not _same(known.get("beside"), group.get("beside")):
                        faults[f"what optimizer {o} keeps beside its parameters"] = None
                    for part in ("fqns", "stateless"):
                        known[part] = list(dict.fromkeys([*known[part], *group[part]]))
                    known["own"] |= group["own"]
        if faults:
            raise SaveError(
                f"the ranks hold different optimizer state of {counted(len(faults), 'parameter')}, and one rank's "
                f"would be lost: {listed(list(faults))}. Compute such state from reduced gradients, so that it is "
                "equal on all ranks"
            )
        return merged

    def num_bytes(self) -> int:
        """Estimate this rank's bytes of state: two float32 moments for parameters not yet stepped."""
        total = 0
        for optimizer in self.optimizers:
            total += sum(local_tensor(value).nbytes for s in optimizer.state.values() for value in tensors_in(s))
            fresh = (p for p in optimizer_content.parameters_of(optimizer) if p not in optimizer.state)
            total += sum(8 * block.data.numel() for p in fresh for block in blocks_of(p))
        return total

    @classmethod
    def misshapen(cls, value: Any) -> list[str]:
        optimizers = value if isinstance(value, list) else []
        stored = [group for groups in optimizers if isinstance(groups, list) for group in groups]
        dicts = [group for group in stored if isinstance(group, dict)]
        parts: list[tuple[str, Any, type]] = [(f"optimizer[{i}]", groups, list) for i, groups in enumerate(optimizers)]
        parts += [("a parameter group", group, dict) for group in stored]
        parts += [(f"{name} of a group", g.get(name), kind) for g in dicts for name, kind in _PARTS_OF_GROUP.items()]
        parts += [("classes of a group", group["classes"], list) for group in dicts if "classes" in group]
        empty = ["an optimizer without parameter groups"] * ([] in optimizers)
        return super().misshapen(value) + wrong_types(parts) + empty

    def check(self, stored: Stored) -> None:
        self.bound = self.state
        self.bound.match(stored.values[self.key])

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        own = {key: info for key, info in available.items() if key.startswith(PREFIX)}
        return self.bound.destinations(own, stored.values[self.key])

    def warnings(self, stored: Stored) -> list[str]:
        self.bound = state = self.state  # the model's own code may have replaced parameters
        groups = stored.values[self.key]
        changed = schedules.changed_settings([scheduler.state_dict() for scheduler in self._schedulers])
        lines = state.replaced_arguments(groups, changed | self._own_settings(stored.states))
        return [*schedules.goes_on(self.component, lines), *state.replaced_classes(groups)]

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Give the optimizers their state. A schedule of torch that starts afresh does so from this run's rate."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        afresh = "lr_scheduler" in stored.exclude and any(type(s) is dict and "_last_lr" in s for s in states)
        kept = schedules.changed_settings(states) | schedules.GROUP_SETTINGS if afresh else frozenset()
        kept |= schedules.with_rate_of_start(self._own_settings(stored.states))
        own = {key: value for key, value in tensors.items() if key.startswith(PREFIX)}
        self.bound.apply(own, stored.values[self.key], kept)
        self.bound = OptimizerState((), {})

    def leaves(self) -> Leaves:
        """Raises: ExportError for state that torchtitan's names have no place for."""
        names = self._model.parameter_names()
        for wrapper in self.optimizers:
            optimizer = optimizer_content.innermost(wrapper)
            content = optimizer_content.read(optimizer)
            if content.beside or optimizer_content.kept_by(wrapper):
                kind = type(optimizer).__name__
                raise ExportError(
                    f"{kind} keeps state beside its parameters, which torchtitan's names have no place for"
                )
            for live, group in zip(optimizer.param_groups, content.groups, strict=True):
                for fqn, parameter in ((names[parameter], parameter) for parameter in live["params"]):
                    for (head, *rest), value in flattened(
                        ("optimizer", f"state.{fqn}"), content.state.get(parameter, {})
                    ):
                        if is_made_of_others(value):
                            raise ExportError(
                                f"the optimizer state of {fqn} is quantized; DCP folders hold plain tensors"
                            )
                        yield (head, ".".join(rest)), value
                    for key, value in group.items():
                        if key not in ("params", "param_names"):
                            yield ("optimizer", f"param_groups.{fqn}.{key}"), value

    def torchtitan_tensors(self, folder: FlatFolder) -> dict[str, str]:
        return {PREFIX + name.removeprefix(_STATE): name for name in folder.tensors if name.startswith(_STATE)}

    def from_torchtitan(self, folder: FlatFolder) -> Groups:
        """Return this run's parameter groups with the stored hyperparameters of their parameters.

        A folder stores hyperparameters by parameter, so a live group is one stored group for each set of values in it.
        """
        names = self._model.parameter_names()
        grouped = [[[names[p] for p in g["params"]] for g in o.param_groups] for o in self.optimizers]
        fqns = {*chain.from_iterable(chain.from_iterable(grouped))}
        of_fqn: dict[str, dict[str, Any]] = {}
        own: dict[str, dict[str, Any]] = {}
        for item in folder.items:
            prefix, table = (_GROUPS, of_fqn) if item.startswith(_GROUPS) else (_STATE, own)
            fqn, _, key = item.removeprefix(prefix).rpartition(".")
            if item.startswith(prefix) and fqn in fqns and key not in NOT_STORED:
                table.setdefault(fqn, {})[key] = folder.item(item)
        stateful = {*own, *(parameter_of(key, fqns)[0] for key in self.torchtitan_tensors(folder))}
        out: Groups = []
        for optimizer in grouped:
            groups: dict[str, Group] = {}
            for index, fqn in ((i, f) for i, group in enumerate(optimizer) for f in group if f in of_fqn):
                empty: Group = {"hyperparameters": of_fqn[fqn], "shared": {}, "fqns": [], "stateless": [], "own": {}}
                made = groups.setdefault(f"{index} {sorted(of_fqn[fqn].items())!r}", empty)
                made["fqns"].append(fqn)
                if fqn not in stateful:
                    made["stateless"].append(fqn)
                if fqn in own:
                    made["own"][fqn] = own[fqn]
            out.append(list(groups.values()))
        return out


class Schedulers(Item):
    """All schedulers, in their order."""

    component = "lr_scheduler"
    kind = list

    def __init__(
        self,
        schedulers: Sequence[Stateful],
        optimizers: Optimizers | None,
        own_settings: Callable[[Mapping[str, Any]], frozenset[str]],
    ) -> None:
        """Bind to schedulers. `optimizers`: what they schedule; `own_settings`: as of RunState."""
        self._schedulers, self._optimizers, self._own_settings = schedulers, optimizers, own_settings

    def faults(self, allow: Collection[str]) -> list[str]:
        faults = []
        for i, scheduler in enumerate(self._schedulers):
            try:
                typed_json.encode(scheduler.state_dict(), f"lr_scheduler[{i}]")
            except StateEncodingError as error:
                faults.append(f"{class_name(scheduler)}: {error}")
        return faults

    def value(self, tensors: StateDict) -> list[dict[str, Any]]:
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def _for_each(self, stored: Stored) -> list[dict[str, Any]]:
        """Return a state for each scheduler; of a different number stored, copies if all are equal, or nothing.

        Another layout of ranks may have more or fewer of the same schedulers.
        """
        states, count = stored.values.get(self.key, []), len(self._schedulers)
        if len(states) == count:
            return states  # type: ignore[no-any-return]
        alike = len({typed_json.dumps(state) for state in states}) == 1
        return [copy.deepcopy(states[0]) for _ in range(count)] if alike else []

    def is_in(self, stored: Stored) -> bool:
        return bool(self._for_each(stored))

    def warnings(self, stored: Stored) -> list[str]:
        """Return a line for the settings, in its state and in the optimizer's groups, that the checkpoint replaces."""
        own = self._own_settings(stored.states)
        lines = schedules.replaced_settings(self._schedulers, self._for_each(stored), own)
        if self._optimizers is not None and "optimizer" not in stored.exclude:
            groups, names = stored.values[self._optimizers.key], schedules.kept_in_groups(self.value({}))
            lines += self._optimizers.bound.replaced_settings(groups, names)
        return schedules.goes_on(self.component, list(dict.fromkeys(lines)))

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Raises: LoadMismatchError for a scheduler that does not take its state."""
        for scheduler, state in zip(self._schedulers, self._for_each(stored), strict=True):
            optimizer_content.give_state(scheduler, state, self.component)

    def leaves(self) -> Leaves:
        states = self.value({})
        if len({typed_json.dumps(state) for state in states}) > 1:
            raise ExportError(f"its {len(states)} schedulers differ, and torchtitan's checkpoints hold one")
        yield from flattened((self.component,), states[0])

    def from_torchtitan(self, folder: FlatFolder) -> list[dict[str, Any]] | None:
        """Raises: LoadMismatchError for the state of another container than this run's."""
        state = nested(folder, self.component)
        live = self._schedulers[0].state_dict()
        if state and live.keys() != state.keys():
            raise LoadMismatchError(
                f"{folder.path}: lr_scheduler has {', '.join(state)}, this run's has {', '.join(live)}: give the "
                'manager the container that saved it, or checkpoint.resume.exclude = ["lr_scheduler"]'
            )
        return [state] if state else None


def _same(a: Any, b: Any) -> bool:
    return a is b or typed_json.dumps(a) == typed_json.dumps(b)
