"""Ways to read the epochs of a loader: each from its start, or on from a position within one.

An epoch of a run that is not stopped draws random numbers in this order, which a resume repeats:

1. The trainer begins the epoch: it tells samplers the number, and may draw.
2. torch makes an iterator, which draws a seed for worker processes, unless it keeps them from an epoch before.
3. The sampler draws its order. The states before that are the epoch's `start`.
4. Batches are read. In this process they draw from its states, in a worker from a seed that `start` and their number
   decide, so that what one draws depends on none before it.
5. The loop's step draws. A save after it finds the states `now`.

A resume between two epochs sets `now` before 1, and before 3 once more if workers are kept (`is_kept`). A resume within
an epoch sets `start` before 3, leaves out what was read, and sets `now` before it reads the next batch. If that batch
was read before the save, to know whether there is one, `ahead` has the states before it: they are set in place of
`now`, and `now` when the batch is read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import xxhash
from torch.utils.data import DataLoader, IterableDataset

from titan_ckpt.components.known.loaders import is_of_torchdata, samplers_of, stateful_faults, unasked_faults
from titan_ckpt.components.known.stateful_loader import begin_at, state_of
from titan_ckpt.components.known.streams import begin_once, drawn_by_workers, is_shuffled, stream_faults
from titan_ckpt.components.unsaved_state import fault_of
from titan_ckpt.errors import ConfigError, refuse
from titan_ckpt.integrations.data_order import OrderWatch, collator_faults, has_state, sampler_faults
from titan_ckpt.integrations.loader_random import LoaderRandom
from titan_ckpt.process import Seeded

_log = logging.getLogger(__name__)
END = object()
_KEPT = (
    "its set_epoch does not reach worker processes that are kept, and a resumed run would have new ones: leave "
    "persistent_workers out"
)
_UNORDERED = (
    "data: in_order=False: batches come in the order in which worker processes have them ready, so a resumed run would "
    "read some twice and others not at all: leave it out"
)


class Reading:
    """Reads by indices: a resume draws an epoch's order again, and reads no data of the batches that were read.

    `source` is the object that is asked for its own position, if any; `keeps_state` says whether its state at the end
    of an epoch decides the next one, `is_beyond` whether what keeps it is beyond the batches that were returned, and
    `reads_on` whether a batch more may be read at an epoch's length: a sampler may draw there, and a stream would lose
    it. `random` are the states by which it goes on, `start` those of the newest epoch, and `why_again` says why a
    resume reads an epoch from its start, if it does.
    """

    def __init__(
        self, loader: Any, stream: Any, allow: Collection[str], source: Any = None, why_again: str = ""
    ) -> None:
        """Bind to a DataLoader. `stream`: its data. `allow`: names of classes that need not go on exactly."""
        data = getattr(loader, "dataset", None)
        is_stream, is_asked = isinstance(data, IterableDataset), source is loader
        self._loader, self._stream, self._allow, self._data = loader, stream, allow, data
        self.source, self.why_again, self.reads_on = source, why_again, is_asked or not is_stream
        is_of_datasets = hasattr(data, "_starting_state_dict")  # whose streams begin alike
        self.keeps_state = (is_stream or is_asked) and not is_of_datasets
        self.is_beyond = is_asked and self.keeps_state
        # torchdata's loader reads the entries of a sampler that stands for a stream from their start
        self._counts_again = is_asked and is_stream and is_of_torchdata(loader) and loader.num_workers > 0
        self.random = LoaderRandom(loader, stream, gives_state=is_asked)
        self.start: dict[str, Any] | None = None
        self._iterator: Any = None
        self._pending: dict[str, Any] | None = None
        """The position to continue at, until the order is drawn."""

    @property
    def is_ended(self) -> bool:
        """Return whether the batch that was read is a smaller, last one, after which a stream has begun anew."""
        return bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))

    def state(self) -> Any:
        """Return a copy of the state of what is asked for its position; None if nothing is."""
        return None if self.source is None else deepcopy(state_of(self.source))

    def begin(self, epoch: int, rank: int, resumed: dict[str, Any] | None, *, is_unread: bool) -> Iterator[Any]:
        """Return an iterator over an epoch, or over the rest of it after the position `resumed`.

        `rank`: whose share of the data it is. `is_unread`: whether a stream is before the end of the epoch before.
        """
        self._epoch, skipped = (epoch, rank), resumed["batches"] if resumed else 0
        if resumed and skipped and hasattr(self._stream, "_ex_iterable"):
            self._stream.set_epoch(resumed["stream_epoch"])
        return self._begin(resumed, skipped, is_unread=is_unread)

    def faults(self, *, judges_collator: bool) -> Iterator[str]:
        """Yield one line for each part that would not go on exactly.

        `judges_collator`: whether nobody else looks at the function that makes batches.
        """
        loader, of_data, allow = self._loader, self.random.of_data, self._allow
        has_copies = getattr(loader, "num_workers", 0) and not self.why_again
        if getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
            yield _UNORDERED
        yield from stream_faults(
            self._data, allow, is_read_again=bool(self.why_again), held=() if has_copies else of_data
        )
        if judges_collator:
            yield from collator_faults(getattr(loader, "collate_fn", None), allow, of_data)
        is_asked = self.source is loader
        yield from stateful_faults(loader, allow) if is_asked else sampler_faults(samplers_of(loader), allow)
        is_told = hasattr(self._stream, "set_epoch") and not hasattr(self._stream, "_ex_iterable")
        if is_told and getattr(loader, "persistent_workers", False):  # datasets tells them by shared memory
            yield from fault_of("data:", self._stream, _KEPT, allow)
        if has_copies:
            yield from unasked_faults(loader, allow)

    def _begin(self, resumed: dict[str, Any] | None, skipped: int, *, is_unread: bool) -> Iterator[Any]:
        self._pending = resumed
        return iterated(self._loader, self._in_order)

    def _in_order(self, sampler: Any) -> Iterator[Any]:
        """Yield the entries of a sampler after those that were read; it draws its order at the first one."""
        resumed, self._pending = self._pending, None
        skipped = resumed["batches"] if resumed else 0
        if resumed and (skipped or resumed["is_kept"]):
            self.random.set(resumed["start"] if skipped else resumed["now"])
        self.start = self.random.get()
        order = iter(sampler)
        watch = OrderWatch(samplers_of(self._loader))
        order, is_empty = _peeked(order)
        refuse(*watch.faults(self._allow))
        if is_empty and resumed and self.random.samplers():  # its state was that of its last epoch's end
            order = iter(sampler)
        deque(islice(order, skipped), 0)
        if resumed and skipped:
            self.random.set_process(_before_next(resumed))
        yield from self._seeded(watch.watched(order, self._allow), skipped)

    def _seeded(self, order: Iterable[Any], first: int = 0) -> Iterator[Any]:
        """Yield entries of which each seeds the worker process that gets it. `first`: the number of the first one."""
        assert self.start is not None
        of_epoch = _seed_of(*self._epoch, self.start["random"]["torch"].tolist())
        for number, entry in enumerate(order, first):
            yield Seeded(entry, _seed_of(of_epoch, number)) if self._loader.num_workers else entry


class ReadingByWorkers(Reading):
    """Reads by indices by a StatefulDataLoader, whose worker processes give the states of their copies of the data."""

    def __init__(self, loader: Any, stream: Any, allow: Collection[str]) -> None:
        super().__init__(loader, stream, allow)
        self.keeps_state = self.is_beyond = loader.persistent_workers

    def state(self) -> Any:
        """Return the workers' states, and which of them has made the newest batch; None before they begin."""
        iterator = self._loader._iterator  # noqa: SLF001 - torchdata has no public name for it
        return None if iterator is None else deepcopy(iterator.state_dict()["_snapshot"])

    def _begin(self, resumed: dict[str, Any] | None, skipped: int, *, is_unread: bool) -> Iterator[Any]:
        """Begin with the workers' states as an epoch does, from which `_in_order` leaves out what was read."""
        if resumed and (state := resumed["source"]):
            newest = {} if skipped else {"_last_yielded_worker_id": self._loader.num_workers - 1}
            main = {**state["_main_snapshot"], "_sampler_iter_yielded": 0}
            state = {**state, **newest, "_snapshot_step": 0, "_main_snapshot": main}
            at_start = {"_snapshot": state, "_steps_since_snapshot": 0, "_iterator_finished": False}
            self._loader.load_state_dict(at_start)
        return super()._begin(resumed, skipped, is_unread=is_unread)


