"""The state of a run besides model weights: gathered from the run's objects, and given back to them.

Owns the closed set of components, and the split into tensors, state of the run (stored once) and state of a rank
(stored by each). Knows no files.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
import xxhash
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.components.data_position import DataRank, restorer
from titan_ckpt.components.files import STATES
from titan_ckpt.components.optimizer import PREFIX as OPTIMIZER
from titan_ckpt.components.optimizer import OptimizerState
from titan_ckpt.components.optimizer_rehearsal import rehearse
from titan_ckpt.components.snapshot import Mark, RankState, Snapshot
from titan_ckpt.config import Component
from titan_ckpt.distributed.sharing import describe
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError, SaveError, StateEncodingError, listed
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import TensorInfo, blocks_of, local_tensor
from titan_ckpt.geometry.nested import MAX_DEPTH, give_tensors, names_of, take_tensors
from titan_ckpt.rng import RandomState
from titan_ckpt.types import StateDict, Stateful
from titan_ckpt.weights.own_state import plain_attributes
from titan_ckpt.weights.stored_names import MODEL
from titan_ckpt.weights.wrapper import ModelState, ModelWrapper, without_memory

logger = logging.getLogger(__name__)

COMPONENTS: tuple[str, ...] = get_args(Component)
_COPIED_BYTES = 1 << 20
_MOMENTA = frozenset({"momentum", "betas"})


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

    def __post_init__(self) -> None:
        """Raises: LoadMismatchError for optimizers that do not train this model's parameters."""
        objects = {"optimizer": "optimizers", "lr_scheduler": "lr_schedulers", "states": "states"}
        for component in objects.keys() & self.left_out:
            object.__setattr__(self, objects[component], {} if component == "states" else ())
        if "dataloader" in self.left_out:
            object.__setattr__(self, "dataloader", None)
        _ = self.optimizer
        scalers = [s for o in self.optimizers if isinstance(s := getattr(o, "scaler", None), GradScaler)]
        scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        if "states" not in self.left_out and any(s not in list(self.states.values()) for s in scalers):
            raise LoadMismatchError(
                "an optimizer scales gradients by a GradScaler that would not be saved: pass it, "
                'states={"scaler": accelerator.scaler}'
            )

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

    def rehearse(self) -> None:
        """Check before the first step that optimizers and schedulers can be saved and resumed exactly.

        Raises: StateEncodingError listing every one that cannot.
        """
        faults = rehearse(self.optimizers)
        if not faults and (optimizer := self.optimizer) is not None:
            faults = typed_json.problems_of(optimizer.split()[1], "optimizer")
        for i, scheduler in enumerate(self.lr_schedulers):
            try:
                typed_json.encode(scheduler.state_dict(), f"lr_scheduler[{i}]")
            except StateEncodingError as error:
                faults.append(f"{type(scheduler).__module__}.{type(scheduler).__qualname__}: {error}")
        if faults:
            raise StateEncodingError(f"{len(faults)} object(s) of this run cannot be saved: " + "\n".join(faults))

    def check_stepped(self) -> None:
        """Check after the first step that the state of the optimizers can be stored. Raises: StateEncodingError."""
        if (optimizer := self.optimizer) is not None:
            typed_json.encode(optimizer.split()[1], "optimizer")

    def snapshot(self, step: int, model: ModelState, *, model_only: bool = False) -> Snapshot:
        """Return the run at `step`. Tensors alias live memory; everything else has the values of this moment.

        `model_only`: the model and its extra state, nothing else.

        Raises: StateEncodingError for tensors that hold no values.
        """
        if names := without_memory(model.tensors):
            raise StateEncodingError(
                f"{len(names)} tensors of the model have no memory yet, such as {names[0]}: materialise a model that "
                "was built on meta (to_empty), and run a lazy one once, before it is saved",
                names[0],
            )
        tensors: StateDict = _named(model)
        run: dict[str, Any] = {"step": step}
        if "model" not in self.left_out and (extra := self.model.extra_state() | model.values):
            run["model"] = extra
        parameters = {MODEL + fqn for fqn in self.model.parameter_names().values()}
        parameters |= {MODEL + fqn for fqn in model.made_of_parameters()}
        made = frozenset(MODEL + fqn for fqn in model.made)
        if model_only:
            volatile = frozenset(n for n in tensors if not _is_in(n, parameters))
            return Snapshot(tensors, run, {"layout": self.layout}, ("model",), volatile, made)
        if (optimizer := self.optimizer) is not None:
            optimizer_tensors, run["optimizer"] = optimizer.split()
            tensors |= optimizer_tensors
        counters = self._counters()
        run |= counters.run
        tensors |= counters.tensors
        volatile = frozenset(n for n in tensors if not n.startswith(OPTIMIZER) and not _is_in(n, parameters))
        has = {
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "dataloader": self.dataloader is not None,
            "states": self.states,
        }
        components = tuple(c for c in COMPONENTS if has.get(c, True) and c not in self.left_out)
        return Snapshot(tensors, run, counters.rank, components, volatile, made)

    def large_tensors(self, model: ModelState) -> StateDict:
        """Return the tensors of the model and the optimizers, as `snapshot` does; asks nothing else of the run."""
        optimizer = self.optimizer
        return _named(model) | (optimizer.split()[0] if optimizer is not None else {})

    def _counters(self) -> Snapshot:
        """Return state besides weights and optimizer state; generators last, because the others may use them."""
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
        return Snapshot(tensors, run, rank)

    @functools.cached_property
    def _has_extra_state(self) -> bool:
        return "model" not in self.left_out and bool(self.model.extra_state_names())

    def mark(self, step: int) -> Mark:
        """Record the state that the next step changes before `optimizer.step()`, so that this step can still be saved.

        Cheap: it copies generators, counters, buffers and small state, and takes the version counters of large state.
        """
        counters = self._counters()
        run = counters.run | ({"model": self.model.extra_state()} if self._has_extra_state else {})
        # State dicts may alias live state; generator states are copies already, and large.
        rank = {name: value if name == "rng" else copy.deepcopy(value) for name, value in counters.rank.items()}
        marked = Snapshot({}, copy.deepcopy(run), rank)
        volatile = counters.tensors | {MODEL + fqn: value for fqn, value in self.model.buffers().items()}
        versions = {}
        for name, value in volatile.items():
            if value.nbytes <= _COPIED_BYTES:
                marked.tensors[name] = value.clone()
            else:
                versions[name] = value._version  # noqa: SLF001 - torch has no other name for it
        return Mark(step, marked, versions, plain_attributes(self.model.parts))

    @contextmanager
    def as_marked(self, mark: Mark) -> Iterator[None]:
        """Put the marked copies of buffers into the live ones, so that the model's own code returns the marked step."""
        copies = mark.counters.tensors
        pairs = [(v, copies[MODEL + fqn]) for fqn, v in self.model.buffers().items() if MODEL + fqn in copies]
        now = [value.clone() for value, _ in pairs]
        with torch.no_grad():
            for value, marked in pairs:
                value.copy_(marked)
            try:
                yield
            finally:
                for (value, _), own in zip(pairs, now, strict=True):
                    value.copy_(own)

    def snapshot_of(self, mark: Mark, model: ModelState) -> Snapshot:
        """Return the run at a marked step, if no optimizer has stepped since. `model`: its state, read `as_marked`.

        Raises: SaveError for large state that has changed since.
        """
        now = self.snapshot(mark.step, model)
        live = now.tensors | {MODEL + fqn: value for own in model.own for fqn, value in own.hidden.items()}
        large = {name: live[name] for name in mark.versions if name in live}
        changed = [n for n, value in large.items() if value._version != mark.versions[n]]  # noqa: SLF001
        attributes = plain_attributes(self.model.parts)
        within = tuple(own.prefix for own in model.own if own.made)
        changed += [n for n, marked in mark.attributes.items() if n.startswith(within) and attributes.get(n) != marked]
        if changed:
            raise SaveError(
                f"step {mark.step} can no longer be saved: {listed(changed, ', ', ' ')} changed after its end"
            )
        stored = now.tensors.keys() - now.made
        tensors = now.tensors | {n: value for n, value in mark.counters.tensors.items() if n in stored}
        run = now.run | mark.counters.run
        if "model" in now.run:
            run["model"] = now.run["model"] | mark.counters.run.get("model", {})
        return Snapshot(tensors, run, mark.counters.rank, now.components, now.volatile, now.made)

    @gc_paused()
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
                f"the checkpoint lacks the extra state of {len(absent)} modules: {listed(absent, ', ', ' ')}. Was it "
                "saved from a different model?"
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
                    take_tensors(state.state_dict(), f"{STATES}{name}", live)
                out |= {key: _room_for(available[key], live.get(key)) for key in wanted}
        return out, strangers

    def may_be_live(self, destinations: Collection[str]) -> set[str]:
        """Return the names of destinations that may be tensors which an optimizer holds now."""
        holds = any(optimizer.state for optimizer in self.optimizers)
        return {name for name in destinations if holds and name.startswith(OPTIMIZER)}

    @gc_paused()
    def apply(self, run: dict[str, Any], rank: RankState, tensors: StateDict, exclude: frozenset[str]) -> None:
        """Give all state that was read to its owners, after `check`; random generators last."""
        if "model" not in exclude:
            self.model.load_extra_state(run.get("model", {}))
        if "optimizer" not in exclude and self.rank == 0:
            self._log_replaced_settings(run)
        for name, restore in self._restorers(self.optimizer, run, rank, tensors, exclude).items():
            if name not in exclude:
                assert restore is not None, "check() comes first"
                restore()

    def _log_replaced_settings(self, run: dict[str, Any]) -> None:
        """Say which settings of this run's optimizers those of the checkpoint replace."""
        scheduled = _scheduled(run.get("lr_scheduler", []))
        replaced = [] if self.optimizer is None else self.optimizer.replaced_settings(run["optimizer"], scheduled)
        if replaced:
            logger.warning("the optimizer goes on with the checkpoint's %s", listed(replaced))

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
            out["optimizer"] = (lambda: optimizer.apply(own, run["optimizer"])) if "optimizer" in run else None
        if self.lr_schedulers:
            schedules = _one_for_each(run.get("lr_scheduler", []), len(self.lr_schedulers))
            out["lr_scheduler"] = partial(self._load_schedulers, schedules) if schedules else None
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


def _one_for_each(stored: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return a state for each of `count` schedulers; of a different number stored, copies if all are equal, or nothing.

    Another layout of ranks may have more or fewer of the same schedulers.
    """
    if len(stored) == count:
        return stored
    alike = len({typed_json.dumps(state) for state in stored}) == 1
    return [copy.deepcopy(stored[0]) for _ in range(count)] if alike else []


def _scheduled(states: Sequence[Any]) -> frozenset[str]:
    """Return the settings of an optimizer that schedulers change, by their states; some of torch change momentum, too.

    Source: torch/optim/lr_scheduler.py, `cycle_momentum` of CyclicLR and OneCycleLR.
    """
    inner = [_scheduled(state["_schedulers"]) for state in states if type(state) is dict and "_schedulers" in state]
    cycle = any(type(state) is dict and state.get("cycle_momentum") for state in states)
    return frozenset({"lr"} if states else ()).union(_MOMENTA if cycle else (), *inner)


def _named(model: ModelState) -> StateDict:
    return {MODEL + fqn: value for fqn, value in model.tensors.items()}


def _is_in(name: str, parameters: Collection[str]) -> bool:
    """Return whether a tensor is one of these parameters, or inside of one."""
    while name not in parameters:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True


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
