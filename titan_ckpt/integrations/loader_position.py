"""PositionedLoader: a torch DataLoader with a position, which a resume returns to without reading what came before.

Owns what a step holds of the position, and what is known of an epoch's end. `loader_reading` owns how an epoch is read,
and the order in which random numbers are drawn. Knows no trainer: a loop of one's own iterates over it as it is, and
subclasses do what their trainer does around a batch.

A step has the number of the epoch, how many of its batches were returned, the states before its order was drawn
(`start`) and at the save (`now`), the state of a stream, a loader or its workers (`source`), and those that other data
gives, and of the generators that it draws from (`of_data`). If one batch more was read, `source`, `of_data` and `ahead`
are of the moment before that. After the last batch of an epoch a step has the start of the next one.

An epoch ends where the loader has no more batches, which is known when one more is asked for. A loop may never ask, so
after as many batches as the length says this class asks; not for one of a stream, which would lose what it reads if the
length is too small: that end is read when the next epoch begins (`is_unread`). A batch of a stream that is smaller than
the others is its last one on this rank (`is_ended`). A loop that leaves an epoch calls `next_epoch()`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, DistributedSampler

from titan_ckpt.components.classes import class_name, is_of_library, names_of
from titan_ckpt.components.items.item import DataRank
from titan_ckpt.components.items.states import Generators
from titan_ckpt.components.known.loaders import POSITIONED, begin_afresh, is_of_torchdata, length_of, samplers_of
from titan_ckpt.components.known.streams import seeds_of
from titan_ckpt.errors import LoadMismatchError, counted, refuse
from titan_ckpt.integrations.loader_reading import END, reading_of
from titan_ckpt.process import process_state

_log = logging.getLogger(__name__)
_UNREAD = object()
_UNSAID = (
    "does not say where an epoch begins after one that was left: read each to its end, without persistent_workers, or "
    "by a DataLoader, and a DistributedSampler if there is one, of torch"
)
_NOT_THERE = "within which the run was resumed, is not read on yet, and its data is where it began: read a batch first"
_STATED = "number of datasets whose state_dict() is stored"
_GENERATORS = "number of random generators of the loader and its samplers"
_AFRESH = 'or start the data afresh: checkpoint.resume.exclude = ["dataloader"]'
_DRAWN = (
    "random numbers were drawn, or seeded, between a save after an epoch's last batch and the next epoch, which a run "
    "resumed there leaves out: draw them from a generator, as DataLoader(..., generator=torch.Generator()) does"
)


class _Following(Enum):
    """Says what is known of the batch after the one that was returned.

    UNKNOWN: nothing but the length of the epoch. ANOTHER: there is one, whatever the length says. NONE_HERE: there is
    none on this rank; others may have one. NONE: there is none.
    """

    UNKNOWN, ANOTHER, NONE_HERE, NONE = range(4)


_WAITING: WeakKeyDictionary[PositionedLoader, int] = WeakKeyDictionary()
"""Those that have loaded a position, by the number of the load, of which the first one sets the process's states."""


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
    is_told_draws = True
    """Whether nobody else sets the random states of an epoch's end before the loop draws from them."""

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
        self._seeds = _seeds_of(samplers_of(self.inner))
        self._resumed: dict[str, Any] | None = None
        """The position that was loaded, until it is read on; its `now` is None if the process has these states."""
        self._following = _Following.UNKNOWN
        self._is_unread = False
        self._ahead: dict[str, Any] | None = None
        self._at_start: bytes | None = None
        """The process's random states at a save of the start of an epoch, until that begins."""
        self._num_left = 0
        """How often the loop has called next_epoch(), which ends the iterations that are under way."""
        data: Any = getattr(self.inner, "dataset", None)
        # accelerate may have given this rank a part of a stream, by a dataset around it
        self._stream = data.dataset if class_name(data) == "accelerate.data_loader.IterableDatasetShard" else data
        begin_afresh(self.inner)
        if isinstance(self.inner, DataLoader):
            POSITIONED.add(self.inner)
        self._reading = reading_of(self.inner, self._stream, allow)
        self._random = self._reading.random
        self.read_again = self._reading.why_again
        """Why a resume reads the epoch from its start; "" if it does not."""
        refuse(*self._reading.faults(judges_collator=self.judges_collator))

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
        if self._following in (_Following.NONE, _Following.ANOTHER):
            return self._following is _Following.NONE
        return self.num_batches > 0 and self.num_batches == length_of(self.loader)

    @property
    def is_over(self) -> bool:
        """Return whether no batch of this epoch is left, which only this rank may know."""
        return self.at_end or self._following is _Following.NONE_HERE

    @property
    def _is_before_end(self) -> bool:
        """Return whether the end is known by the length alone: of a stream nothing is read on, which it would lose."""
        return self.at_end and self._following is _Following.UNKNOWN

    def next_epoch(self) -> None:
        """Leave the rest of this epoch out, before the save of the step after which the loop leaves it.

        An iteration over it ends; after the last batch of an epoch, by itself.
        Raises: ConfigError for data, or a sampler, whose state says no beginning in the middle of an epoch.
        """
        if self.at_end and not self._is_before_end:
            return
        self.check_leaving()
        if self._resumed and self.num_batches:
            is_at_position = self._reading.source is None and not self.read_again and self._resumed["now"]["random"]
            refuse(*([] if is_at_position else [f"data: next_epoch: epoch {self.epoch}, {_NOT_THERE}"]))
            self._resumed = {**self._resumed, "batches": 0, "start": None, "ahead": None, "source": None}
        self.begin_next()
        self._num_left += 1

    def check_leaving(self) -> None:
        """Raise ConfigError if this epoch is left within, and no step would say where the next one begins."""
        lost = [sampler for sampler in self._random.samplers() if is_of_torchdata(sampler)]
        lost += [getattr(self.inner, "dataset", self.inner)] if self._reading.is_beyond else []
        is_left = self.num_batches and (not self.at_end or self._following is _Following.ANOTHER)
        refuse(*(f"data: next_epoch: {class_name(each)} {_UNSAID}" for each in lost if is_left))

    def begin_next(self) -> None:
        """Go on to the next epoch."""
        self._is_unread = self._is_before_end
        self.epoch, self.num_batches = self.epoch + 1, 0
        self._following, self._ahead = _Following.UNKNOWN, None

    def leave_epoch(self) -> None:
        """Begin anew, because the loop has left the rest of an epoch out."""
        self.begin_next()

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._begin_anew()
        else:
            self.num_batches, now = resumed["batches"], self._now_of(resumed)
            if resumed["now"] and not self.num_batches:
                self._random.set(now)
            resumed = {**resumed, "now": now}
            begun = _WAITING.pop(self, None)
            for other in [each for each, number in _WAITING.items() if number == begun]:
                del _WAITING[other]
        self._at_start = None
        num_left, is_unread, self._is_unread = self._num_left, self._is_unread and self.reads_to_end, False
        self.begin_epoch()
        batches = self._reading.begin(self.epoch, self.dp_rank, resumed, is_unread=is_unread)
        batch = next(batches, END)
        if resumed and resumed["ahead"]:
            self._random.set(resumed["now"], within=True)
        self._random.find_data()
        while batch is not END:
            self.num_batches += 1
            self._ahead, following = None, _UNREAD
            self._following = _Following.NONE_HERE if self._reading.is_ended else _Following.UNKNOWN
            if self.looks_ahead or (self.at_end and self._reading.reads_on):
                self._ahead = self._place()
                following = next(batches, END)
                self._following = _Following.NONE if following is END else _Following.ANOTHER
            yield self.deliver(batch)
            if self._num_left != num_left:
                self.end_epoch()
                return
            batch = next(batches, END) if following is _UNREAD else following
        self.end_epoch()
        self._following = _Following.NONE
        self.begin_next()

    def _now_of(self, resumed: dict[str, Any]) -> dict[str, Any]:
        """Return the states with which a position goes on; hooks, or another loader, may have set the process's."""
        own = self._random.get()
        return {**(resumed["now"] or own), **({} if self in _WAITING else {"random": own["random"]})}

    def _begin_anew(self) -> None:
        """Go on to the next epoch, if the loop was in one."""
        if self.is_told_draws and self._at_start not in (None, process_state()):
            _log.warning(f"data: {_DRAWN}")
            self.is_told_draws = False
        if self.is_over:
            self.begin_next()
        elif self.num_batches:
            left = f"the loop leaves epoch {self.epoch} after {counted(self.num_batches, 'batch', 'batches')}"
            rest = "of which a run resumed from a step saved there would read the rest first"
            _log.warning(f"data: {left}, {rest}: call the loader's next_epoch() before that save")
            self.leave_epoch()

    # its position

    @property
    def is_resumed(self) -> bool:
        """Return whether a position was loaded, and is not read on yet."""
        return self._resumed is not None

    @property
    def is_resumed_within(self) -> bool:
        """Return whether the next batch is the first after a resume, and not the first of its epoch."""
        return self._resumed is not None and self.num_batches > 0

    def restore_random(self, *, is_done: bool = False) -> None:
        """Set the random states of an epoch's end, before hooks of the next epoch draw from them.

        `is_done`: whether no batch will be read, so that those within an epoch are set, too.
        """
        if self._resumed and self._resumed["now"] and (is_done or not self.num_batches):
            self._random.set(self._now_of(self._resumed))
            self._resumed = {**self._resumed, "now": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were returned."""
        if self._resumed:  # nothing was read, and a stream is not there yet
            return {**self._resumed, "epoch": self.epoch, "now": self._now_of(self._resumed)}
        done = self.at_end
        within = not done and self.num_batches > 0
        self._at_start = None if within else process_state()
        ahead = self._ahead if within else None
        place = ahead or self._place(next_epoch=not within)
        return {
            "epoch": self.epoch + done,
            "batches": self.num_batches if within else 0,
            "start": self._reading.start if within else None,
            "now": self._random.get(),
            "ahead": ahead,
            "at_once": self.num_batches_at_once if self._is_divided else None,
            "is_kept": getattr(self.inner, "persistent_workers", False) and self._reading.start is not None,
            "source": place["source"],
            "stream_epoch": int(getattr(self._stream, "_epoch", 0)),
            "of_data": place["of_data"],
            "is_ended": within and self._following is _Following.NONE_HERE,
            "is_unread": self._is_before_end if self.num_batches else self._is_unread,
            "facts": self._facts(),
        }

    def _place(self, *, next_epoch: bool = False) -> dict[str, Any]:
        """Return what reading the next batch changes: the random states, and the state of a stream."""
        is_afresh = next_epoch and not self._reading.keeps_state
        state = None if is_afresh else self._reading.state()
        return {**self._random.get(), "source": state, "of_data": self._random.get_data()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position. Raises: LoadMismatchError for a position in different batches."""
        self._check_facts(state_dict, self._facts())
        self._resumed, self._is_unread = state_dict, state_dict.get("is_unread", True)
        self.epoch, self.num_batches = state_dict["epoch"], state_dict["batches"]
        self._following = _Following.NONE_HERE if state_dict.get("is_ended", False) else _Following.UNKNOWN
        if self.num_batches == length_of(self.loader):  # else it would be the end
            self._following = _Following.ANOTHER
        self._random.set_data(state_dict["of_data"])
        _WAITING[self] = Generators.num_loads

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Continue at the position of a different number of ranks, if it is one of whole batches.

        Raises: LoadMismatchError.
        """
        first, facts = state_dicts[0], self._facts()
        of_ranks = {"length", "samplers", _GENERATORS}
        self._check_facts(first, {name: fact for name, fact in facts.items() if name not in of_ranks})
        is_divided = self._is_divided and first["at_once"] is not None
        total = first["batches"] * (first["at_once"] or 1)
        alike = all((s["epoch"], s["batches"]) == (first["epoch"], first["batches"]) for s in state_dicts)
        orders = [(state["start"] or state["now"])["samplers"] for state in state_dicts]
        alike = alike and all(order == orders[0] for order in orders)
        stored, own = first["start"] or first["now"], self._random.get()
        samplers = samplers_of(self.inner)  # those without a generator draw from the process's random state
        random = [s for s in samplers if getattr(s, "generator", 0) is None and not hasattr(s, "initial_seed")]
        same_order = len(stored["generators"]) == len(own["generators"]) and not random and (is_divided or not total)
        has_state = first["source"] is not None or self._random.stated
        if not alike or total % self.num_batches_at_once or has_state or not same_order:
            why = "" if is_divided else ", because no DistributedSampler divides the data among ranks"
            raise LoadMismatchError(
                f"the checkpoint has the positions of {len(state_dicts)} data-parallel ranks, {first['batches']} "
                f"batches each, and {self.dp_world_size} ranks cannot continue there{why}: resume with "
                f"{len(state_dicts)}, {_AFRESH}"
            )
        self.epoch, self.num_batches = first["epoch"], total // self.num_batches_at_once
        start = {**stored, "random": None}
        self._resumed = {
            **first, "batches": self.num_batches, "start": start, "now": start, "ahead": None, "is_kept": False,
            "at_once": self.num_batches_at_once if self._is_divided else None, "facts": facts,
        }  # fmt: skip

    def _check_facts(self, state_dict: dict[str, Any], found: dict[str, Any]) -> None:
        """Compare facts of the data with those of a position. Raises: LoadMismatchError with both values of each."""
        expected = {_STATED: 0, **state_dict["facts"], _GENERATORS: len(state_dict["now"]["generators"])}
        wrong = [f"{name} was {expected[name]}, now {found[name]}" for name in found if found[name] != expected[name]]
        if wrong:
            raise LoadMismatchError(
                f"the checkpoint's position is batch {state_dict['batches']} of epoch {state_dict['epoch']} of other "
                f"batches: {'; '.join(wrong)}. Give the run the data settings it had, {_AFRESH}"
            )

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
            "number of random generators in the dataset (made in its constructor)": len(self._random.of_data),
            _STATED: len(self._random.stated),
            "shuffle": [s.shuffle for s in samplers if isinstance(getattr(s, "shuffle", None), bool)],
            "samplers": [type(sampler).__qualname__ for sampler in samplers],
            _GENERATORS: len(self._random.generators()),
        }


def _seeds_of(samplers: Collection[Any]) -> list[int]:
    """Return the seeds that samplers are built with; one with a state may change its own in each epoch."""
    found = [getattr(sampler, name, None) for sampler in samplers for name in ("initial_seed", "seed")]
    return [seed for seed in found if isinstance(seed, int)]


def _divides(sampler: Any) -> bool:
    """Return whether a sampler deals the entries of one order to the ranks in turn."""
    owner = next((kind for kind in type(sampler).__mro__ if "__iter__" in vars(kind)), object)
    is_shard = names_of(owner)[0] == "accelerate.data_loader.BatchSamplerShard"
    return is_shard or (isinstance(sampler, DistributedSampler) and is_of_library(owner))


def _share_of(loader: Any) -> DataRank:
    """Return the share that a distributed sampler takes, which ranks of tensor parallelism have in common."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler) and not hasattr(loader, "dp_rank"):
            return DataRank(sampler.rank, sampler.num_replicas)
    is_alone = not torch.distributed.is_initialized()
    rank, size = (0, 1) if is_alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return DataRank.of(loader, rank, size)
