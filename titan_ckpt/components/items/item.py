"""Item: a component of a run beside its weights, with all that a checkpoint does with it.

Owns the contract, and the share of the data that a rank reads. A component is one class in a file of its own, and
run_state.py lists them; snapshots, state files, loads and torchtitan's folders ask the items alone. torch_checkpointing
also binds once how each item is stored (meta-pytorch/torch_checkpointing, schema.py, ItemSpec); here an item has its
way back and its misfits, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from titan_ckpt.errors import CorruptCheckpointError, LoadMismatchError
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.nested import give_tensors
from titan_ckpt.stores.store import Place
from titan_ckpt.types import StateDict, Stateful

STATES = "states."
"""Prefix of the key of a user state."""

Leaves = Iterator[tuple[tuple[str, ...], Any]]
"""State by torchtitan's flat names: (path, value). Source: torchtitan 0.3, components/checkpointer/dcp.py and
components/optimizer/utils.py."""


class FlatFolder(Protocol):
    """A DCP folder as a reader of it sees it: tensors, and items that are read one by one."""

    path: Place
    items: dict[str, Any]
    paths: dict[str, tuple[str, ...]]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def item(self, name: str) -> Any: ...


Scope = Literal["run", "rank", "share"]
"""Whose value it is. run: equal on all ranks, or merged, and stored once; if it is neither, each rank stores its own.
rank: each rank's own, for a run with the same layout of ranks. share: that of each share of the data, which its ranks
store and a run with another number of shares may divide anew."""


@dataclass(frozen=True, slots=True)
class DataRank:
    """The share of the data that a process reads: number `rank` of `size`."""

    rank: int
    size: int

    @staticmethod
    def of(dataloader: Stateful | None, rank: int, world_size: int) -> DataRank:
        """Return the dataloader's data-parallel rank; without its attributes, the rank itself."""
        own, size = getattr(dataloader, "dp_rank", None), getattr(dataloader, "dp_world_size", None)
        return DataRank(own, size) if isinstance(own, int) and isinstance(size, int) else DataRank(rank, world_size)


def in_order(stored: Sequence[tuple[DataRank, Any]], where: str) -> list[Any]:
    """Return one position for each data-parallel rank out of those that all ranks stored; peers stored equal ones.

    Raises: CorruptCheckpointError if a data-parallel rank has none.
    """
    sizes = {data_rank.size for data_rank, _ in stored}
    positions = {data_rank.rank: position for data_rank, position in reversed(stored)}
    if len(sizes) != 1 or sorted(positions) != list(range(max(sizes))):
        raise CorruptCheckpointError(
            f"{where}: it holds data positions of data-parallel ranks {sorted(positions)} of {sorted(sizes)}; expected "
            "one of each. Did every rank's dataloader have its own dp_rank, and all the same dp_world_size?"
        )
    return [positions[rank] for rank in range(len(positions))]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds beside the weights, decoded, as far as this rank may take it over."""

    step: int
    values: Mapping[str, Any]
    """The values of items by their keys; of a share item the values of all shares, in their order."""
    exclude: frozenset[str] = frozenset()
    """Components that are not restored."""
    model_values: Collection[str] = ()
    """Names of the values beside tensors that the model's own state_dict() returns."""

    @property
    def states(self) -> dict[str, Any]:
        """Return the values of user states by their names."""
        return {key.removeprefix(STATES): value for key, value in self.values.items() if key.startswith(STATES)}


