"""Lets torchdata's StatefulDataLoader go on exactly where its state says, where its own load does not.

Owns the moment at which it makes its iterator, the ends of orders and streams that have begun the next one by a save,
and the epochs of samplers, which its state leaves out. Source: torchdata 0.11, stateful_dataloader.py and worker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from titan_ckpt.components.classes import names_of
from titan_ckpt.components.known.loaders import generators_beside, is_of_torchdata, length_of, samplers_of
from titan_ckpt.components.known.streams import say_position
from titan_ckpt.process import generators_kept, get_random, held_generators, set_random


def told_samplers(loader: Any) -> list[Any]:
    """Return the samplers of a StatefulDataLoader that go on by the number of an epoch, which its state leaves out."""
    samplers = samplers_of(loader) if is_of_torchdata(loader) else []
    told = [sampler for sampler in samplers if hasattr(sampler, "set_epoch") and not hasattr(sampler, "state_dict")]
    return [sampler for sampler in told if type(getattr(sampler, "epoch", None)) is int]


def epochs_of(loader: Any) -> list[int]:
    """Return the epochs of the orders that `told_samplers` are in.

    accelerate's SeedableRandomSampler counts on when its order is read, which is before that of a smaller last batch,
    and of all that worker processes have ahead, is at its end; its generator has the seed of the order.
    """
    epochs = []
    for sampler in told_samplers(loader):
        iterator = loader._iterator  # noqa: SLF001 - torchdata has no public names for these
        is_within = iterator is not None and iterator._sampler_iter_yielded and not iterator._finished  # noqa: SLF001
        if is_within and names_of(type(sampler))[0] == "accelerate.data_loader.SeedableRandomSampler":
            epochs.append(sampler.generator.initial_seed() - sampler.initial_seed)
        else:
            epochs.append(sampler.epoch)
    return epochs


def state_of(loader: Any) -> Any:
    """Return a loader's state, which says of each worker whether it has read its stream to the end.

    A worker of torchdata says so of a stream of batches; of one without, its state is that of the next epoch by then.
    """
    iterator: Any = loader._iterator if is_of_torchdata(loader) else None  # noqa: SLF001 - as above
    if hasattr(iterator, "_workers_status") and isinstance(loader.dataset, IterableDataset):
        waiting = {worker for worker, *batch in iterator._task_info.values() if batch}  # noqa: SLF001 - as above
        for number, is_reading in enumerate(iterator._workers_status):  # noqa: SLF001 - as above
            if not is_reading and number not in waiting:
                _say_ended(iterator, number)
    return loader.state_dict()


def _say_ended(iterator: Any, number: int) -> None:
    """Let torchdata's iterator give the newest state that it has of a worker, whose stream is at its end."""
    newest = iterator._worker_snapshots[f"worker_{number}"]  # noqa: SLF001 - as above
    newest._fetcher_ended = True  # noqa: SLF001 - as above
    iterator._snapshot["_worker_snapshots"][f"worker_{number}"] = newest.get_state()  # noqa: SLF001 - as above


def begin_at(loader: Any, state: dict[str, Any], drawn: Sequence[Any] | None) -> None:
    """Load a StatefulDataLoader's state so that the iterator that it makes for it draws nothing that a step draws.

    It makes it now; in the middle of an epoch of data with a length when it is read, after the samplers were told the
    epoch. The data and the samplers have their states from now on. `drawn`: the states of `generators_beside`, if the
    step has them.
    """

    def make() -> Any:
        del loader._get_iterator  # noqa: SLF001 - torchdata has no public name for it
        epochs = epochs_of(loader) if state.get("_iterator_finished") else []
        with generators_kept(), _order_ended(loader, state), _workers_ended(loader, state):
            iterator = loader._iterator = loader._get_iterator()  # noqa: SLF001 - as above
        for sampler, epoch in zip(told_samplers(loader), epochs, strict=False):  # workers have read an order ahead
            sampler.set_epoch(epoch)
        for generator, its in zip(generators_beside(loader), drawn or (), strict=False):
            set_random(generator, its)
        return iterator

    loader.load_state_dict(state)
    loader._get_iterator = make  # noqa: SLF001 - as above
    if isinstance(loader.dataset, IterableDataset) or state.get("_iterator_finished"):
        loader.state_dict()
        return
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    holder: Any
    for holder, its in (
        (index, _main_state(state).get("_index_sampler_state")),
        (getattr(index, "sampler", None), _order_of(state).get("sampler_state")),
        (loader.dataset, state.get("dataset_state")),  # worker processes have others
    ):
        if its is not None and hasattr(holder, "load_state_dict"):
            holder.load_state_dict(its)


