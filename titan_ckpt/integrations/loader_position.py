"""PositionedLoader: a torch DataLoader with a position, which a resume returns to without reading what came before.

Owns the position in one epoch: the number of batches, and the random states that decide their order and content. Knows
no trainer: a loop of one's own iterates over it as it is, and subclasses do what their trainer does around a batch.

Batches of a map-style dataset are skipped by their indices alone. An IterableDataset, and a loader that has state_dict
and load_state_dict itself, such as torchdata's StatefulDataLoader, are asked for their own position. A stream of
datasets whose state leaves its position out is read again from the start of its epoch. Worker processes are seeded anew
for each batch, so that what they draw for it does not depend on what came before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from titan_ckpt.components.classes import class_name, is_of_library, names_of
from titan_ckpt.components.items.item import DataRank
from titan_ckpt.components.known.loaders import (
    POSITIONED,
    begin_afresh,
    copied_faults,
    is_of_torchdata,
    samplers_of,
    stateful_faults,
)
from titan_ckpt.components.known.streams import begin_once, functions_of, is_shuffled, seeds_of, stream_faults
from titan_ckpt.components.unsaved_state import fault_of
from titan_ckpt.errors import LoadMismatchError, counted, refuse
from titan_ckpt.integrations.data_order import OrderWatch, collator_faults, has_state, sampler_faults
from titan_ckpt.process import RandomState, Seeded, get_random, held_generators, set_random

_log = logging.getLogger(__name__)
_END, _UNREAD = object(), object()
_KEPT = (
    "its set_epoch does not reach worker processes that are kept, and a resumed run would have new ones: leave "
    "persistent_workers out"
)
_UNSAID = (
    "does not say where an epoch begins after one that was left: read each to its end, or by a DataLoader, and a "
    "DistributedSampler if there is one, of torch"
)
_NOT_THERE = "within which the run was resumed, is not read on yet, and its data is where it began: read a batch first"
_AFRESH = 'or start the data afresh: checkpoint.resume.exclude = ["dataloader"]'


class PositionedLoader:
    """Iterates over a DataLoader, counts its batches, and continues where its state says.

    ```
    sampler = DistributedSampler(data)  # tells each rank its share
    loader = PositionedLoader(DataLoader(data, batch_size=4, sampler=sampler))
    with CheckpointManager(config, model_parts=[model], dataloader=loader) as manager: ...
    ```

    Each `for batch in loader` is one epoch, or after a load the rest of one; samplers are told its number. Another
    number of ranks continues at the same sample if a DistributedSampler divides the data.
    """

    judges_collator = True
    """Whether nobody else looks at the function that makes batches."""
    reads_to_end = True
    """Whether the end of a stream that the loop has left at its length is read when the next epoch begins."""

    def __init__(
        self, loader: Any, inner: Any = None, data_rank: DataRank | None = None, allow: Collection[str] = ()
    ) -> None:
        """Wrap a loader. `inner`: the DataLoader inside of a trainer's wrapper. `data_rank`: whose share it reads.

        `allow`: names of classes of samplers and streams that need not continue exactly.
        Raises: ConfigError for data whose position cannot be known.
        """
        self.loader = loader
        self.inner: Any = loader if inner is None else inner
        self.epoch = 0
        self.num_batches = 0
        """Batches of this epoch that were returned."""
        share = data_rank or _share_of(self.inner)
        self.dp_rank, self.dp_world_size = share.rank, share.size
        """Which share of the data this process reads, and the number of shares."""
        self._is_divided = share.size == 1 or any(map(_divides, samplers_of(self.inner)))
        """Whether the ranks take the entries of one order in turn, so that what they have read is its beginning."""
        self._random = RandomState()
        self._start: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._is_random_restored = False
        self._pending: dict[str, Any] | None = None
        """The position to continue at, from the start of an epoch until its order is drawn."""
        self._allow = allow
        self._seeds = _seeds_of(samplers_of(self.inner))
        self._goes_on = False
        """Whether this epoch has more batches than its length says."""
        self._reading: Any = None
        """torch's iterator over a stream, which knows that a batch of fewer samples is the last one."""
        self._is_ended = False
        """Whether the batch that was returned is such a one, so that the state of its stream is that of the next."""
        self._is_unread = False
        """Whether a stream is before the end of the epoch before, which its length alone has told."""
        self._ahead: dict[str, Any] | None = None
        """The position after the batch that was returned, when one more was read to know whether it is the last."""
        self._is_last = False
        self._num_left = 0
        """How often the loop has called next_epoch(), which ends the iterations that are under way."""
        self.read_again = self._why_read_again()
        """Why a resume reads the epoch from its start; "" if it does not."""
        begin_afresh(self.inner)
        if isinstance(self.inner, DataLoader):
            POSITIONED.add(self.inner)
        self._of_data = _drawn_from(self.inner, self._stream)
        faults = [f"data: {fault}"] if (fault := self._fault()) else [*self._order_faults()]
        refuse(*faults)

    # for subclasses

    def begin_epoch(self) -> None:
        """Do what the trainer does before it iterates: tell every sampler the epoch, as DistributedSampler requires."""
        for sampler in samplers_of(self.inner):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self.epoch)

    def deliver(self, batch: Any) -> Any:
        """Return the batch as the trainer gives it to the loop."""
        return batch

    def end_epoch(self) -> None:
        """Do what the trainer does after the last batch."""

    @property
    def looks_ahead(self) -> bool:
        """Return whether a batch waits for the next one to be read, because the loop asks whether it is the last."""
        return False

    @property
    def num_batches_at_once(self) -> int:
        """Return how many of the sampler's batches all ranks read together, while each of them reads one."""
        return self.dp_world_size

    # a DataLoader

    def __getattr__(self, name: str) -> Any:
        if name in {"loader", "inner"}:  # while it is built or copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def at_end(self) -> bool:
        """Return whether every batch of this epoch was returned; False while the length is unknown."""
        if self._is_last:
            return True
        return not self._goes_on and self.num_batches > 0 and self.num_batches == length_of(self.loader)

    @property
    def is_over(self) -> bool:
        """Return whether no batch of this epoch is left, which only this rank may know."""
        return self.at_end or self._is_ended

    def next_epoch(self) -> None:
        """Leave the rest of this epoch out, before the save of the step after which the loop leaves it.

        An iteration over it ends; after the last batch of an epoch, by itself.
        Raises: ConfigError for a stream or a sampler whose state says no beginning in the middle of an epoch.
        """
        if self.at_end and not self._is_before_end:
            return
        lost = [sampler for sampler in self._stateful_samplers() if is_of_torchdata(sampler)]
        lost += [self.inner.dataset] if self._gives_state and self._keeps_state else []
        refuse(*(f"data: next_epoch: {class_name(each)} {_UNSAID}" for each in lost if self.num_batches))
        if self._resumed and self.num_batches:
            is_at_position = self._source is None and not self.read_again and self._resumed["now"]["random"]
            refuse(*([] if is_at_position else [f"data: next_epoch: epoch {self.epoch}, {_NOT_THERE}"]))
            self._resumed = {**self._resumed, "batches": 0, "start": None, "ahead": None}
        self.begin_next()
        self._num_left += 1

    def begin_next(self) -> None:
        """Go on to the next epoch."""
        self._is_unread = self._is_before_end
        self.epoch, self.num_batches = self.epoch + 1, 0
        self._goes_on = self._is_last = self._is_ended = False
        self._ahead = None

    def leave_epoch(self) -> None:
        """Begin anew, because the loop has left the rest of an epoch out."""
        self.begin_next()

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if self.is_over and not resumed:
            self.begin_next()
        elif self.num_batches and not resumed:
            left = f"the loop leaves epoch {self.epoch} after {counted(self.num_batches, 'batch', 'batches')}"
            rest = "of which a run resumed from a step saved there would read the rest first"
            _log.warning(f"data: {left}, {rest}: call the loader's next_epoch() before that save")
            self.leave_epoch()
        num_left, self.num_batches = self._num_left, resumed["batches"] if resumed else 0
        if resumed and self._is_random_restored:
            resumed = {**resumed, "now": self._get_random()}  # hooks of the epoch may have drawn
        elif resumed and not self.num_batches:
            self._set_random(resumed["now"])
        self._is_random_restored = False
        self.begin_epoch()
        batches = self._begin(resumed)
        batch = next(batches, _END)
        if resumed and resumed["ahead"]:
            self._set_random(resumed["now"], within=True)
        self._of_data = _drawn_from(self.inner, self._stream)  # an epoch or the first batch may have made them
        while batch is not _END:
            self.num_batches += 1
            self._ahead = None
            self._is_ended = getattr(getattr(self._reading, "_dataset_fetcher", None), "ended", False)
            following = _UNREAD
            is_lost = not self._gives_state and isinstance(self.inner.dataset, IterableDataset)
            if self.looks_ahead or (self.at_end and not is_lost):
                # a sampler may draw once more at its end, and a length may be an estimate
                self._ahead = self._place()
                following = next(batches, _END)
                self._is_last = following is _END
                self._goes_on = not self._is_last
            yield self.deliver(batch)
            if self._num_left != num_left:
                self.end_epoch()
                return
            batch = next(batches, _END) if following is _UNREAD else following
        self.end_epoch()
        self._is_last = True
        self.begin_next()

    def _begin(self, resumed: dict[str, Any] | None) -> Iterator[Any]:
        """Yield the batches that follow, with the random states that the save has found."""
        source = self._source
        now = resumed and (resumed["ahead"] or resumed["now"])
        if resumed and self.num_batches and hasattr(self._stream, "_ex_iterable"):
            self._stream.set_epoch(resumed["stream_epoch"])
        if self.read_again:
            within = resumed is not None and self.num_batches > 0
            if resumed and within:
                why = f"{self.read_again}: {self.num_batches} batches of epoch {self.epoch}"
                _log.warning(f"data: {why} are read again, and not trained on")
                self._set_random(resumed["start"])
            self._start = self._get_random()
            self._reading = batches = _iterated(self.inner, self._seeded)
            deque(islice(batches, self.num_batches), 0)
            if resumed and within:
                self._set_of_data(resumed)
            if resumed and now and (within or resumed["is_kept"]):
                self._set_random(now)
            yield from batches
            return
        if source is None:
            self._pending = resumed
            yield from _iterated(self.inner, self._in_order)
            return
        dataset: Any = getattr(self.inner, "dataset", None)
        is_unread = self._is_unread and self.reads_to_end and source is dataset and self._keeps_state
        self._is_unread = False
        is_ended = resumed and source is dataset and resumed.get("is_ended")
        if resumed and resumed["source"] is not None and (self._keeps_state or not is_ended):
            source.load_state_dict(resumed["source"])
        if is_ended and now:
            self._set_random(now)
            return
        before = self._place() | ({"source": resumed["source"]} if resumed else {}) if is_unread else {}
        if is_of_torchdata(self.inner) and isinstance(dataset, IterableDataset) and self.inner.num_workers:
            # it counts the entries of a sampler again, from the start of the epoch
            self._start = resumed["start"] if resumed and resumed["start"] else self._get_random()
            batches = _iterated(self.inner, self._seeded, partial(self._iterator, resumed))
        else:
            batches = self._iterator(resumed)
        self._reading = batches
        if resumed and now and (self.num_batches or resumed["is_kept"]):
            self._set_random(now)
        elif is_unread:
            self._set_random(before)
            if next(batches, _END) is not _END:  # it goes on after as many batches as its length says
                source.load_state_dict(before["source"])
                self._set_of_data(before)
                self._set_random(before)
            self._reading = batches = iter(self.inner)
        begin_once(self.inner)
        yield from batches

    def _iterator(self, resumed: dict[str, Any] | None) -> Iterator[Any]:
        """Return the loader's iterator.

        torchdata's loader makes one at the position first, and at the end of an epoch another: both draw a seed.
        """
        if resumed and resumed["source"] is not None and not self.num_batches and is_of_torchdata(self.inner):
            self.inner.state_dict()
            self._set_random(resumed["now"])
        return iter(self.inner)

    def _in_order(self, sampler: Any) -> Iterator[Any]:
        """Yield the entries of a sampler after those that were read.

        A sampler draws its order at its first entry, after a DataLoader has drawn a seed for its workers, which it does
        not do again if it keeps them.
        """
        resumed, self._pending = self._pending, None
        skipped = resumed["batches"] if resumed else 0
        if resumed and (skipped or resumed["is_kept"]):
            self._set_random(resumed["start"] if skipped else resumed["now"])
        self._start = self._get_random()
        order = iter(sampler)
        watch = OrderWatch(samplers_of(self.inner))
        first = next(order, _END)
        refuse(*watch.faults(self._allow))
        if first is _END and resumed and self._stateful_samplers():  # its state was that of its last epoch's end
            order = iter(sampler)
            first = next(order, _END)
        order = order if first is _END else chain([first], order)
        deque(islice(order, skipped), 0)
        if resumed and skipped and (now := (resumed["ahead"] or resumed["now"])["random"]) is not None:
            self._random.load_state_dict(now)
        yield from self._seeded(watch.watched(order, self._allow), skipped)

    def _seeded(self, order: Iterable[Any], first: int = 0) -> Iterator[Any]:
        """Yield entries of which each seeds the worker process that gets it. `first`: the number of the first one."""
        assert self._start is not None
        of_epoch = _seed_of(self.epoch, self.dp_rank, self._start["random"]["torch"].tolist())
        for number, entry in enumerate(order, first):
            yield Seeded(entry, _seed_of(of_epoch, number)) if self.inner.num_workers else entry

    # its position

    @property
    def is_resumed_within(self) -> bool:
        """Return whether the next batch is the first after a resume, and not the first of its epoch."""
        return self._resumed is not None and self.num_batches > 0

    def restore_random(self, *, is_done: bool = False) -> None:
        """Set the random states of an epoch's end, before hooks of the next epoch draw from them.

        `is_done`: whether no batch will be read, so that those within an epoch are set, too.
        """
        if self._resumed and (is_done or not self.num_batches):
            self._set_random(self._resumed["now"])
            self._is_random_restored = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were returned."""
        done = self.at_end
        within = not done and self.num_batches > 0
        place = self._ahead if within and self._ahead else self._place(next_epoch=not within)
        return {
            "epoch": self.epoch + done,
            "batches": 0 if done else self.num_batches,
            "start": self._start if within else None,
            "now": self._get_random(),
            "ahead": place if place is self._ahead else None,
            "at_once": self.num_batches_at_once if self._is_divided else None,
            "is_kept": getattr(self.inner, "persistent_workers", False) and self._start is not None,
            "source": place["source"],
            "stream_epoch": int(getattr(self._stream, "_epoch", 0)),
            "of_data": place["of_data"],
            "is_ended": within and self._is_ended,
            "is_unread": self._is_before_end if self.num_batches else self._is_unread,
            "facts": self._facts(),
        }

    def _place(self, *, next_epoch: bool = False) -> dict[str, Any]:
        """Return what reading the next batch changes: the random states, and the state of a stream."""
        source = self._source
        if next_epoch and not self._keeps_state:
            source = None  # it begins afresh
        return {
            **self._get_random(),
            "source": None if source is None else deepcopy(source.state_dict()),
            "of_data": [get_random(generator) for generator in self._of_data],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position. Raises: LoadMismatchError for a position in different batches."""
        self._check_facts(state_dict, self._facts())
        self._resumed, self._start, self._is_last = state_dict, state_dict["start"], False
        self._goes_on = state_dict["batches"] == length_of(self.loader)  # else it would be the end
        self._is_ended, self._is_unread = state_dict.get("is_ended", False), state_dict.get("is_unread", True)
        self.epoch, self.num_batches = state_dict["epoch"], state_dict["batches"]
        self._set_of_data(state_dict)

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Continue at the position of a different number of ranks, if it is one of whole batches.

        Raises: LoadMismatchError.
        """
        first = state_dicts[0]
        of_ranks = {"length", "samplers"}
        self._check_facts(first, {name: fact for name, fact in self._facts().items() if name not in of_ranks})
        is_divided = self._is_divided and first["at_once"] is not None
        total = first["batches"] * (first["at_once"] or 1)
        alike = all((s["epoch"], s["batches"]) == (first["epoch"], first["batches"]) for s in state_dicts)
        orders = [(state["start"] or state["now"])["samplers"] for state in state_dicts]
        alike = alike and all(order == orders[0] for order in orders)
        stored, own = first["start"] or first["now"], self._get_random()
        samplers = samplers_of(self.inner)  # those without a generator draw from the process's random state
        random = [s for s in samplers if getattr(s, "generator", 0) is None and not hasattr(s, "initial_seed")]
        same_order = len(stored["generators"]) == len(own["generators"]) and not random and (is_divided or not total)
        if not alike or total % self.num_batches_at_once or first["source"] is not None or not same_order:
            why = "" if is_divided else ", because no DistributedSampler divides the data among ranks"
            raise LoadMismatchError(
                f"the checkpoint has the positions of {len(state_dicts)} data-parallel ranks, {first['batches']} "
                f"batches each, and {self.dp_world_size} ranks cannot continue there{why}: resume with "
                f"{len(state_dicts)}, {_AFRESH}"
            )
        batches = total // self.num_batches_at_once
        start = {**stored, "random": None}
        self._resumed = {**first, "batches": batches, "start": start, "now": start, "ahead": None, "is_kept": False}
        self.epoch, self.num_batches = first["epoch"], batches

    def _check_facts(self, state_dict: dict[str, Any], found: dict[str, Any]) -> None:
        """Compare facts of the data with those of a position. Raises: LoadMismatchError with both values of each."""
        expected = state_dict["facts"]
        wrong = [f"{name} was {expected[name]}, now {found[name]}" for name in found if found[name] != expected[name]]
        if wrong:
            raise LoadMismatchError(
                f"the checkpoint's position is batch {state_dict['batches']} of epoch {state_dict['epoch']} of other "
                f"batches: {'; '.join(wrong)}. Give the run the data settings it had, {_AFRESH}"
            )

    @property
    def _source(self) -> Any:
        """Return the object that knows its own position: the loader or its dataset; None if batches are counted."""
        if self.read_again:
            return None
        if self._gives_state:
            return self.inner
        return self.inner.dataset if isinstance(self.inner.dataset, IterableDataset) else None

    @property
    def _gives_state(self) -> bool:
        """Return whether the loader is asked for its position; torchdata's over a dataset with a length is not."""
        data = getattr(self.inner, "dataset", None)
        is_counted = is_of_torchdata(self.inner) and not isinstance(data, IterableDataset) and not has_state(data)
        return has_state(self.inner) and not is_counted and not self.read_again

    @property
    def _is_before_end(self) -> bool:
        """Return whether the end is known by the length alone: of a stream nothing is read on, which it would lose."""
        return self.at_end and not (self._is_last or self._is_ended)

    @property
    def _stream(self) -> Any:
        """Return the dataset, of which accelerate may have given this rank a part by a dataset around it."""
        data: Any = getattr(self.inner, "dataset", None)
        return data.dataset if class_name(data) == "accelerate.data_loader.IterableDatasetShard" else data

    def _why_read_again(self) -> str:
        stream = self._stream
        if not hasattr(stream, "_ex_iterable") or not isinstance(self.inner, DataLoader):
            return ""
        if is_shuffled(stream):
            return "the state of a stream leaves out the buffer of shuffle()"
        if stream is not self.inner.dataset:
            return f"the stream has fewer shards ({stream.num_shards}) than ranks, so each rank reads all of it"
        if self.inner.num_workers and not has_state(self.inner):
            return "worker processes keep their positions to themselves"
        return ""

    @property
    def _keeps_state(self) -> bool:
        """Return whether the state of a stream at the end of an epoch decides the next one; none of datasets does."""
        dataset = getattr(self.inner, "dataset", None)
        return isinstance(dataset, IterableDataset) and not hasattr(dataset, "_starting_state_dict")

    def _order_faults(self) -> Iterator[str]:
        data = getattr(self.inner, "dataset", None)
        held = self._of_data if bool(self.read_again) or not getattr(self.inner, "num_workers", 0) else ()
        yield from stream_faults(data, self._allow, is_read_again=bool(self.read_again), held=held)
        if self.judges_collator:
            yield from collator_faults(getattr(self.inner, "collate_fn", None), self._allow, self._of_data)
        if self._gives_state:
            yield from stateful_faults(self.inner, self._allow)
        else:
            yield from sampler_faults(samplers_of(self.inner), self._allow)
        is_told = hasattr(self._stream, "set_epoch") and not hasattr(self._stream, "_ex_iterable")
        if is_told and getattr(self.inner, "persistent_workers", False):  # datasets tells them by shared memory
            yield from fault_of("data:", self._stream, _KEPT, self._allow)
        if not self.read_again:
            yield from copied_faults(self.inner, self._allow)

    def _fault(self) -> str | None:
        if has_state(self.inner) or self.read_again:
            return None
        if not isinstance(self.inner, DataLoader):
            return (
                f"{type(self.inner).__name__} is no DataLoader and has no state_dict and load_state_dict, so its "
                "position is unknown: give it both"
            )
        dataset = self.inner.dataset
        if not isinstance(dataset, IterableDataset):
            return None
        name = type(dataset).__name__
        if not has_state(dataset):
            return (
                f"{name} is an IterableDataset without state_dict and load_state_dict, so a resume would read all of "
                "it again: give it both, as datasets.IterableDataset has them"
            )
        if self.inner.num_workers:
            return (
                f"{name} is read by {self.inner.num_workers} worker processes, which keep their positions to "
                "themselves: use 0 workers, or torchdata's StatefulDataLoader"
            )
        return None

    def _set_of_data(self, state_dict: dict[str, Any]) -> None:
        """Set the generators that the data draws from."""
        for generator, state in zip(self._of_data, state_dict["of_data"], strict=True):
            set_random(generator, state)

    def _facts(self) -> dict[str, Any]:
        samplers = samplers_of(self.inner)
        sizes = [s.batch_size for s in samplers if hasattr(s, "batch_size")]
        size = sizes[0] if sizes else getattr(self.inner, "batch_size", None)
        return {
            **({"workers": self.inner.num_workers} if self.read_again else {}),
            "length": length_of(self.loader),
            "samples": length_of(getattr(self.inner, "dataset", None)),
            "batch_size": size,
            "seed": [*self._seeds, *seeds_of(self._stream)],
            "number of random generators in the dataset (made in its constructor)": len(self._of_data),
            "shuffle": [s.shuffle for s in samplers if isinstance(getattr(s, "shuffle", None), bool)],
            "samplers": [type(sampler).__qualname__ for sampler in samplers],
        }

    def _get_random(self) -> dict[str, Any]:
        return {
            "random": self._random.state_dict(),
            "generators": [generator.get_state() for generator in self._generators()],
            "samplers": [sampler.state_dict() for sampler in self._stateful_samplers()],
        }

    def _set_random(self, stored: dict[str, Any], *, within: bool = False) -> None:
        """Set the random states. `within`: samplers are within their orders, which they are not given anew."""
        if stored["random"] is not None:
            self._random.load_state_dict(stored["random"])
        for generator, state in zip(self._generators(), stored["generators"], strict=True):
            generator.set_state(state)
        for sampler, state in zip(self._stateful_samplers(), stored["samplers"], strict=True) if not within else ():
            sampler.load_state_dict(state)

    def _stateful_samplers(self) -> list[Any]:
        """Return the samplers that give their state, which is set as it was before an epoch's order was drawn."""
        return [] if self._gives_state else [sampler for sampler in samplers_of(self.inner) if has_state(sampler)]

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that decide the order; one that is seeded anew for each epoch is none of them."""
        owners = [self.inner, *samplers_of(self.inner)]
        return generators_in([owner for owner in owners if not hasattr(owner, "initial_seed")])


def order_of(loader: Any) -> list[Any]:
    """Return the states of the generators by which a loader beside the training's goes on, without a position."""
    return [*map(get_random, _generators_of(loader))]