class Item:
    """A component of one run, bound to its objects. Its tensors have names that begin with its key and a dot.

    A load calls `check`, `destinations`, `warnings` and `restore` in this order.
    """

    component: ClassVar[str]
    """The name by which settings leave it out."""
    key: str
    """Its name in state files: the component's, unless a class or an object says otherwise."""
    scope: ClassVar[Scope] = "run"
    kind: ClassVar[type] = dict
    """What state files have under the name of the component."""
    is_merged: ClassVar[bool] = False
    """Whether the values of ranks are merged, because each pipeline stage has its own."""
    is_required: ClassVar[bool] = True
    """Whether a checkpoint without it is refused."""
    is_stepped: ClassVar[bool] = False
    """Whether an optimizer's step alone changes it, as it changes weights; other items may change at any time."""
    is_collective: ClassVar[bool] = False
    """Whether `settle` and `restore` wait for other ranks: the last is called when all have restored other items."""

    def __init_subclass__(cls) -> None:
        if "component" in vars(cls) and "key" not in vars(cls):
            cls.key = cls.component

    def faults(self, allow: Collection[str]) -> list[str]:
        """Return why its state cannot be saved, as far as that shows before the first step.

        `allow`: full names of classes that may lose what no step holds.
        """
        return []

    def settle(self) -> None:
        """Make final what `value` returns. A save calls it before anything that a single rank may refuse."""

    def value(self, tensors: StateDict) -> Any:
        """Return its state as typed JSON holds it; move its large tensors, which may be live, to `tensors`.

        Raises: StateEncodingError for state that cannot be stored.
        """
        raise NotImplementedError

    @staticmethod
    def merge(of_ranks: Sequence[Any]) -> Any:
        """Return the value of the run by the distinct ones of its ranks, those of lower ranks first."""
        raise NotImplementedError

    @classmethod
    def misshapen(cls, value: Any) -> list[str]:
        """Return why a value in a state file is none that a run has stored."""
        return wrong_types([(cls.component, value, cls.kind)])

    def is_in(self, stored: Stored) -> bool:
        """Return whether the checkpoint has what `restore` needs."""
        return self.key in stored.values

    def check(self, stored: Stored) -> None:
        """Check that `restore` can take what is stored; change nothing. Raises: LoadMismatchError."""

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for each stored one, and the keys of those that have no place on this rank.

        `available`: all stored tensors but the model's. Nothing is attached before `restore`.
        """
        return {}, []

    def warnings(self, stored: Stored) -> list[str]:
        """Return what the log says about `restore`, before it is called."""
        return []

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        """Give the run's objects what was stored. `tensors`: the filled destinations of all items."""
        raise NotImplementedError

    def leaves(self) -> Leaves:
        """Yield (path, value) of its state by torchtitan's names. Raises: ExportError if these have no place for it."""
        tensors: StateDict = {}
        value = self.value(tensors)
        yield from flattened((self.component,), give_tensors(value, tensors))

    def torchtitan_tensors(self, folder: FlatFolder) -> dict[str, str]:
        """Return the names of its tensors in a folder of torchtitan's, by the names that they have here."""
        return {}

    def from_torchtitan(self, folder: FlatFolder) -> Any:
        """Return the value in a folder of torchtitan's; None if it has none. Raises: LoadMismatchError."""
        return nested(folder, self.component) or None


class OwnItem(Item):
    """A component that torchtitan's folders have no place for."""

    is_required = False

    def leaves(self) -> Leaves:
        yield from ()

    def from_torchtitan(self, folder: FlatFolder) -> Any:
        return None


def wrong_types(parts: Sequence[tuple[str, Any, type]]) -> list[str]:
    """Return a line for each (name, value, expected type) of another type."""
    return [
        f"{name} is a {type(value).__name__}, not a {expected.__name__}"
        for name, value, expected in parts
        if not isinstance(value, expected)
    ]


def flattened(path: tuple[str, ...], value: Any) -> Leaves:
    """Yield (path, leaf) of nested state; `path`: where it is."""
    if isinstance(value, Mapping) and (value or len(path) == 1):
        for key, inner in value.items():
            yield from flattened((*path, str(key)), inner)
    else:
        yield path, value


def nested(folder: FlatFolder, component: str) -> dict[str, Any]:
    """Return a component's state, nested as it was saved. Raises: LoadMismatchError if it holds tensors."""
    if tensors := [name for name in folder.tensors if name.startswith(f"{component}.")]:
        raise LoadMismatchError(
            f"{folder.path}: {component} holds tensors, such as {tensors[0]}, which cannot be taken over: leave it out "
            f"with checkpoint.resume.exclude = {json.dumps([component])}"
        )
    state: dict[str, Any] = {}
    for name in folder.items:
        path = folder.paths.get(name, ())
        if len(path) < 2:  # it was saved under its flat name
            path = tuple(name.split("."))
        if path[0] == component and len(path) > 1:
            inner = state
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = folder.item(name)
    return state