def _main_state(state: dict[str, Any]) -> Any:
    """Return the part of a StatefulDataLoader's state that is this process's, and not that of workers."""
    return state.get("_snapshot", {}).get("_main_snapshot", state)


def _order_of(state: dict[str, Any]) -> Any:
    """Return the state of torchdata's iterator over batches of a sampler that gives its own, if there is one; or {}."""
    order = _main_state(state).get("_sampler_iter_state")
    return order if isinstance(order, dict) and {"samples_yielded", "sampler_state"} <= order.keys() else {}


@contextmanager
def _order_ended(loader: Any, state: dict[str, Any]) -> Iterator[None]:
    """Let a sampler that gives its state have no more entries, if the state is that of its order's end.

    It may have gone on to its next order by then, of which an iterator at this position must read nothing.
    """
    batches, order, is_done = loader.batch_sampler, _order_of(state), bool(state.get("_iterator_finished"))
    if not order or state.get("_steps_since_snapshot"):
        yield
        return
    sampler, num_read = batches.sampler, order["samples_yielded"]
    num_over = num_read % batches.batch_size
    if num_over:
        is_read, limit = is_done or not batches.drop_last, 1
    else:
        is_read, limit = is_done or num_read == length_of(sampler), batches.batch_size if is_done else num_read
    batches.sampler = _Ended(sampler, limit, is_known=bool(is_done or num_over)) if is_read else sampler
    try:
        yield
    finally:
        batches.sampler = sampler


class _Ended:
    """Stands in for a sampler at the end of its order, and puts it back there."""

    def __init__(self, sampler: Any, limit: int, *, is_known: bool) -> None:
        """Bind to a sampler. `limit`: one that has as many entries has begun its next order.

        `is_known`: whether the order is read for certain, and not by a length that may be too small.
        """
        self._sampler, self._limit, self._is_known, self._state = sampler, limit, is_known, None

    def state_dict(self) -> Any:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._state = state
        self._sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        """Read the end, if the sampler is before it."""
        if self._state is None:
            return iter(())
        held = held_generators(self._sampler)
        drawn = [*map(get_random, held)]
        left = sum(1 for _ in islice(iter(self._sampler), self._limit))
        if left == self._limit or (left and not self._is_known):
            self._sampler.load_state_dict(self._state)
            for generator, its in zip(held, drawn, strict=True):
                set_random(generator, its)
        return iter(()) if left == self._limit or self._is_known or not left else iter(self._sampler)


@contextmanager
def _workers_ended(loader: Any, state: dict[str, Any]) -> Iterator[None]:
    """Let workers that have returned a stream's smaller, last batch begin with no more, as they ended.

    By then the state of a stream is that of its next epoch, and torchdata's workers would read that in this one.
    """
    workers = state.get("_snapshot", {}).get("_worker_snapshots", {}).values()
    by_stream = [each for each in workers if each["dataset_state"] is not None and each["fetcher_state"] is not None]
    of = {each["worker_id"]: each["fetcher_state"] for each in by_stream}  # those that ask no iterator for its state
    ended = [number for number, its in of.items() if its["fetcher_ended"] and its["dataset_iter_state"] is None]
    begin = loader.worker_init_fn
    loader.worker_init_fn = partial(_begin_worker, begin, ended) if of else begin
    try:
        yield
    finally:
        loader.worker_init_fn = begin
    if ended and (iterator := loader._iterator)._num_yielded:  # noqa: SLF001 - torchdata has no public names for these
        for number in ended:  # so that a step is alike that is saved before they say it themselves
            _say_ended(iterator, number)


def _begin_worker(begin: Callable[[int], None] | None, ended: Collection[int], number: int) -> None:
    """Do what the user does in a worker that begins, whose stream, if it has ended, has no samples at its state.

    The stream is the user's own, which may ask for it in the worker and give it a share. It says its position before it
    is read, too, which the next step may store.
    """
    if begin is not None:
        begin(number)
    stream: Any = get_worker_info().dataset  # type: ignore[union-attr]  # this is a worker
    kind = type(stream)

    def load(state: Any) -> None:
        del stream.load_state_dict
        stream.load_state_dict(state)
        say_position(stream)
        if number in ended:
            stream.__class__ = type(kind.__name__, (kind,), {"__iter__": begin_ended})

    def begin_ended(_: Any) -> Iterator[Any]:
        stream.__class__ = kind
        return iter(())

    stream.load_state_dict = load
