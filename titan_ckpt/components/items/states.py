"""Components that are values alone: extra state of modules, states of the user's, and random number generators."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.items.item import STATES, FlatFolder, Item, Leaves, OwnItem, Stored, flattened, nested
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadMismatchError,
    StateEncodingError,
    counted,
    listed,
)
from titan_ckpt.geometry.chunks import TensorInfo, local_chunks, local_tensor
from titan_ckpt.geometry.nested import give_tensors, names_of, take_tensors, unlike_plain
from titan_ckpt.process import RandomState
from titan_ckpt.types import StateDict, Stateful
from titan_ckpt.weights.wrapper import ModelWrapper

logger = logging.getLogger(__name__)
_GENERATORS = frozenset({"python", "numpy", "torch"})
OWN_BUFFERS = f"{STATES}own buffers"
"""Key of the buffers that each rank has for itself, by fqn."""


class ExtraState(OwnItem):
    """The model's state that is no tensor. The model gives and takes the values of its own state_dict() itself.

    An export asks the model for it, with those values.
    """

    component = "model"
    is_merged = True

    def __init__(self, model: ModelWrapper) -> None:
        self._model = model

    def value(self, tensors: StateDict) -> dict[str, Any]:
        return self._model.extra_state()

    @staticmethod
    def merge(of_ranks: Sequence[Any]) -> dict[str, Any]:
        return {fqn: value for state in reversed(of_ranks) for fqn, value in state.items()}

    def check(self, stored: Stored) -> None:
        """Raises: LoadMismatchError naming the modules whose extra state the checkpoint lacks."""
        wanted = [*self._model.extra_state_names(), *stored.model_values]
        if absent := [name for name in wanted if name not in stored.values.get(self.key, {})]:
            raise LoadMismatchError(
                f"the checkpoint lacks the extra state of {counted(len(absent), 'module')}: "
                f"{listed(absent, ', ', ' ')}. Was it saved from a different model?"
            )

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        self._model.load_extra_state(stored.values.get(self.key, {}))

    def from_torchtitan(self, folder: FlatFolder) -> dict[str, Any]:
        return {name: folder.item(name) for name in self._model.extra_state_names() if name in folder.items}


class OwnBuffers(OwnItem):
    """Buffers that differ between ranks, such as the statistics of BatchNorm, and extra state of modules that does.

    snapshot.py finds and stores them.
    """

    component = "model"
    key = OWN_BUFFERS

    def __init__(self, model: ModelWrapper) -> None:
        self._model = model

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        """Return new tensors. Raises: CorruptCheckpointError for tensors that are not stored."""
        return {key: _room_for(available[key], None) for key in _stored_names(stored, self.key, available)}, []

    @torch.no_grad()
    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Set them, over those of one rank that every rank has by now.

        Those of parts that another layout of ranks gives to other ranks stay as they are.
        """
        live = {place_of(fqn, value): local_tensor(value) for fqn, value in self._model.buffers().items()}
        own = give_tensors(stored.values.get(self.key, {}), tensors)
        for place, value in own.items():
            if place in live and live[place].shape == value.shape:
                live[place].copy_(value)
        self._model.load_extra_state(own)


class UserState(Item):
    """A state that the run was given by name, such as counters or an averaged model."""

    component = "states"

    def __init__(self, name: str, state: Stateful) -> None:
        self.name, self.state, self.key = name, state, f"{STATES}{name}"

    def faults(self, allow: Collection[str]) -> list[str]:
        """Return why it cannot be saved. One that is iterated is not asked, because its answer may begin an epoch."""
        if hasattr(type(self.state), "__iter__") and not isinstance(self.state, nn.Module):
            return []
        try:
            typed_json.encode(self.value({}), self.key)
        except StateEncodingError as error:
            if error.__cause__ is None:
                return [str(error)]
            logger.debug("%s", error)  # it may have no state yet; the first save asks again
        return []

    def value(self, tensors: StateDict) -> Any:
        """Return the state with its tensors moved to `tensors`, as `take_tensors` does.

        Raises: StateEncodingError for tensors that would come back as something else.
        """
        try:
            value = self.state.state_dict()
        except CheckpointError:
            raise
        except Exception as error:
            what = f"states[{self.name!r}]: {class_name(self.state)}.state_dict() failed"
            raise StateEncodingError(f"{what}: {type(error).__name__}: {error}", self.key) from error
        if faults := [f"{path}: {fault}" for path, fault in unlike_plain(value, self.key)]:
            raise StateEncodingError(f"{listed(faults)}. Return plain, dense tensors: .detach().clone()", faults[0])
        return take_tensors(value, self.key, tensors)

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        """Return new tensors, sharded as the live ones are. Raises: CorruptCheckpointError for tensors not stored."""
        wanted = _stored_names(stored, self.key, available)
        live: StateDict = {}
        if wanted:
            self.value(live)
        return {key: _room_for(available[key], live.get(key)) for key in wanted}, []

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        self.state.load_state_dict(give_tensors(stored.values[self.key], tensors))

    def leaves(self) -> Leaves:
        yield from flattened((self.name,), self.state.state_dict())

    def from_torchtitan(self, folder: FlatFolder) -> Any:
        return nested(folder, self.name) or None


class Generators(OwnItem):
    """All generators of this process. They come last, because other items may draw when they are asked or restored."""

    component = "rng"
    scope = "rank"
    num_loads = 0
    """How many loads have set the generators of this process, each at its end."""

    def __init__(self) -> None:
        self._state = RandomState()

    def value(self, tensors: StateDict) -> dict[str, Any]:
        return self._state.state_dict()

    @classmethod
    def misshapen(cls, value: Any) -> list[str]:
        missing = _GENERATORS - value.keys() if isinstance(value, dict) else ()
        return super().misshapen(value) + [f"rng without {', '.join(sorted(missing))}"] * bool(missing)

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Set the generators. If the layout of ranks has changed, seed them from this rank's own seed and the step.

        So ranks that were seeded alike at the start of the process stay alike, and others stay different.
        """
        Generators.num_loads += 1
        if state := stored.values.get(self.key):
            self._state.load_state_dict(state)
            return
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (stored.step + 1)) % 2**63
        logger.warning(
            "random generators: the checkpoint was saved by another layout of ranks, so their states mean nothing "
            f"here; reseeded with {seed}, from this rank's seed and step {stored.step}"
        )
        self._state.reseed(seed)


def place_of(name: str, value: torch.Tensor) -> str:
    """Return the name of a buffer, and where the part of it begins that this rank holds, if that is not all of it.

    Ranks compare what is of one part, and take back what is of theirs.
    """
    if not isinstance(value, DTensor) or local_tensor(value).shape == value.shape:
        return name
    return f"{name} at {[[*chunk.offsets] for chunk, _ in local_chunks(value)]}"


def _stored_names(stored: Stored, key: str, available: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of a state's tensors. Raises: CorruptCheckpointError for those that are not stored."""
    wanted = list(names_of(stored.values.get(key, {})))
    if lost := [name for name in wanted if name not in available]:
        what = f"state {key.removeprefix(STATES)!r}"
        raise CorruptCheckpointError(f"{what}: its tensors {listed(lost, ', ', ' ')} are not stored")
    return wanted


def _room_for(info: TensorInfo, live: torch.Tensor | None) -> torch.Tensor:
    """Return a new tensor for stored state, sharded like the live one."""
    if isinstance(live, DTensor) and tuple(live.shape) == info.shape:
        return torch.empty_like(live, dtype=info.dtype)
    return torch.empty(info.shape, dtype=info.dtype)
