"""Decides whether a loader that gives its state itself, as torchdata's does, holds the order of its samplers in it.

Owns the way from a loader to its samplers, the samplers whose order torchdata draws anew after a resume, and the
generators that its state leaves out.
"""

from __future__ import annotations

import dis
import inspect
import logging
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from titan_ckpt.components.classes import is_own, names_of, own_and_base
from titan_ckpt.components.known.streams import drawn_by_workers
from titan_ckpt.components.unsaved_state import codes_of, fault_of, stored_by_code_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.process import codes_within, generators_kept, held_by, held_generators, is_random

_log = logging.getLogger(__name__)
_DRAWN_ANEW = frozenset(
    {
        *(f"torch.utils.data.sampler.{name}Sampler" for name in ("Random", "SubsetRandom", "WeightedRandom")),
        "transformers.trainer_pt_utils.LengthGroupedSampler",
        "trl.trainer.utils.RepeatSampler",
    }
)

_NODES = "torchdata.nodes.loader.Loader"
_NOT_HELD = "its state leaves out the generators of its samplers: take a torchdata StatefulDataLoader, or a DataLoader"
_IN_ANOTHER = (
    "a StatefulDataLoader does not hold its order, and a resumed run would go on in another one: wrap the loader in "
    "titan_ckpt.PositionedLoader"
)
_BY_WORKERS = (
    "before a worker has returned a batch of an epoch, its state has the random numbers of another one: use one "
    "worker, or let the stream be the dataset of a loader in titan_ckpt.PositionedLoader"
)
_COPIED = (
    "each worker process draws from a copy of its own, which no step holds: draw from the process's random numbers, "
    "which workers of a titan_ckpt.PositionedLoader get anew for each batch, or use no workers"
)

_UNASKED = (
    "nobody asks it, or its copies in worker processes, for its state: let it be the dataset of a torchdata "
    "StatefulDataLoader, or use no workers, and wrap the loader in titan_ckpt.PositionedLoader"
)

_FOR_SAMPLES = ("__getitem__", "__getitems__", "__call__")
_OF_IT = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "COPY"})
"""The instructions after an object is loaded that get or set an attribute of it."""

_DRAWN_AGAIN = (
    "the worker processes of a StatefulDataLoader begin their random numbers anew after a resume: wrap the loader in "
    "titan_ckpt.PositionedLoader if its data or collate_fn draws from them"
)

_APART: weakref.WeakKeyDictionary[torch.Generator, torch.Generator | None] = weakref.WeakKeyDictionary()
"""A generator of `seed_workers_apart` -> the one that the loader had."""

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
    """Return whether a loader is torchdata's StatefulDataLoader, or extends it; also for a sampler of it."""
    return any(kind.__module__.startswith("torchdata.stateful_dataloader.") for kind in type(loader).__mro__)


def begin_afresh(loader: Any) -> None:
    """Let a loader forget the iterator that it has: its order and its seed are those of an epoch that begins no more.

    accelerate makes one of a loader of torchdata in prepare(), and Lightning one of each loader, which keeps it if it
    keeps its worker processes. Also the generator of `seed_workers_apart`, which an earlier manager in this process may
    have given the loader that the trainer has made this one of.
    """
    if is_of_torchdata(loader):
        loader.snapshot_every_n_steps = 1  # the states of workers and samplers are not all of the same batch otherwise
        loader.load_state_dict({})
    elif isinstance(loader, DataLoader):
        loader._iterator = None  # noqa: SLF001 - torch has no public name for it
    own: Any = getattr(loader, "generator", None)
    if own in _APART:
        loader.generator = _APART[own]


def seed_workers_apart(loader: Any) -> None:
    """Let workers that are kept get their seed from a generator that nothing else draws from.

    They get one in a process, so a run that is resumed would draw once more.
    """
    if getattr(loader, "persistent_workers", False):
        own, given = torch.Generator(), loader.generator
        loader.generator = own if given is None else own.manual_seed(given.initial_seed())
        _APART[own] = given


