"""Decides whether a loader that gives its state itself, as torchdata's does, holds the order of its samplers in it.

Owns the way from a loader to its samplers, the samplers whose order torchdata draws anew after a resume, and the
generators that its state leaves out.
"""

from __future__ import annotations

import dis
import inspect
import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from titan_ckpt.components.classes import is_own, names_of, own_and_base
from titan_ckpt.components.unsaved_state import codes_of, fault_of, stored_by_code_of
from titan_ckpt.gc_paused import instances_of
from titan_ckpt.rng import codes_within, generators_kept, held_by, held_generators, is_random, set_random

_log = logging.getLogger(__name__)
_DRAWN_ANEW = frozenset(
    {
        *(f"torch.utils.data.sampler.{name}Sampler" for name in ("Random", "SubsetRandom", "WeightedRandom")),
        "transformers.trainer_pt_utils.LengthGroupedSampler",
        "trl.trainer.utils.RepeatSampler",
    }
)

_IN_ANOTHER = (
    "a StatefulDataLoader does not hold its order, and a resumed run would go on in another one: wrap the loader in "
    "titan_ckpt.PositionedLoader"
)
_COPIED = (
    "each worker process draws from a copy of its own, which no step holds: draw from the process's random numbers, "
    "which workers get anew for each batch{}, or use no workers"
)

_DRAWN_AGAIN = (
    "the worker processes of a StatefulDataLoader begin their random numbers anew after a resume: wrap the loader in "
    "titan_ckpt.PositionedLoader if its data or collate_fn draws from them"
)

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
    """Return whether a loader is torchdata's StatefulDataLoader, or extends it."""
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


def seed_workers_apart(loader: Any) -> None:
    """Let workers that are kept get their seed from a generator that nothing else draws from.

    They get one in a process, so a run that is resumed would draw once more.
    """
    if getattr(loader, "persistent_workers", False):
        own, given = torch.Generator(), loader.generator
        loader.generator = own if given is None else own.manual_seed(given.initial_seed())


def seed_evaluations_apart() -> None:
    """Do so for every DataLoader of this process that has not begun, but those whose position a step holds."""
    for loader in instances_of(DataLoader):
        if loader not in POSITIONED and loader._iterator is None:  # noqa: SLF001 - as above
            seed_workers_apart(loader)


