"""What a checkpoint holds besides model weights, gathered from a run's objects and given back to them.

Owns the closed vocabulary of components and the split in tensors, state of the run (once) and state of a rank (per
rank). Knows no files.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt import typed_json
from titan_ckpt.config import Component
from titan_ckpt.data_position import DataRank, restorer
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError, SaveError, StateEncodingError
from titan_ckpt.model_wrapper import ModelWrapper, without_memory
from titan_ckpt.nested_tensors import MAX_DEPTH, give_tensors, names_of, take_tensors
from titan_ckpt.optimizer_state import PREFIX as OPTIMIZER
from titan_ckpt.optimizer_state import OptimizerState
from titan_ckpt.ownership import describe
from titan_ckpt.rng import RandomState
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.tensors import TensorInfo, blocks_of
from titan_ckpt.types import StateDict, Stateful

logger = logging.getLogger(__name__)

COMPONENTS: tuple[str, ...] = get_args(Component)
MODEL = "model."
STATES = "states."
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one step: live tensors by file name, and what typed JSON will hold."""

    tensors: StateDict
    run: dict[str, Any]
    """Once per checkpoint: step, hyperparameters, schedulers, states."""
    rank: dict[str, Any]
    """Per rank: random generators, dataloader position."""
    components: tuple[str, ...]
    volatile: frozenset[str] = frozenset()
    """Tensors that a forward pass may change: buffers and user states, as opposed to what only an optimizer changes."""

    def frozen_tensors(self) -> StateDict:
        """Return the tensors with copies of the volatile ones: the rest stays as it is until an optimizer steps."""
        return {name: value.clone() if name in self.volatile else value for name, value in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Counters:
    """What a run holds besides weights and optimizer state; the parts as in Snapshot."""

    run: dict[str, Any]
    rank: dict[str, Any]
    tensors: StateDict


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a step, as far as the begin of the next one would overwrite it."""

    step: int
    counters: Counters
    versions: dict[str, int]
    """Of state too large to be copied at every step: how often each tensor had been changed."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank takes over of what ranks stored for themselves."""

    rng: dict[str, Any] | None
    """Generator states; None where another layout of ranks stored them, so that none is this rank's."""
    positions: Sequence[Any] = ()
    """The dataloader's state of each data-parallel rank, in their order; empty where none was stored."""


@dataclass(frozen=True)
class RunState:
    """Everything of a run that a resume needs, besides model weights."""

    model: ModelWrapper
    optimizers: Sequence[Optimizer] = ()
    lr_schedulers: Sequence[Stateful] = ()
    dataloader: Stateful | None = None
    states: Mapping[str, Stateful] = field(default_factory=dict)
    rng: RandomState = field(default_factory=RandomState)
    rank: int = 0
    world_size: int = 1
    left_out: frozenset[str] = frozenset()
    """Components that are neither saved nor loaded."""

    def __post_init__(self) -> None:
        """Raises: LoadMismatchError for optimizers that do not train this model's parameters."""
        _ = self.optimizer

    @property
    def optimizer(self) -> OptimizerState | None:
        """Return the optimizers' state under the names that parameters have now: a model may replace them."""
        return OptimizerState(self.optimizers, self.model.parameter_names()) if self.optimizers else None

    @property
    def data_rank(self) -> DataRank:
        """Return which share of the data this process reads."""
        return DataRank.of(self.dataloader, self.rank, self.world_size)

    @functools.cached_property
    def layout(self) -> str:
        """Return a digest of what decides which random numbers this rank draws: its shards and its data."""
        names = self.model.parameter_names()
        sharded: StateDict = {fqn: value for value, fqn in names.items() if isinstance(value, DTensor)}
        at = self.data_rank
        facts = [self.world_size, self.rank, at.rank, at.size, sorted(names.values()), describe(sharded)]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

    def snapshot(self, step: int, model: StateDict) -> Snapshot:
        """Return the run at `step`; tensors alias live memory, the rest is taken now.

        Raises: StateEncodingError for tensors that hold no values.
        """
        if names := without_memory(model):
            raise StateEncodingError(
                f"{len(names)} tensors of the model have no memory yet, such as {names[0]}: materialise a model that "
                "was built on meta (to_empty), and run a lazy one once, before it is saved",
                names[0],
            )
        tensors: StateDict = {MODEL + fqn: value for fqn, value in model.items()}
        run: dict[str, Any] = {"step": step}
        components = ["model", "rng"]
        if "model" not in self.left_out and (extra := self.model.extra_state()):
            run["model"] = extra
        if (optimizer := self.optimizer) is not None:
            components.append("optimizer")
            optimizer_tensors, run["optimizer"] = optimizer.split()
            tensors |= optimizer_tensors
        if self.lr_schedulers:
            components.append("lr_scheduler")
        if self.dataloader is not None:
            components.append("dataloader")
        if self.states:
            components.append("states")
        counters = self._counters()
        run |= counters.run
        tensors |= counters.tensors
        rank = counters.rank
        parameters = {MODEL + fqn for fqn in self.model.parameter_names().values()}
        volatile = frozenset(n for n in tensors if n not in parameters and not n.startswith(OPTIMIZER))
        held = tuple(c for c in COMPONENTS if c in components and c not in self.left_out)
        return Snapshot(tensors, run, rank, held, volatile)

    def _counters(self) -> Counters:
        """Take what is neither weights nor optimizer state; the generators last, for the others may draw from them."""
        run: dict[str, Any] = {}
        rank: dict[str, Any] = {}
        tensors: StateDict = {}
        if self.lr_schedulers:
            run["lr_scheduler"] = [s.state_dict() for s in self.lr_schedulers]
        if self.dataloader is not None:
            rank["data_parallel"] = [self.data_rank.rank, self.data_rank.size]
            rank["dataloader"] = self.dataloader.state_dict()
        if self.states:
            run["states"] = {
                name: take_tensors(state.state_dict(), f"{STATES}{name}", tensors)
                for name, state in self.states.items()
            }
        rank["layout"] = self.layout
        if "rng" not in self.left_out:
            rank["rng"] = self.rng.state_dict()
        return Counters(run, rank, tensors)

    @functools.cached_property
    def _has_extra_state(self) -> bool:
        return "model" not in self.left_out and bool(self.model.extra_state_names())

    def mark(self, step: int) -> Mark:
        """Note what a step that is now begun will change before the optimizer's step does, so that it can be undone.

        Cheap: generators, counters, and copies of buffers and small state; of large state, whether it was changed.
        """
        counters = self._counters()
        run = counters.run | ({"model": self.model.extra_state()} if self._has_extra_state else {})
        # State dicts may alias what goes on changing; generator states are copies, and large.
        rank = {name: value if name == "rng" else copy.deepcopy(value) for name, value in counters.rank.items()}
        marked = Counters(copy.deepcopy(run), rank, {})
        volatile = counters.tensors | {MODEL + fqn: value for fqn, value in self.model.buffers().items()}
        versions = {}
        for name, value in volatile.items():
            if value.nbytes <= _COPIED_BYTES:
                marked.tensors[name] = value.clone()
            else:
                versions[name] = value._version  # noqa: SLF001 - torch has no other name for it
        return Mark(step, marked, versions)

    def snapshot_of(self, mark: Mark, model: StateDict) -> Snapshot:
        """Return the run at a marked step that no optimizer has stepped from since.

        Raises: SaveError for large state that has been changed since.
        """
        now = self.snapshot(mark.step, model)
        large = {name: now.tensors[name] for name in mark.versions if name in now.tensors}
        if changed := [n for n, value in large.items() if value._version != mark.versions[n]]:  # noqa: SLF001
            raise SaveError(f"step {mark.step} can no longer be saved: {', '.join(changed[:8])} changed after its end")
        tensors = now.tensors | {n: value for n, value in mark.counters.tensors.items() if n in now.tensors}
        return Snapshot(tensors, now.run | mark.counters.run, mark.counters.rank, now.components, now.volatile)

    @collector_held()
    def expected_bytes(self, model: StateDict) -> int:
        """Estimate this rank's bytes in a save, counting two float32 moments for parameters not yet stepped.

        Asks no dataloader and no user state: that may move generators, and they are small or like the model.
        """
        total = _local_bytes(model)
        for one in self.optimizers:
            total += sum(_local_bytes(state) for state in one.state.values())
            for group in one.param_groups:
                fresh = [p for p in group["params"] if p not in one.state]
                total += sum(8 * block.data.numel() for p in fresh for block in blocks_of(p))
        return total

    def check(self, run: dict[str, Any], rank: RankState, exclude: frozenset[str]) -> None:
        """Make sure that everything this run has can be restored; changes nothing.

        Raises: LoadMismatchError listing what this run has and the checkpoint lacks, or what cannot be carried over.
        """
        optimizer = self.optimizer
        steps = self._restorers(optimizer, run, rank, {}, exclude)
        lacking = [name for name, restore in steps.items() if restore is None and name not in exclude]
        if lacking:
            raise LoadMismatchError(
                f"the checkpoint has no state for: {', '.join(lacking)}. It was saved by a run without them, or by "
                f"another number of ranks; to start afresh with them: checkpoint.resume.exclude = {json.dumps(lacking)}"
            )
        if optimizer is not None and "optimizer" not in exclude:
            optimizer.match(run["optimizer"])
        absent = [name for name in self.model.extra_state_names() if name not in run.get("model", {})]
        if absent and "model" not in exclude:
            raise LoadMismatchError(
                f"the checkpoint lacks the extra state of {len(absent)} modules: {', '.join(absent[:8])}. Was it saved "
                "from a different model?"
            )

    def destinations(
        self, available: Mapping[str, TensorInfo], run: dict[str, Any], exclude: frozenset[str]
    ) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for every stored one that is not the model's; nothing is attached yet.

        Also returns the keys of optimizer state that no parameter here is for; another pipeline stage's, perhaps.
        Raises: CorruptCheckpointError for a state whose tensors are not there.
        """
        out: StateDict = {}
        strangers: list[str] = []
        if "optimizer" not in exclude:
            stored = {k: v for k, v in available.items() if k.startswith(OPTIMIZER)}
            optimizer = self.optimizer
            out, strangers = ({}, list(stored)) if optimizer is None else optimizer.destinations(stored)
        if "states" not in exclude:
            for name, state in self.states.items():
                wanted = list(names_of(run.get("states", {}).get(name)))
                if lost := [key for key in wanted if key not in available]:
                    raise CorruptCheckpointError(f"state {name!r}: its tensors {', '.join(lost[:8])} are not stored")
                live: StateDict = {}
                if wanted:
                    take_tensors(state.state_dict(), f"{STATES}{name}", live)
                out |= {key: _room_for(available[key], live.get(key)) for key in wanted}
        return out, strangers

    @collector_held()
    def apply(self, run: dict[str, Any], rank: RankState, tensors: StateDict, exclude: frozenset[str]) -> None:
        """Give everything that was read back to its owner, after `check`; the random generators last."""
        if "model" not in exclude:
            self.model.load_extra_state(run.get("model", {}))
        for name, restore in self._restorers(self.optimizer, run, rank, tensors, exclude).items():
            if name not in exclude:
                assert restore is not None, "check() comes first"
                restore()

    def _restorers(
        self,
        optimizer: OptimizerState | None,
        run: dict[str, Any],
        rank: RankState,
        tensors: StateDict,
        exclude: frozenset[str],
    ) -> dict[str, Callable[[], None] | None]:
        """Return, for each component this run has, how to restore it, or None where the checkpoint lacks it."""
        out: dict[str, Callable[[], None] | None] = {}
        if optimizer is not None:
            own = {k: v for k, v in tensors.items() if k.startswith(OPTIMIZER)}
            out["optimizer"] = (lambda: optimizer.apply(own, run["optimizer"])) if "optimizer" in run else None
        if self.lr_schedulers:
            schedules = _one_for_each(run.get("lr_scheduler", []), len(self.lr_schedulers))
            out["lr_scheduler"] = (lambda: self._load_schedulers(schedules)) if schedules else None
        if self.states:
            there = run.get("states", {})
            complete = set(self.states) <= set(there)
            out["states"] = (lambda: self._load_states(there, tensors)) if complete else None
        if self.dataloader is not None and "dataloader" not in exclude:
            known = bool(rank.positions)
            out["dataloader"] = restorer(self.dataloader, self.data_rank, rank.positions) if known else None
        generators = rank.rng
        out["rng"] = (lambda: self.rng.load_state_dict(generators)) if generators else self._reseed(run["step"])
        return out

    def _load_schedulers(self, stored: list[dict[str, Any]]) -> None:
        for scheduler, state in zip(self.lr_schedulers, stored, strict=True):
            scheduler.load_state_dict(state)

    def _load_states(self, stored: dict[str, Any], tensors: StateDict) -> None:
        for name, state in self.states.items():
            state.load_state_dict(give_tensors(stored[name], tensors))

    def _reseed(self, step: int) -> Callable[[], None]:
        """Another layout has no generator states to take over: derive them from each rank's own seed and the step.

        So ranks that were seeded alike at the start of the process stay alike, and others stay different.
        """

        def reseed() -> None:
            seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (step + 1)) % 2**63
            logger.warning(
                "random generators: the checkpoint was saved by another layout of ranks, so their states mean nothing "
                "here; reseeded with %d, from this rank's seed and step %d",
                seed,
                step,
            )
            self.rng.reseed(seed)

        return reseed


def _one_for_each(stored: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return a state for each of `count` schedulers, or nothing: another layout may have more or fewer of the same."""
    if len(stored) == count:
        return stored
    alike = len({typed_json.dumps(state) for state in stored}) == 1
    return [copy.deepcopy(stored[0]) for _ in range(count)] if alike else []


def _room_for(info: TensorInfo, live: torch.Tensor | None) -> torch.Tensor:
    """Return a new tensor for stored state, sharded as the live one is."""
    if isinstance(live, DTensor) and tuple(live.shape) == info.shape:
        return torch.empty_like(live, dtype=info.dtype)
    return torch.empty(info.shape, dtype=info.dtype)


def _local_bytes(value: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors in an optimizer's state, of sharded ones those of this rank."""
    if isinstance(value, torch.Tensor):
        return (value._local_tensor if isinstance(value, DTensor) else value).nbytes  # noqa: SLF001 - as blocks_of
    if depth == MAX_DEPTH:
        return 0
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_local_bytes(item, depth + 1) for item in items)
