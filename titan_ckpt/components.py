"""What a checkpoint holds besides model weights, gathered from a run's objects and given back to them.

Owns the closed vocabulary of components and the split in tensors, state of the run (once) and state of a rank (per
rank). Knows no files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.config import Component
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.optimizer_state import PREFIX as OPTIMIZER
from titan_ckpt.optimizer_state import OptimizerState
from titan_ckpt.rng import RandomState
from titan_ckpt.tensors import TensorInfo, blocks_of
from titan_ckpt.types import StateDict, Stateful

logger = logging.getLogger(__name__)

COMPONENTS: tuple[str, ...] = get_args(Component)
MODEL = "model."
STATES = "states."


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


@dataclass(frozen=True)
class RunState:
    """Everything of a run that a resume needs, besides model weights."""

    model: ModelWrapper
    optimizers: Sequence[Optimizer] = ()
    lr_schedulers: Sequence[Stateful] = ()
    dataloader: Stateful | None = None
    states: Mapping[str, Stateful] = field(default_factory=dict)
    rng: RandomState = field(default_factory=RandomState)

    def __post_init__(self) -> None:
        names = self.model.parameter_names()
        object.__setattr__(self, "_optimizer", OptimizerState(self.optimizers, names) if self.optimizers else None)

    @property
    def optimizer(self) -> OptimizerState | None:
        found: OptimizerState | None = self._optimizer  # type: ignore[attr-defined]
        return found

    def snapshot(self, step: int, model: StateDict) -> Snapshot:
        """Return the run at `step`; tensors alias live memory, the rest is taken now."""
        tensors: StateDict = {MODEL + fqn: value for fqn, value in model.items()}
        run: dict[str, Any] = {"step": step}
        rank: dict[str, Any] = {"rng": self.rng.state_dict()}
        components = ["model", "rng"]
        if extra := self.model.extra_state():
            run["model"] = extra
        if self.optimizer is not None:
            components.append("optimizer")
            optimizer_tensors, run["optimizer"] = self.optimizer.split()
            tensors |= optimizer_tensors
        if self.lr_schedulers:
            components.append("lr_scheduler")
            run["lr_scheduler"] = [s.state_dict() for s in self.lr_schedulers]
        if self.dataloader is not None:
            components.append("dataloader")
            rank["dataloader"] = self.dataloader.state_dict()
        if self.states:
            components.append("states")
            run["states"] = {
                name: _take_tensors(state.state_dict(), f"{STATES}{name}", tensors)
                for name, state in self.states.items()
            }
        parameters = {MODEL + fqn for fqn in self.model.parameter_names().values()}
        volatile = frozenset(n for n in tensors if n not in parameters and not n.startswith(OPTIMIZER))
        return Snapshot(tensors, run, rank, tuple(c for c in COMPONENTS if c in components), volatile)

    def expected_bytes(self, model: StateDict) -> int:
        """Estimate this rank's bytes in a save, counting two float32 moments for parameters not yet stepped."""
        tensors = self.snapshot(0, model).tensors
        total = sum(block.data.nbytes for value in tensors.values() for block in blocks_of(value))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                fresh = [p for p in group["params"] if p not in optimizer.state]
                total += sum(8 * block.data.numel() for p in fresh for block in blocks_of(p))
        return total

    def destinations(self, available: Mapping[str, TensorInfo], exclude: frozenset[str]) -> StateDict:
        """Return a tensor to fill for every stored tensor that is not the model's; nothing is attached yet.

        Raises: LoadMismatchError where the optimizer's state does not fit.
        """
        out: StateDict = {}
        if self.optimizer is not None and "optimizer" not in exclude:
            out |= self.optimizer.destinations({k: v for k, v in available.items() if k.startswith(OPTIMIZER)})
        if self.states and "states" not in exclude:
            live: StateDict = {}
            for name, state in self.states.items():
                _take_tensors(state.state_dict(), f"{STATES}{name}", live)
            for key, info in available.items():
                if key.startswith(STATES) and key.removeprefix(STATES).split(".", 1)[0] in self.states:
                    like = live.get(key)
                    if isinstance(like, DTensor) and tuple(like.shape) == info.shape:
                        out[key] = torch.empty_like(like, dtype=info.dtype)
                    else:
                        out[key] = torch.empty(info.shape, dtype=info.dtype)
        return out

    def apply(
        self, run: dict[str, Any], rank: dict[str, Any] | None, tensors: StateDict, exclude: frozenset[str]
    ) -> None:
        """Give everything that was read back to its owner; the random generators last.

        `rank` is None where the checkpoint was written by another number of ranks.
        Raises: LoadMismatchError listing what this run has and the checkpoint lacks; nothing is applied then.
        """
        steps = self._restorers(run, rank, tensors)
        wanted = {name: restore for name, restore in steps.items() if name not in exclude}
        lacking = [name for name, restore in wanted.items() if restore is None]
        if lacking:
            raise LoadMismatchError(
                f"the checkpoint has no state for: {', '.join(lacking)}. It was saved by a run without them, or by "
                f"another number of ranks; to start afresh with them: checkpoint.resume.exclude = {json.dumps(lacking)}"
            )
        if "model" in run:
            self.model.load_extra_state(run["model"])
        for restore in wanted.values():
            assert restore is not None
            restore()

    def _restorers(
        self, run: dict[str, Any], rank: dict[str, Any] | None, tensors: StateDict
    ) -> dict[str, Callable[[], None] | None]:
        """Return, for each component this run has, how to restore it, or None where the checkpoint lacks it."""
        out: dict[str, Callable[[], None] | None] = {}
        optimizer = self.optimizer
        if optimizer is not None:
            own = {k: v for k, v in tensors.items() if k.startswith(OPTIMIZER)}
            out["optimizer"] = (lambda: optimizer.apply(own, run["optimizer"])) if "optimizer" in run else None
        if self.lr_schedulers:
            fits = len(run.get("lr_scheduler", [])) == len(self.lr_schedulers)
            out["lr_scheduler"] = (lambda: self._load_schedulers(run["lr_scheduler"])) if fits else None
        if self.states:
            there = run.get("states", {})
            full = {n: _give_tensors(v, tensors) for n, v in there.items() if n in self.states}
            out["states"] = (lambda: self._load_states(full)) if set(self.states) <= set(there) else None
        dataloader = self.dataloader
        if dataloader is not None:
            known = rank is not None and "dataloader" in rank
            out["dataloader"] = (lambda: dataloader.load_state_dict((rank or {})["dataloader"])) if known else None
        out["rng"] = (lambda: self.rng.load_state_dict(rank["rng"])) if rank is not None else self._reseed(run["step"])
        return out

    def _load_schedulers(self, stored: list[dict[str, Any]]) -> None:
        for scheduler, state in zip(self.lr_schedulers, stored, strict=True):
            scheduler.load_state_dict(state)

    def _load_states(self, stored: dict[str, Any]) -> None:
        for name, state in self.states.items():
            state.load_state_dict(stored[name])

    def _reseed(self, step: int) -> Callable[[], None]:
        """Another number of ranks has no generator state to take over: derive one from the seed and the step."""

        def reseed() -> None:
            seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (step + 1)) % 2**63
            logger.warning("random generators: the checkpoint has another number of ranks; reseeded with %d", seed)
            torch.manual_seed(seed)

        return reseed


def _take_tensors(value: Any, path: str, into: StateDict) -> Any:
    """Return `value` with every tensor of a nested dict moved to `into`, leaving its name behind."""
    if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.dim()):
        into[path] = value.detach()
        return {"$tensor_file": path}
    if type(value) is dict:
        return {k: _take_tensors(v, f"{path}.{k}", into) for k, v in value.items()}
    return value


def _give_tensors(value: Any, tensors: StateDict) -> Any:
    if type(value) is dict:
        if set(value) == {"$tensor_file"}:
            return tensors[value["$tensor_file"]]
        return {k: _give_tensors(v, tensors) for k, v in value.items()}
    return value
