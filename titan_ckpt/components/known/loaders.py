"""Decides whether a loader that gives its state itself, as torchdata's does, holds the order of its samplers in it.

Owns the way from a loader to its samplers, and the samplers whose order torchdata draws anew after a resume.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from titan_ckpt.components.classes import names_of, own_and_base
from titan_ckpt.components.unsaved_state import fault_of, stored_by_code_of
from titan_ckpt.gc_paused import instances_of

_DRAWN_ANEW = frozenset(
    {
        *(f"torch.utils.data.sampler.{name}Sampler" for name in ("Random", "SubsetRandom", "WeightedRandom")),
        "transformers.trainer_pt_utils.LengthGroupedSampler",
        "trl.trainer.utils.RepeatSampler",
    }
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
            reason = (
                "a StatefulDataLoader does not hold its order, and a resumed run would go on in another one: wrap the "
                "loader in titan_ckpt.PositionedLoader"
            )
            yield from fault_of("sampler", sampler, reason, allow)
