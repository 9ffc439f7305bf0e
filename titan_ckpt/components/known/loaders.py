"""Decides whether a loader that gives its state itself, as torchdata's does, holds the order of its samplers in it.

Owns the way from a loader to its samplers, and the samplers whose order torchdata draws anew after a resume.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from titan_ckpt.components.classes import names_of, own_and_base
from titan_ckpt.components.unsaved_state import fault_of, stored_by_code_of
from titan_ckpt.gc_paused import instances_of
from titan_ckpt.rng import Seeded, held_generators, seed_of

_DRAWN_ANEW = frozenset(
    {
        *(f"torch.utils.data.sampler.{name}Sampler" for name in ("Random", "SubsetRandom", "WeightedRandom")),
        "transformers.trainer_pt_utils.LengthGroupedSampler",
        "trl.trainer.utils.RepeatSampler",
    }
)

_WRAP = "wrap the loader in titan_ckpt.PositionedLoader"

POSITIONED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The loaders of this process whose position a PositionedLoader holds, and with it the seed of their workers."""


def samplers_of(loader: Any) -> list[Any]:
    """Return a loader's samplers, from the outermost to the innermost."""
    found: list[Any] = []
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
            waiting.append(getattr(getattr(sampler, "dataset", None), "_sampler", None))  # of Lightning's wrapper
            for value in getattr(sampler, "__dict__", {}).values():
                several = value if isinstance(value, (list, tuple)) else [value]
                waiting += several if several and isinstance(several[0], Sampler) else []
    return found


def is_of_torchdata(loader: Any) -> bool:
    """Return whether a loader or sampler is torchdata's, or extends one of its."""
    return any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)


def begin_afresh(loader: Any) -> None:
    """Let a loader forget the iterator that it has: its order and its seed are those of an epoch that begins no more.

    accelerate makes one of a loader of torchdata in prepare(), and Lightning one of each loader, which keeps it if it
    keeps its worker processes.
    """
    if is_of_torchdata(loader):
        loader.load_state_dict({})
    elif isinstance(loader, DataLoader):
        loader._iterator = None  # noqa: SLF001 - torch has no public name for it


class Through:
    """A sampler whose entries go through a function. Workers that are kept use the same one in every epoch."""

    def __init__(self, sampler: Any, function: Callable[[Any], Iterator[Any]]) -> None:
        self.batch_sampler, self._function = sampler, function

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # while it is copied
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        yield from self._function(self.batch_sampler)


def seed_workers_apart(loader: Any) -> None:
    """Let workers that are kept draw by seeds that each iteration has anew, as workers that are not kept do.

    They get one in a process, for which a run that is resumed would draw once more, and go on by it.
    """
    name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
    if getattr(loader, "persistent_workers", False) and not isinstance(whole := loader.__dict__[name], Through):
        own, given = torch.Generator(), loader.generator
        loader.generator = own if given is None else own.manual_seed(given.initial_seed())
        loader.__dict__[name] = Through(whole, _seeded_anew)  # DataLoader refuses setattr


def _seeded_anew(order: Any) -> Iterator[Any]:
    begun = seed_of(torch.get_rng_state().tolist())
    for number, entry in enumerate(order):
        yield Seeded(entry, seed_of(begun, number))


def seed_evaluations_apart() -> None:
    """Do so for every DataLoader of this process that has not begun, but those whose position a step holds."""
    for loader in instances_of(DataLoader):
        if loader not in POSITIONED and loader._iterator is None:  # noqa: SLF001 - as above
            seed_workers_apart(loader)


def stateful_faults(loader: Any, allow: Collection[str], held: Collection[Any] = ()) -> Iterator[str]:
    """Yield one line for each sampler of torchdata's StatefulDataLoader whose order a resumed run draws anew.

    Also for a dataset whose position it loses, and for the generators that data and collator draw from, but those that
    are `held`.
    """
    if not is_of_torchdata(loader):
        return
    gives_state = hasattr(loader.dataset, "state_dict")
    for generator in held_generators([None if gives_state else loader.dataset, loader.collate_fn]):
        if not any(generator is other for other in held):
            yield from fault_of(
                "data: it draws from a", generator, f"a StatefulDataLoader does not hold it: {_WRAP}", allow
            )
    if isinstance(loader.dataset, IterableDataset):
        if not (hasattr(loader.dataset, "state_dict") and hasattr(loader.dataset, "load_state_dict")):
            reason = (
                "it has no state_dict and load_state_dict, and a StatefulDataLoader counts twice what it reads again: "
                "after a second resume it leaves samples out. Give it both"
            )
            yield from fault_of("data:", loader.dataset, reason, allow)
        if loader.persistent_workers and hasattr(loader.dataset, "_starting_state_dict"):
            yield (
                "data: persistent_workers: a worker that is kept would begin each later epoch of the stream at the "
                "position of the resume: leave it out"
            )
        return
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_asked = hasattr(outer, "state_dict") or is_of_torchdata(outer)  # torch's own asks no sampler within it
    for sampler in samplers_of(loader):
        own, base = own_and_base(type(sampler))
        is_held = is_asked and hasattr(sampler, "state_dict")
        changes = not is_held and any(stored_by_code_of(own, ["set_epoch"]))
        if changes or names_of(base)[0] in _DRAWN_ANEW:
            reason = (
                f"a StatefulDataLoader does not hold its order, and a resumed run would go on in another one: {_WRAP}"
            )
            yield from fault_of("sampler", sampler, reason, allow)