def set_order(loader: Any, states: Sequence[Any]) -> None:
    """Set what `order_of` has returned; some of the generators are made when they are used."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        set_random(generator, state)


def _generators_of(loader: Any) -> list[Any]:
    in_order = generators_in([loader, *samplers_of(loader)])
    return [*in_order, *_drawn_from(loader, getattr(loader, "dataset", None))]


def generators_in(owners: Collection[Any]) -> list[torch.Generator]:
    """Return the generators that loaders and samplers have, each once."""
    found = [getattr(owner, "generator", None) for owner in owners]
    return [*{id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values()]


def _drawn_from(loader: Any, data: Any) -> list[Any]:
    """Return the generators that a loader's data and the function that makes batches draw from."""
    return held_generators([data, *functions_of(data), getattr(loader, "collate_fn", None)])


def _seeds_of(samplers: Collection[Any]) -> list[int]:
    """Return the seeds that samplers are built with; one with a state may change its own in each epoch."""
    found = [getattr(sampler, name, None) for sampler in samplers for name in ("initial_seed", "seed")]
    return [seed for seed in found if isinstance(seed, int)]


def _seed_of(*facts: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(facts).encode()) >> 1


def _divides(sampler: Any) -> bool:
    """Return whether a sampler deals the entries of one order to the ranks in turn."""
    owner = next((kind for kind in type(sampler).__mro__ if "__iter__" in vars(kind)), object)
    is_shard = names_of(owner)[0] == "accelerate.data_loader.BatchSamplerShard"
    return is_shard or (isinstance(sampler, DistributedSampler) and is_of_library(owner))