class ReadingAgain(Reading):
    """Reads a stream from the start of its epoch after a resume, and drops what was trained on."""

    def _begin(self, resumed: dict[str, Any] | None, skipped: int, *, is_unread: bool) -> Iterator[Any]:
        if resumed and skipped:
            again = f"{skipped} batches of epoch {self._epoch[0]} are read again, and not trained on"
            _log.warning(f"data: {self.why_again}: {again}")
            self.random.set(resumed["start"])
        self.start = self.random.get()
        self._iterator = batches = iterated(self._loader, self._seeded)
        deque(islice(batches, skipped), 0)
        if resumed and skipped:
            self.random.set_data(resumed["of_data"])
        if resumed and (skipped or resumed["is_kept"]):
            self.random.set(_before_next(resumed))
        return batches


class ReadingBySource(Reading):
    """Reads a loader or a stream that knows its own position."""

    def _begin(self, resumed: dict[str, Any] | None, skipped: int, *, is_unread: bool) -> Iterator[Any]:
        is_of_data = self.source is not self._loader
        is_ended = resumed is not None and is_of_data and resumed.get("is_ended")
        if resumed and resumed["source"] is not None and (self.keeps_state or not is_ended):
            self.source.load_state_dict(resumed["source"])
        if resumed and is_ended:
            self.random.set(_before_next(resumed))
            return iter(())
        if is_unread and is_of_data and self.keeps_state and not skipped:
            self._read_end(resumed)
        if self._counts_again:
            self.start = (resumed and resumed["start"]) or self.random.get()
        batches = self._begun(resumed)
        if resumed and (skipped or resumed["is_kept"]):
            self.random.set(_before_next(resumed))
        begin_once(self._loader)
        if resumed is None or skipped or is_of_data:
            return batches
        batches, is_empty = _peeked(batches)  # earlier versions have saved a loader before the end of its epoch
        return self._begun(None) if is_empty else batches

    def _begun(self, resumed: dict[str, Any] | None) -> Iterator[Any]:
        """Return the loader's iterator, after the position `resumed`."""

        def begin() -> Iterator[Any]:
            if resumed and resumed["source"] is not None and is_of_torchdata(self._loader):
                begin_at(self._loader, resumed["source"], None)
                self.random.set(resumed["now"])
            return iter(self._loader)

        if not self._counts_again:
            batches = self._iterator = begin()
            return batches
        return iterated(self._loader, self._seeded, begin)

    def _read_end(self, resumed: dict[str, Any] | None) -> None:
        """Read the end of the epoch before, which its length alone has told, unless the stream goes on there."""
        before, of_data = self.random.get(), self.random.get_data()
        state = resumed["source"] if resumed else self.state()
        batches = iter(self._loader)
        self.random.set(before)
        if next(batches, END) is not END:
            self.source.load_state_dict(state)
            self.random.set_data(of_data)
            self.random.set(before)


