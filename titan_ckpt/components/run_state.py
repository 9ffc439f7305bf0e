"""The objects of a run whose state is saved, as items, and the way of stored state back to them.

Owns the list of components and their order, and the mark of a run whose live state a load has begun to overwrite and
has not finished. snapshot.py takes their state. Knows no files.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

import xxhash
from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.components import schedules
from titan_ckpt.components.classes import class_name, own_kinds
from titan_ckpt.components.items.data_position import DataPosition
from titan_ckpt.components.items.exchange_order import ExchangeOrder
from titan_ckpt.components.items.item import DataRank, Item, Stored
from titan_ckpt.components.items.optimizers import Optimizers, Schedulers
from titan_ckpt.components.items.states import ExtraState, Generators, OwnBuffers, UserState
from titan_ckpt.components.known.own_modules import watch_modules
from titan_ckpt.components.optimizer_content import PREFIX as OPTIMIZER
from titan_ckpt.components.watched import Watch
from titan_ckpt.config import Component
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import HalfLoadedError, LoadMismatchError, StateEncodingError, counted, listed
from titan_ckpt.geometry.chunks import TensorInfo, describe
from titan_ckpt.process import gc_paused, generators_kept
from titan_ckpt.types import StateDict, Stateful
from titan_ckpt.weights.wrapper import ModelWrapper, require_memory

_KINDS = (ExtraState, Optimizers, Schedulers, UserState, DataPosition, Generators)
_ORDER: tuple[str, ...] = get_args(Component)
"""The order of components in manifests."""


class HalfLoaded:
    """The mark of one run: set before the first live byte changes, taken off when a load has succeeded on all ranks."""

    def __init__(self) -> None:
        self._source: str | None = None
        self._overwritten: set[str] = set()
        self._filled: set[str] = set()

    def __bool__(self) -> bool:
        return self._source is not None

    def begin(self, source: str, names: Iterable[str]) -> None:
        """Set the mark. `names`: the live tensors that are about to be overwritten from `source`.

        Every rank calls it before any rank overwrites anything.
        """
        self._source, self._filled = source, set()
        self.overwrite(names)

    def overwrite(self, names: Iterable[str]) -> None:
        """Note more tensors that are about to be overwritten by the load that began last."""
        self._filled.update(names)
        self._overwritten |= self._filled

    def check_replaced(self) -> None:
        """Check that the load that has filled its tensors replaced all that earlier, failed ones overwrote.

        Raises: LoadMismatchError naming the tensors that it left as they are.
        """
        if left := sorted(self._overwritten - self._filled):
            raise LoadMismatchError(
                f"the load of {self._source} replaced all but {len(left)} of the tensors that a failed load before it "
                f"had overwritten: {listed(left, ', ', ' ')}. Start the process again, and load {self._source} first"
            )

    def end(self) -> None:
        """Take off the mark. Every rank calls it after all ranks have loaded."""
        self._source = None
        self._overwritten, self._filled = set(), set()

    def refuse(self, what: str) -> None:
        """Raise HalfLoadedError while the mark is set. `what`: the sentence that the error begins with."""
        if self._source is not None:
            raise HalfLoadedError(
                f"{what}: the load of {self._source} began to overwrite this run and did not succeed on all ranks, so "
                f"the state in memory is a mixture ({counted(len(self._overwritten), 'tensor')} on this rank). Call "
                "load() again until it succeeds, or start the process again",
                self._source,
                sorted(self._overwritten),
            )


class RunState:
    """The components of a run beside model weights, of which a resume needs the state."""

    def __init__(
        self,
        model: ModelWrapper,
        optimizers: Sequence[Optimizer] = (),
        lr_schedulers: Sequence[Stateful] = (),
        dataloader: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        left_out: frozenset[str] = frozenset(),
        own_settings: Callable[[Mapping[str, Any]], frozenset[str]] = lambda _: frozenset(),
        rebuild: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Check that all objects can be asked for their state, and list them in the order of a load.

        `left_out`: components that are neither saved nor loaded; their objects are forgotten. `own_settings`: returns,
        by the stored states, the settings of optimizer groups of which a load leaves this run's values. `rebuild`:
        as of CheckpointManager.
        Raises: LoadMismatchError for optimizers that do not train this model's parameters, and for schedules of other
        optimizers; StateEncodingError for objects that return no state.
        """
        self.model = model
        self._rank, self._world_size, self._rebuild = rank, world_size, rebuild
        self.optimizers = () if "optimizer" in left_out else optimizers
        self._lr_schedulers = () if "lr_scheduler" in left_out else lr_schedulers
        self._dataloader = None if "dataloader" in left_out else dataloader
        self.states = {} if "states" in left_out else states or {}
        self.half_loaded = HalfLoaded()
        self._shapes: dict[str, tuple[int, ...]] | None = None
        """The shapes of the model's buffers before a load, then at the last save; None if nothing was loaded."""
        self.watch = Watch()
        """Compares what objects keep in attributes: no step holds it, so it must not change."""
        self.extra = None if "model" in left_out else ExtraState(model)
        self.trained: Optimizers | None = None
        if self.optimizers:
            self.trained = Optimizers(self.optimizers, model, self._lr_schedulers, own_settings, self.watch)
        asked = {f"lr_schedulers[{i}]": scheduler for i, scheduler in enumerate(self._lr_schedulers)}
        asked |= {f"states[{name!r}]": state for name, state in self.states.items()}
        asked |= {} if self._dataloader is None else {"dataloader": self._dataloader}
        if faults := [f"{place} ({class_name(value)})" for place, value in asked.items() if not _is_stateful(value)]:
            raise StateEncodingError(
                f"no state_dict() and load_state_dict(), by which a checkpoint holds it: {listed(faults)}. Give an "
                "object that has both, such as titan_ckpt.PositionedLoader(loader) for a DataLoader or torchdata's "
                "StatefulDataLoader",
                faults[0],
            )
        if others := [] if "optimizer" in left_out else schedules.of_other_optimizers(self._lr_schedulers, optimizers):
            raise LoadMismatchError(
                f"{listed(others)}, which is not among the optimizers of the manager: no step would hold its state. "
                'Pass it, optimizers=[...], or settings whose components leave "optimizer" out'
            )
        if self.trained is not None and "states" not in left_out:
            self.trained.check_scalers(self.states.values())
        users = [UserState(name, state) for name, state in self.states.items()]
        rates = [Schedulers(self._lr_schedulers, self.trained, own_settings)] if self._lr_schedulers else []
        positions = [DataPosition(self._dataloader, lambda: self.data_rank)] if self._dataloader is not None else []
        self.order = ExchangeOrder([] if "states" in left_out else model.parts)
        """Is among the items if DDP is around the model."""
        self.items: list[Item] = [
            *([self.order] if self.order else []),  # first: it waits for other ranks, on which another item may fail
            *filter(None, (self.extra, self.trained)),
            *rates,
            *users,
            *positions,
            *([] if "rng" in left_out else [Generators()]),
        ]

    @property
    def kinds(self) -> Sequence[type[Item]]:
        """Return the classes of items that state files may have values of."""
        return [*dict.fromkeys((*_KINDS, *map(type, self.items)))]

    @property
    def data_rank(self) -> DataRank:
        """Return the share of the data that this process reads."""
        return DataRank.of(self._dataloader, self._rank, self._world_size)

    @functools.cached_property
    def layout(self) -> str:
        """Return a digest of the facts that decide which random numbers this rank draws: its shards and its data."""
        names = self.model.parameter_names()
        sharded: StateDict = {fqn: value for value, fqn in names.items() if isinstance(value, DTensor)}
        data = self.data_rank
        facts = [self._world_size, self._rank, data.rank, data.size, sorted(names.values()), describe(sharded)]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

    @functools.cached_property
    def counters(self) -> list[Item]:
        """Return the items that any code of a step may change: all but what optimizers train."""
        has_extra = bool(self.model.extra_state_names())  # once: it walks all modules
        return [item for item in self.items if not item.is_stepped and (item is not self.extra or has_extra)]

    def components(self) -> tuple[str, ...]:
        """Return the components that this run saves."""
        has = dict.fromkeys(item.component for item in self.items)
        return (*(name for name in _ORDER if name in has), *(name for name in has if name not in _ORDER))

    def check_states(self) -> None:
        """Check the user's states, as far as they have any yet. Raises: StateEncodingError."""
        with generators_kept():
            _refuse([fault for item in self.items if isinstance(item, UserState) for fault in item.faults(())])

    @gc_paused()
    def rehearse(self, allow: Collection[str] = ()) -> None:
        """Check before the first step that the model has memory, and that all other state can be saved and resumed.

        `allow`: full names of optimizers that may lose what they keep in attributes.
        Raises: StateEncodingError listing every one that cannot.
        """
        if self.extra is not None:
            require_memory(self.model.memory())
            self._shapes = self._shapes_now()
        asked = dict.fromkeys((*([self.order] if is_initialized() else []), *self.items))
        with generators_kept():
            _refuse([fault for item in asked for fault in item.faults(allow)])

    @gc_paused()
    def watch_modules(self, allow: Collection[str] = ()) -> None:
        """Watch, after a load, what the model's own modules keep beside its state."""
        own = (own_kinds(type(module).__mro__) for part in self.model.parts for module in part.modules())
        if self.extra is not None and any(own):
            live = [*self.optimizers, *self._lr_schedulers, *self.states.values(), self._dataloader]
            watch_modules(self.model.parts, allow, self.watch, live)

    def settle(self) -> None:
        """Make final what waits for other ranks, before a save. Collective."""
        for item in self.items:
            if item.is_collective:
                item.settle()

    def check_stepped(self, step: int, allow: Collection[str] = (), *, is_saved: bool) -> None:
        """Check after the first step that the state of the optimizers can be stored, and that no other has changed.

        `allow`: as of `rehearse`. `is_saved`: the step is saved next, which finds the same of the state.
        Raises: StateEncodingError; SaveError.
        """
        self.order.check_wrapped(allow)
        if is_saved:
            return
        self.refuse_changed(step)
        for item in self.items:
            if item.is_stepped:
                typed_json.encode(item.value({}), item.key)

    def refuse_changed(self, step: int) -> None:
        """Check before a save that a new process can take what it holds. Raises: SaveError; StateEncodingError."""
        if self.watch.objects:
            self.watch.refuse(step)
        if self._shapes is None:
            return
        before, now = self._shapes, self._shapes_now()
        if others := sorted(before.keys() ^ now.keys()):
            raise StateEncodingError(
                f"training has added or removed {counted(len(others), 'buffer')} of the model: "
                f"{listed(others, ', ', ' ')}. A new process builds the model as it was, so no load could fill it: "
                "register every buffer in __init__, or call the model once before load()",
                others[0],
            )
        changed = {f: shape for f, shape in before.items() if now[f] != shape}
        known = self.model.shaped_by_loading(changed) if changed else {}
        if lost := [f"{f} {list(s)} -> {list(now[f])}" for f, s in changed.items() if f not in known]:
            raise StateEncodingError(
                f"training has changed the shape of {counted(len(lost), 'buffer')} of the model: "
                f"{listed(lost, ', ', ' ')}. A new process builds the first shape, so no load could fill it: call the "
                "model once before load(), or resize buffers in their module's _load_from_state_dict()",
                lost[0],
            )
        self._shapes = now

    def _shapes_now(self) -> dict[str, tuple[int, ...]]:
        return {fqn: tuple(value.shape) for fqn, value in self.model.buffers().items()}

    def restored(self, exclude: Collection[str]) -> list[Item]:
        """Return the items that a load restores which leaves these components out.

        A folder of torchtitan also gives the model to a run that leaves it out of its own steps.
        """
        extra = self.extra or ExtraState(self.model)
        items = [extra, OwnBuffers(self.model), *(item for item in self.items if item is not extra)]
        return [item for item in items if item.component not in exclude]

    def check(self, stored: Stored) -> None:
        """Check that every component of this run can be restored; change nothing but what `rebuild` adds.

        Raises: LoadMismatchError listing the components that the checkpoint lacks or that cannot be carried over.
        """
        if "states" not in stored.exclude:
            self._rebuild(stored.states)
        lacking: dict[str, list[str]] = {}
        for item in self.restored(stored.exclude):
            if item.is_required and not item.is_in(stored):
                prefix = f"{item.component}."
                lacking.setdefault(item.component, []).extend(item.key.split(prefix, 1)[1:])
        if lacking:
            names = [f"{n} ({listed([*map(repr, of)], ', ', ' ')})" if of else n for n, of in lacking.items()]
            raise LoadMismatchError(
                f"the checkpoint has no state for: {', '.join(names)}. It was saved by a run without them, or by "
                "another number of ranks; to start afresh with them: checkpoint.resume.exclude = "
                f"{json.dumps([*lacking])}"
            )
        for item in self.restored(stored.exclude):
            item.check(stored)

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        """Return a tensor to fill for every stored one that is not the model's; nothing is attached yet.

        Also return the keys of optimizer state that belongs to no parameter of this rank, perhaps to a pipeline stage.
        Raises: CorruptCheckpointError for a user state whose tensors are not stored.
        """
        out: StateDict = {}
        strangers: list[str] = []
        if self.trained is None and "optimizer" not in stored.exclude:
            strangers += [key for key in available if key.startswith(OPTIMIZER)]
        for item in self.restored(stored.exclude):
            rooms, without_room = item.destinations(stored, available)
            out |= rooms
            strangers += without_room
        return out, strangers

    def may_be_live(self, destinations: Collection[str]) -> set[str]:
        """Return the names of destinations that may be tensors which an optimizer holds now."""
        holds = any(optimizer.state for optimizer in self.optimizers)
        return {name for name in destinations if holds and name.startswith(OPTIMIZER)}

    @gc_paused()
    def apply(self, stored: Stored, tensors: StateDict) -> tuple[list[str], bool]:
        """Give all state that was read to its owners, after `check`; random generators last.

        Return the warnings of this rank, those of other ranks may be the same or different, and whether something
        waits for `apply_together`, which all ranks call if it is so on any.
        """
        restored = self.restored(stored.exclude)
        warnings = [line for item in restored for line in item.warnings(stored)]
        for item in restored:
            if not item.is_collective:
                item.restore(stored, tensors)
        return warnings, any(item.is_collective for item in restored)

    def apply_together(self, stored: Stored, tensors: StateDict) -> None:
        """Give what waits for other ranks to its owners, when `apply` has succeeded on all of them. Collective."""
        for item in self.restored(stored.exclude):
            if item.is_collective:
                item.restore(stored, tensors)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise StateEncodingError(f"{len(faults)} object(s) of this run cannot be saved: " + "\n".join(faults))


def _is_stateful(value: Any) -> bool:
    """Return whether both methods can be called as a checkpoint does, as far as their signatures say it."""
    for name, arguments in (("state_dict", ()), ("load_state_dict", ({},))):
        method = getattr(value, name, None)
        if isinstance(value, type) or not callable(method):
            return False
        try:
            with suppress(ValueError):  # builtins have no signature
                inspect.signature(method).bind(*arguments)
        except TypeError:
            return False
    return True
