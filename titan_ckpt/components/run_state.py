"""The objects of a run whose state is saved, and the way of stored state back to them. snapshot.py takes their state.

Owns the closed set of components, and the split into tensors, state of the run (stored once) and state of a rank
(stored by each). Knows no files.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
import xxhash
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.components import schedules
from titan_ckpt.components.data_position import DataRank, restorer
from titan_ckpt.components.files import STATES
from titan_ckpt.components.known.own_modules import watch_modules
from titan_ckpt.components.optimizer import PREFIX as OPTIMIZER
from titan_ckpt.components.optimizer import OptimizerState
from titan_ckpt.components.optimizer_rehearsal import rehearse
from titan_ckpt.components.unsaved_state import class_name
from titan_ckpt.components.watched import Watch
from titan_ckpt.config import Component
from titan_ckpt.distributed.sharing import describe
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError, StateEncodingError, counted, listed
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import TensorInfo, blocks_of, local_tensor
from titan_ckpt.geometry.nested import MAX_DEPTH, give_tensors, names_of, take_tensors, unlike_plain
from titan_ckpt.rng import RandomState, generators_kept
from titan_ckpt.types import StateDict, Stateful
from titan_ckpt.weights.wrapper import ModelWrapper, require_memory

logger = logging.getLogger(__name__)

COMPONENTS: tuple[str, ...] = get_args(Component)


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that a rank takes over from the ranks' own files."""

    rng: dict[str, Any] | None
    """Generator states; None if the layout of ranks has changed, because then none belongs to this rank."""
    positions: Sequence[Any] = ()
    """The dataloader's state of each data-parallel rank, in their order; empty if none was stored."""