def length_of(data: Any) -> int | None:
    """Return how many batches or samples there are, if that is known."""
    try:
        return len(data)
    except TypeError:  # an IterableDataset without a length
        return None


def _share_of(loader: Any) -> DataRank:
    """Return the share that a distributed sampler takes, which ranks of tensor parallelism have in common."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler) and not hasattr(loader, "dp_rank"):
            return DataRank(sampler.rank, sampler.num_replicas)
    is_alone = not torch.distributed.is_initialized()
    rank, size = (0, 1) if is_alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return DataRank.of(loader, rank, size)


class _Through:
    """A sampler whose entries go through a function. Workers that are kept use the same one in every epoch."""

    def __init__(self, sampler: Any, function: Callable[[Any], Iterator[Any]]) -> None:
        self.sampler, self._function = sampler, function

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        yield from self._function(self.sampler)


def _iterated(
    loader: Any, function: Callable[[Any], Iterator[Any]], begin: Callable[[], Iterator[Any]] | None = None
) -> Iterator[Any]:
    """Begin an iteration, by `begin` if it is given, in which the sampler's entries go through a function.

    No data of those that it drops is read.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    whole = loader.__dict__[name]
    loader.__dict__[name] = _Through(whole, function)  # DataLoader refuses setattr
    try:
        return begin() if begin else iter(loader)
    finally:
        loader.__dict__[name] = whole