def stateful_faults(loader: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each sampler of torchdata's StatefulDataLoader whose order a resumed run draws anew.

    Also for a dataset whose position it loses.
    """
    if not is_of_torchdata(loader):
        return
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
    for sampler in samplers_of(loader):
        own, base = own_and_base(type(sampler))
        changes = not hasattr(sampler, "state_dict") and any(stored_by_code_of(own, ["set_epoch"]))
        if changes or names_of(base)[0] in _DRAWN_ANEW:
            yield from fault_of("sampler", sampler, _IN_ANOTHER, allow)


def unwrapped_faults(loader: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield the same for a StatefulDataLoader that no PositionedLoader is around, also for what draws from generators.

    Those of this process are in the position: see `generators_beside`. Those of worker processes are not, nor is the
    start of an order that a sampler draws from its own. What workers draw from their process's is seen by nobody here,
    so the log says it.
    """
    yield from stateful_faults(loader, allow)
    if not is_of_torchdata(loader):
        return
    if loader.num_workers:
        _log.warning(f"data: {_DRAWN_AGAIN}")
    yield from copied_faults(loader, allow, " of a titan_ckpt.PositionedLoader")
    lost = [] if isinstance(loader.dataset, IterableDataset) else [*filter(_may_be_lost, samplers_of(loader))]
    if lost and not _is_asked(_innermost_asked(loader)):
        for sampler in lost:
            yield from fault_of("sampler", sampler, _IN_ANOTHER, allow)


def copied_faults(loader: Any, allow: Collection[str], by: str = "") -> Iterator[str]:
    """Yield one line for each generator of which worker processes have copies. `by`: which loader seeds them anew."""
    if not getattr(loader, "num_workers", 0):
        return
    for generator in filter(is_random, _drawn_by([_unasked_data(loader), getattr(loader, "collate_fn", None)])):
        yield from fault_of("data: it draws from a", generator, _COPIED.format(by), allow)


def generators_beside(loader: Any) -> list[Any]:
    """Return the generators that this process draws from for a StatefulDataLoader, and that its state leaves out."""
    if not is_of_torchdata(loader):
        return []
    drawn = [] if loader.num_workers else [_unasked_data(loader), loader.collate_fn]
    return held_generators([loader.generator, *drawn])


def begin_at(loader: Any, state: dict[str, Any], drawn: Sequence[Any] | None) -> None:
    """Load a StatefulDataLoader's state so that the iterator that it makes for it draws nothing that a step draws.

    It makes it when it is read, after the samplers were told the epoch; over a stream, now. `drawn`: the states of
    `generators_beside`, if the step has them.
    """
    loader.load_state_dict(state)

    def make() -> Any:
        del loader._get_iterator  # noqa: SLF001 - torchdata has no public name for it
        with generators_kept():
            iterator = loader._get_iterator()  # noqa: SLF001 - as above
        for generator, its in zip(generators_beside(loader), drawn or (), strict=False):
            set_random(generator, its)
        return iterator

    loader._get_iterator = make  # noqa: SLF001 - as above
    if isinstance(loader.dataset, IterableDataset):
        loader.state_dict()


def _unasked_data(loader: Any) -> Any:
    """Return the dataset, if the loader does not ask it for its state; else None."""
    data = getattr(loader, "dataset", None)
    is_asked = isinstance(data, IterableDataset) or (hasattr(loader, "state_dict") and hasattr(data, "state_dict"))
    return None if is_asked else data


def _may_be_lost(sampler: Any) -> bool:
    """Return whether a sampler's next order depends on what only its state holds."""
    own, base = own_and_base(type(sampler))
    changes = hasattr(sampler, "state_dict") and any(stored_by_code_of(own, ["set_epoch"]))
    draws = own and any(map(is_random, _drawn_by(sampler, within=False))) and not _seeds_anew(sampler)
    return bool(changes or draws) or names_of(base)[0] == "torchdata.stateful_dataloader.sampler.RandomSampler"


def _innermost_asked(loader: Any) -> Any:
    """Return the innermost sampler of which a StatefulDataLoader asks the state, or that of its iterator."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    is_passed_on = type(outer).__iter__.__module__.startswith("torchdata.")
    return getattr(outer, "sampler", outer) if is_passed_on else outer


def _is_asked(sampler: Any) -> bool:
    """Return whether a sampler or its iterator has a state. An order that it draws for the answer is drawn again."""
    if hasattr(sampler, "state_dict"):
        return True
    if inspect.isgeneratorfunction(type(sampler).__iter__):
        return False
    with generators_kept(beside=held_generators(sampler)):
        return hasattr(iter(sampler), "state_dict")


def _drawn_by(value: Any, *, within: bool = True) -> list[Any]:
    """Return the generators that an object holds, but attributes that only a constructor has used.

    `within`: absent, also of samplers in it; else it returns these themselves.
    """
    found = held_by(value, lambda v: is_random(v) or not (within or v is value or not isinstance(v, Sampler)))
    owners = held_by(value, lambda v: is_own(v) and any(map(is_random, getattr(v, "__dict__", {}).values())))
    unused = [g for owner in owners for name, g in vars(owner).items() if name not in _names_in(type(owner))]
    return [each for each in found if not any(each is other for other in unused)]


def _names_in(kind: type) -> set[Any]:
    """Return the names and strings in the code of a class's methods but its constructors."""
    methods = [m for base in kind.__mro__ for name, m in vars(base).items() if name != "__init__"]
    codes = codes_within(*(code for method in methods for code in codes_of(method)))
    return {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}


def _seeds_anew(sampler: Any) -> bool:
    """Return whether a sampler seeds its generator for each order."""
    codes = codes_within(*codes_of(type(sampler).__iter__))
    calls = (i for code in codes for i in dis.get_instructions(code))
    return any(
        i.argval in ("manual_seed", "seed") and (i.opname == "LOAD_METHOD" or i.argrepr.startswith("NULL|self"))
        for i in calls
    )