def reading_of(loader: Any, stream: Any, allow: Collection[str]) -> Reading:
    """Return the way to read a loader. The arguments are those of Reading.

    Raises: ConfigError for one whose position cannot be known.
    """
    if why := _why_again(loader, stream):
        return ReadingAgain(loader, stream, allow, why_again=why)
    data = getattr(loader, "dataset", None)
    is_stream = isinstance(data, IterableDataset)
    if has_state(loader) and (is_stream or not is_of_torchdata(loader)):
        return ReadingBySource(loader, stream, allow, loader)
    if not isinstance(loader, DataLoader):
        asked = "has no state_dict and load_state_dict, so its position is unknown: give it both"
        raise ConfigError([f"data: {type(loader).__name__} is no DataLoader and {asked}"])
    if not is_stream:
        is_in_workers = is_of_torchdata(loader) and loader.num_workers and has_state(data)
        return (ReadingByWorkers if is_in_workers else Reading)(loader, stream, allow)
    if not has_state(data):
        lost = "so a resume would read all of it again: give it both, as datasets.IterableDataset has them"
        without = "is an IterableDataset without state_dict and load_state_dict"
        raise ConfigError([f"data: {type(data).__name__} {without}, {lost}"])
    if loader.num_workers:
        kept = f"is read by {loader.num_workers} worker processes, which keep their positions to themselves"
        raise ConfigError([f"data: {type(data).__name__} {kept}: use 0 workers, or torchdata's StatefulDataLoader"])
    return ReadingBySource(loader, stream, allow, data)


def _why_again(loader: Any, stream: Any) -> str:
    """Return why a resume has to read a stream of datasets from the start of its epoch; "" if it has not."""
    if not hasattr(stream, "_ex_iterable") or not isinstance(loader, DataLoader):
        return ""
    if is_shuffled(stream):
        return "the state of a stream leaves out the buffer of shuffle()"
    if stream is not loader.dataset:
        return f"the stream has fewer shards ({stream.num_shards}) than ranks, so each rank reads all of it"
    if loader.num_workers and not has_state(loader):
        return "worker processes keep their positions to themselves"
    if drawn_by_workers(loader):
        return "the state of interleave_datasets() has the random numbers of the first worker for all of them at first"
    return ""


def _before_next(resumed: dict[str, Any]) -> dict[str, Any]:
    """Return the states before the next batch is read."""
    states: dict[str, Any] = resumed["ahead"] or resumed["now"]
    return states


def _peeked(entries: Iterator[Any]) -> tuple[Iterator[Any], bool]:
    """Return the same entries, the first of which is read, and whether there is none."""
    first = next(entries, END)
    return (entries if first is END else chain([first], entries)), first is END


def _seed_of(*facts: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(facts).encode()) >> 1


class _Through:
    """A sampler whose entries go through a function. Workers that are kept use the same one in every epoch."""

    def __init__(self, sampler: Any, function: Callable[[Any], Iterator[Any]]) -> None:
        self.sampler, self._function = sampler, function

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        yield from self._function(self.sampler)


def iterated(
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