@dataclass(frozen=True)
class RunState:
    """The objects of a run whose state a resume needs, besides model weights."""

    model: ModelWrapper
    optimizers: Sequence[Optimizer] = ()
    lr_schedulers: Sequence[Stateful] = ()
    dataloader: Stateful | None = None
    states: Mapping[str, Stateful] = field(default_factory=dict)
    rng: RandomState = field(default_factory=RandomState)
    rank: int = 0
    world_size: int = 1
    left_out: frozenset[str] = frozenset()
    """Components that are neither saved nor loaded; their objects are forgotten."""
    own_settings: Callable[[Mapping[str, Any]], frozenset[str]] = lambda _: frozenset()
    """Returns, by the stored `states`, the settings of optimizer groups of which a load leaves this run's values."""
    watch: Watch = field(default_factory=Watch)
    """Compares what objects keep in attributes: no step holds it, so it must not change."""

    def __post_init__(self) -> None:
        """Check that all objects can be asked for their state.

        Raises: LoadMismatchError for optimizers that do not train this model's parameters; StateEncodingError for
        objects that return no state.
        """
        objects = {"optimizer": "optimizers", "lr_scheduler": "lr_schedulers", "states": "states"}
        for component in objects.keys() & self.left_out:
            object.__setattr__(self, objects[component], {} if component == "states" else ())
        if "dataloader" in self.left_out:
            object.__setattr__(self, "dataloader", None)
        _ = self.optimizer
        if faults := [f"{place} ({class_name(value)})" for place, value in self._stateful() if not _is_stateful(value)]:
            raise StateEncodingError(
                f"no state_dict() and load_state_dict(), by which a checkpoint holds it: {listed(faults)}. Give an "
                "object that has both, such as titan_ckpt.PositionedLoader(loader) for a DataLoader or torchdata's "
                "StatefulDataLoader",
                faults[0],
            )
        scalers = [s for o in self.optimizers if isinstance(s := getattr(o, "scaler", None), GradScaler)]
        scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        if "states" not in self.left_out and any(s not in list(self.states.values()) for s in scalers):
            raise LoadMismatchError(
                "an optimizer scales gradients by a GradScaler that would not be saved: pass it, "
                'states={"scaler": accelerator.scaler}'
            )

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, object) of everything beside optimizers that is asked for its state."""
        yield from ((f"lr_schedulers[{i}]", scheduler) for i, scheduler in enumerate(self.lr_schedulers))
        yield from ((f"states[{name!r}]", state) for name, state in self.states.items())
        if self.dataloader is not None:
            yield "dataloader", self.dataloader

    @property
    def optimizer(self) -> OptimizerState | None:
        """Return the optimizers' state by the current names of parameters, because a model may replace parameters."""
        return OptimizerState(self.optimizers, self.model.parameter_names()) if self.optimizers else None

    @property
    def data_rank(self) -> DataRank:
        """Return the share of the data that this process reads."""
        return DataRank.of(self.dataloader, self.rank, self.world_size)

    @functools.cached_property
    def layout(self) -> str:
        """Return a digest of the facts that decide which random numbers this rank draws: its shards and its data."""
        names = self.model.parameter_names()
        sharded: StateDict = {fqn: value for value, fqn in names.items() if isinstance(value, DTensor)}
        data = self.data_rank
        facts = [self.world_size, self.rank, data.rank, data.size, sorted(names.values()), describe(sharded)]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

    @functools.cached_property
    def has_extra_state(self) -> bool:
        """Return whether modules have extra state that is saved."""
        return "model" not in self.left_out and bool(self.model.extra_state_names())

    def components(self) -> list[str]:
        """Return the components that this run saves."""
        has = {
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "dataloader": self.dataloader is not None,
            "states": self.states,
        }
        return [name for name in COMPONENTS if has.get(name, True) and name not in self.left_out]

    @gc_paused()
    def rehearse(self, allow: Collection[str] = ()) -> None:
        """Check before the first step that the model has memory, and that all other state can be saved and resumed.

        A state that is iterated, such as a dataloader, is not asked, because its answer may begin an epoch. `allow`:
        full names of optimizers that may lose what they keep in attributes.

        Raises: StateEncodingError listing every one that cannot.
        """
        if "model" not in self.left_out:
            require_memory(self.model.memory())
        faults = rehearse(self.optimizers, self.model.parts, allow, self.watch)
        if not faults and (optimizer := self.optimizer) is not None:
            faults = typed_json.problems_of(optimizer.split()[1], "optimizer")
        for i, scheduler in enumerate(self.lr_schedulers):
            try:
                typed_json.encode(scheduler.state_dict(), f"lr_scheduler[{i}]")
            except StateEncodingError as error:
                faults.append(f"{class_name(scheduler)}: {error}")
        with generators_kept():
            for name, state in self.states.items():
                if isinstance(state, nn.Module) or not hasattr(type(state), "__iter__"):
                    faults += _faults_of_state(name, state)
        if faults:
            raise StateEncodingError(f"{len(faults)} object(s) of this run cannot be saved: " + "\n".join(faults))

    @gc_paused()
    def watch_modules(self, allow: Collection[str] = ()) -> None:
        """Watch, after a load, what the model's own modules keep beside its state."""
        if "model" not in self.left_out:
            live = [*self.optimizers, *self.lr_schedulers, *self.states.values(), self.dataloader]
            watch_modules(self.model.parts, allow, self.watch, live)

    def check_stepped(self, step: int) -> None:
        """Check after the first step that the state of the optimizers can be stored, and that no other has changed.

        Raises: StateEncodingError; SaveError.
        """
        self.watch.refuse(step)
        if (optimizer := self.optimizer) is not None:
            typed_json.encode(optimizer.split()[1], "optimizer")

    def optimizer_bytes(self) -> int:
        """Estimate this rank's bytes of optimizer state: two float32 moments for parameters not yet stepped."""
        total = 0
        for optimizer in self.optimizers:
            total += sum(_local_bytes(state) for state in optimizer.state.values())
            for group in optimizer.param_groups:
                fresh = [p for p in group["params"] if p not in optimizer.state]
                total += sum(8 * block.data.numel() for p in fresh for block in blocks_of(p))
        return total

    def check(
        self, run: dict[str, Any], rank: RankState, exclude: frozenset[str], values: Collection[str] = ()
    ) -> None:
        """Check that every component of this run can be restored; change nothing.

        `values`: names of the values beside tensors that the model's own state_dict() returns.
        Raises: LoadMismatchError listing the components that the checkpoint lacks or that cannot be carried over.
        """
        optimizer = self.optimizer
        restorers = self._restorers(optimizer, run, rank, {}, exclude)
        lacking = [name for name, restore in restorers.items() if restore is None and name not in exclude]
        if lacking:
            absent_states = [repr(name) for name in self.states if name not in run.get("states", {})]
            names = [f"states ({listed(absent_states, ', ', ' ')})" if name == "states" else name for name in lacking]
            raise LoadMismatchError(
                f"the checkpoint has no state for: {', '.join(names)}. It was saved by a run without them, or by "
                f"another number of ranks; to start afresh with them: checkpoint.resume.exclude = {json.dumps(lacking)}"
            )
        if optimizer is not None and "optimizer" not in exclude:
            optimizer.match(run["optimizer"])
        wanted = [*self.model.extra_state_names(), *values]
        absent = [name for name in wanted if name not in run.get("model", {})]
        if absent and "model" not in exclude:
            raise LoadMismatchError(
                f"the checkpoint lacks the extra state of {counted(len(absent), 'module')}: "
                f"{listed(absent, ', ', ' ')}. Was it saved from a different model?"
            )

    def destinations(
        self, available: Mapping[str, TensorInfo], run: dict[str, Any], exclude: frozenset[str]
    ) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for every stored one that is not the model's; nothing is attached yet.

        Also return the keys of optimizer state that belongs to no parameter of this rank, perhaps to a pipeline stage.
        Raises: CorruptCheckpointError for a user state whose tensors are not stored.
        """
        out: StateDict = {}
        strangers: list[str] = []
        if "optimizer" not in exclude:
            stored = {k: v for k, v in available.items() if k.startswith(OPTIMIZER)}
            optimizer = self.optimizer
            groups = run.get("optimizer", [])
            out, strangers = ({}, list(stored)) if optimizer is None else optimizer.destinations(stored, groups)
        if "states" not in exclude:
            for name, state in self.states.items():
                wanted = list(names_of(run.get("states", {}).get(name)))
                if lost := [key for key in wanted if key not in available]:
                    raise CorruptCheckpointError(
                        f"state {name!r}: its tensors {listed(lost, ', ', ' ')} are not stored"
                    )
                live: StateDict = {}
                if wanted:
                    taken_state(name, state, live)
                out |= {key: _room_for(available[key], live.get(key)) for key in wanted}
        return out, strangers

    def may_be_live(self, destinations: Collection[str]) -> set[str]:
        """Return the names of destinations that may be tensors which an optimizer holds now."""
        holds = any(optimizer.state for optimizer in self.optimizers)
        return {name for name in destinations if holds and name.startswith(OPTIMIZER)}

    @gc_paused()
    def apply(self, run: dict[str, Any], rank: RankState, tensors: StateDict, exclude: frozenset[str]) -> list[str]:
        """Give all state that was read to its owners, after `check`; random generators last.

        Return the warnings of this rank; those of other ranks may be the same or different.
        """
        if "model" not in exclude:
            self.model.load_extra_state(run.get("model", {}))
        if self.rank == 0:
            self._log_replaced_settings(run, exclude)
        optimizer = self.optimizer
        for name, restore in self._restorers(optimizer, run, rank, tensors, exclude).items():
            if name not in exclude:
                assert restore is not None, "check() comes first"
                restore()
        return optimizer.replaced_classes(run["optimizer"]) if optimizer and "optimizer" not in exclude else []

    def _log_replaced_settings(self, run: dict[str, Any], exclude: frozenset[str]) -> None:
        """Say which settings of this run's objects those of the checkpoint replace, and how to keep this run's."""
        states = [scheduler.state_dict() for scheduler in self.lr_schedulers]
        own = self.own_settings(run.get("states", {}))
        lines = []
        if self.lr_schedulers and "lr_scheduler" not in exclude:
            stored = _one_for_each(run.get("lr_scheduler", []), len(states))
            lines = schedules.replaced_settings(self.lr_schedulers, stored, own)
        if (optimizer := self.optimizer) is not None and "optimizer" not in exclude:
            of_groups = optimizer.replaced_arguments(run["optimizer"], schedules.changed_settings(states) | own)
            self._log_replaced("optimizer", of_groups)
            if self.lr_schedulers and "lr_scheduler" not in exclude:
                lines += optimizer.replaced_settings(run["optimizer"], schedules.kept_in_groups(states))
        self._log_replaced("lr_scheduler", list(dict.fromkeys(lines)))

    def _log_replaced(self, name: str, lines: list[str]) -> None:
        if lines:
            title = name.replace("_", " ")
            logger.warning(
                "the %s goes on with the checkpoint's %s; with checkpoint.resume.exclude = [%s] it starts afresh with "
                "this run's", title, listed(lines), json.dumps(name)
            )  # fmt: skip

    def _restorers(
        self,
        optimizer: OptimizerState | None,
        run: dict[str, Any],
        rank: RankState,
        tensors: StateDict,
        exclude: frozenset[str],
    ) -> dict[str, Callable[[], None] | None]:
        """Return for each component of this run a function that restores it, or None if the checkpoint lacks it."""
        out: dict[str, Callable[[], None] | None] = {}
        if optimizer is not None:
            own = {k: v for k, v in tensors.items() if k.startswith(OPTIMIZER)}
            # a schedule of torch that starts afresh does so from this run's rate
            states = [scheduler.state_dict() for scheduler in self.lr_schedulers]
            afresh = "lr_scheduler" in exclude and any(type(state) is dict and "_last_lr" in state for state in states)
            kept = schedules.changed_settings(states) | schedules.GROUP_SETTINGS if afresh else frozenset()
            kept |= schedules.with_rate_of_start(self.own_settings(run.get("states", {})))
            out["optimizer"] = (lambda: optimizer.apply(own, run["optimizer"], kept)) if "optimizer" in run else None
        if self.lr_schedulers:
            of_schedulers = _one_for_each(run.get("lr_scheduler", []), len(self.lr_schedulers))
            out["lr_scheduler"] = partial(self._load_schedulers, of_schedulers) if of_schedulers else None
        if self.states:
            stored = run.get("states", {})
            complete = set(self.states) <= set(stored)
            out["states"] = partial(self._load_states, stored, tensors) if complete else None
        if self.dataloader is not None and "dataloader" not in exclude:
            positions = rank.positions
            out["dataloader"] = restorer(self.dataloader, self.data_rank, positions) if positions else None
        out["rng"] = partial(self.rng.load_state_dict, rank.rng) if rank.rng else partial(self._reseed, run["step"])
        return out

    def _load_schedulers(self, stored: list[dict[str, Any]]) -> None:
        for scheduler, state in zip(self.lr_schedulers, stored, strict=True):
            try:
                scheduler.load_state_dict(state)
            except Exception as error:
                raise LoadMismatchError(
                    f"{type(scheduler).__qualname__}.load_state_dict() does not take the state that was stored: "
                    f"{type(error).__name__}: {error}. Build the scheduler as in the run that saved, or start it "
                    'afresh: checkpoint.resume.exclude = ["lr_scheduler"]'
                ) from error

    def _load_states(self, stored: dict[str, Any], tensors: StateDict) -> None:
        for name, state in self.states.items():
            state.load_state_dict(give_tensors(stored[name], tensors))

    def _reseed(self, step: int) -> None:
        """Seed the generators from this rank's own seed and the step, when the layout of ranks has changed.

        So ranks that were seeded alike at the start of the process stay alike, and others stay different.
        """
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (step + 1)) % 2**63
        logger.warning(
            "random generators: the checkpoint was saved by another layout of ranks, so their states mean nothing "
            "here; reseeded with %d, from this rank's seed and step %d",
            seed,
            step,
        )
        self.rng.reseed(seed)


def taken_state(name: str, state: Stateful, into: StateDict) -> Any:
    """Return a user state with its tensors moved to `into`, as `take_tensors` does.

    Raises: StateEncodingError for tensors that would come back as something else.
    """
    value = state.state_dict()
    if faults := [f"{path}: {fault}" for path, fault in unlike_plain(value, f"{STATES}{name}")]:
        raise StateEncodingError(f"{listed(faults)}. Return plain, dense tensors: .detach().clone()", faults[0])
    return take_tensors(value, f"{STATES}{name}", into)


def _faults_of_state(name: str, state: Stateful) -> list[str]:
    """Return why a user state cannot be saved, as far as it returns one before the first step."""
    try:
        typed_json.encode(taken_state(name, state, {}), f"{STATES}{name}")
    except StateEncodingError as error:
        return [str(error)]
    except Exception as error:  # it may have no state yet; the first save asks again
        logger.debug("states[%r] returns no state before the first step: %s", name, error)
    return []


def _is_stateful(value: Any) -> bool:
    methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _one_for_each(stored: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return a state for each of `count` schedulers; of a different number stored, copies if all are equal, or nothing.

    Another layout of ranks may have more or fewer of the same schedulers.
    """
    if len(stored) == count:
        return stored
    alike = len({typed_json.dumps(state) for state in stored}) == 1
    return [copy.deepcopy(stored[0]) for _ in range(count)] if alike else []


def _room_for(info: TensorInfo, live: torch.Tensor | None) -> torch.Tensor:
    """Return a new tensor for stored state, sharded like the live one."""
    if isinstance(live, DTensor) and tuple(live.shape) == info.shape:
        return torch.empty_like(live, dtype=info.dtype)
    return torch.empty(info.shape, dtype=info.dtype)


def _local_bytes(value: Any, depth: int = 0) -> int:
    """Return the bytes that this rank holds of the tensors in nested state."""
    if isinstance(value, torch.Tensor):
        return local_tensor(value).nbytes
    if depth == MAX_DEPTH:
        return 0
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_local_bytes(item, depth + 1) for item in items)