def seed_evaluation_apart(loader: DataLoader[Any]) -> None:
    """Do so for a DataLoader that has not begun, but for one whose position a step holds."""
    if loader not in POSITIONED and loader._iterator is None:  # noqa: SLF001 - as above
        seed_workers_apart(loader)


def stateful_faults(loader: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield one line for a stream whose position torchdata's StatefulDataLoader loses, and for each sampler it loses.

    A sampler is lost if a resumed run draws its order anew, or if its next order depends on what only its state holds
    and the loader does not ask for that.
    """
    if _NODES in names_of(type(loader)):
        yield from fault_of("data:", loader, _NOT_HELD, allow)
    if not is_of_torchdata(loader):
        return
    if isinstance(loader.dataset, IterableDataset):
        if not (hasattr(loader.dataset, "state_dict") and hasattr(loader.dataset, "load_state_dict")):
            reason = (
                "it has no state_dict and load_state_dict, and a StatefulDataLoader counts twice what it reads again: "
                "after a second resume it leaves samples out. Give it both"
            )
            yield from fault_of("data:", loader.dataset, reason, allow)
        for part in drawn_by_workers(loader):
            yield from fault_of("data:", part, _BY_WORKERS, allow)
        if loader.persistent_workers and hasattr(loader.dataset, "_starting_state_dict"):
            yield (
                "data: persistent_workers: a worker that is kept would begin each later epoch of the stream at the "
                "position of the resume: leave it out"
            )
    for sampler in samplers_of(loader):
        own, base = own_and_base(type(sampler))
        changes, name = any(stored_by_code_of(own, ["set_epoch"])), names_of(base)[0]
        is_lost = name in _DRAWN_ANEW or (changes and not hasattr(sampler, "state_dict"))
        if not is_lost:
            draws = own and any(map(is_random, _drawn_by(sampler, within=False)))
            is_in_state = changes or draws or name == "torchdata.stateful_dataloader.sampler.RandomSampler"
            is_lost = bool(is_in_state) and not _is_asked(_innermost_asked(loader))
        if is_lost:
            yield from fault_of("sampler", sampler, _IN_ANOTHER, allow)


def unwrapped_faults(loader: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each part that a StatefulDataLoader loses if no PositionedLoader is around it.

    Generators of this process are in the position: see `generators_beside`. Those of worker processes are not, nor is
    the start of an order that a sampler draws from its own. What workers draw from their process's is seen by nobody
    here, so the log says it.
    """
    yield from stateful_faults(loader, allow)
    if is_of_torchdata(loader):
        yield from unasked_faults(loader, allow)
        if loader.num_workers:
            _log.warning(f"data: {_DRAWN_AGAIN}")


def unasked_faults(loader: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each generator of which workers have copies, and each dataset whose state nobody asks for."""
    unasked = _unasked_data(loader)
    if loader.num_workers:
        left_out = [] if unasked is not None else _left_out(getattr(loader, "dataset", None))
        for generator in [*_drawn_for(loader), *left_out]:
            yield from fault_of("data: it draws from a", generator, _COPIED, allow)
    for data in stated_in(unasked):
        yield from fault_of("data:", data, _UNASKED, allow)


def _left_out(data: Any) -> list[Any]:
    """Return the generators that data draws from for samples, and that change nothing in the state that it gives."""
    found = []
    for generator in _drawn_by([data], _FOR_SAMPLES) if hasattr(data, "state_dict") else ():
        with generators_kept(beside=[generator]):
            before = _stated(data)
            if isinstance(generator, torch.Generator):
                torch.rand((), generator=generator, device=generator.device)
            else:
                generator.random()
            found += [generator] if _stated(data) == before else []
    return found


def _stated(data: Any) -> bytes | None:
    """Return the state of data; None if it has one in worker processes alone, as one that asks for their number."""
    with suppress(Exception):  # whatever the user's object raises where it was not read
        return typed_json.dumps(data.state_dict())
    return None


def stated_in(data: Any) -> list[Any]:
    """Return the datasets with a length that give their state: the data itself, and those that torch's put together."""

    def gives(value: Any) -> bool:
        is_data = value is data or (isinstance(value, Dataset) and not isinstance(value, IterableDataset))
        return is_data and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

    return [] if isinstance(data, IterableDataset) else held_by(data, gives)


def generators_beside(loader: Any) -> list[Any]:
    """Return the generators that this process draws from for a StatefulDataLoader, and that its state leaves out."""
    if not is_of_torchdata(loader):
        return []
    own = None if loader.persistent_workers else loader.generator  # see seed_workers_apart
    return [*held_generators(own), *([] if loader.num_workers else _drawn_for(loader))]


def length_of(data: Any) -> int | None:
    """Return how many batches or samples there are, if that is known."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # an IterableDataset without a length
        return None


def _unasked_data(loader: Any) -> Any:
    """Return the dataset, if the loader does not ask it for its state; else None."""
    data = getattr(loader, "dataset", None)
    is_asked = isinstance(data, IterableDataset) or (hasattr(loader, "state_dict") and hasattr(data, "state_dict"))
    return None if is_asked else data


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


def _drawn_for(loader: Any) -> list[Any]:
    """Return the generators that a loader draws from for batches, but those that it seeds for each sample."""
    return _drawn_by([_unasked_data(loader), getattr(loader, "collate_fn", None)], _FOR_SAMPLES)


def _drawn_by(value: Any, anew: Collection[str] = (), *, within: bool = True) -> list[Any]:
    """Return the generators that an object holds, but those that it seeds anew or that only its constructor has used.

    `anew`: the methods that may seed one; absent, all but constructors. `within`: absent, also of samplers in it; else
    it returns these themselves.
    """
    found = held_by(value, lambda v: is_random(v) or not (within or v is value or not isinstance(v, Sampler)))
    owners = held_by(value, lambda v: is_own(v) and any(map(is_random, getattr(v, "__dict__", {}).values())))
    tops = value if isinstance(value, list) else [value]
    unused = [
        generator
        for owner in owners
        for name, generator in vars(owner).items()
        if (any(owner is top for top in tops) and not _uses(type(owner), name)) or _seeds_anew(owner, anew)
    ]
    return [each for each in found if not any(each is other for other in unused)]


def _codes_in(kind: type, names: Collection[str] = ()) -> list[CodeType]:
    """Return the code of a class's methods but its constructors. `names`: of which ones; absent, of all."""
    methods = [(name, method) for base in kind.__mro__ for name, method in vars(base).items() if name != "__init__"]
    return [code for name, method in methods if name in names or not names for code in codes_of(method)]


def _uses(kind: type, name: str) -> bool:
    """Return whether a class's methods name an attribute, or give the object itself to code that may."""
    if any(name in (*code.co_names, *code.co_consts) for code in codes_within(*_codes_in(kind))):
        return True
    for code in (code for own in own_and_base(kind)[0] for method in vars(own).values() for code in codes_of(method)):
        its, read = code.co_varnames[0], [*dis.get_instructions(code)]
        given = [a.argval for a, b in pairwise(read) if a.opname.startswith("LOAD_FAST") and b.opname not in _OF_IT]
        if its in code.co_cellvars or any(its in (each if isinstance(each, tuple) else [each]) for each in given):
            return True
    return False


def _seeds_anew(owner: Any, methods: Collection[str]) -> bool:
    """Return whether one of an object's methods seeds a generator that it holds, whatever it is called with."""
    names = [name for name, value in vars(owner).items() if is_random(value)]
    for code in _codes_in(type(owner), methods):
        before, beyond = "", 0
        for i in dis.get_instructions(code):
            if i.argval in ("manual_seed", "seed") and i.offset >= beyond and before in (*names, *code.co_varnames):
                return True
            before, beyond = i.argval, max(beyond, i.argval) if i.opcode in dis.hasjrel else beyond
    return False
