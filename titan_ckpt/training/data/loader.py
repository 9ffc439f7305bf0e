"""Loaders: batches of a dataset, made by this process or by workers, and the position in it.

Owns the position: how many sequences all ranks together have received, without those that workers made ahead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from math import inf
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ckpt.errors import ConfigError, DataError, LoadMismatchError
from titan_ckpt.process import process_state
from titan_ckpt.training.data.batch import Batch, without_labels
from titan_ckpt.training.data.batch import collate as join
from titan_ckpt.training.data.sequences import Bookmark, IndexedDataset, MapDataset, OrderedDataset

Collate = Callable[[Sequence[Batch]], Batch]
_READ = "titan_ckpt.samples_read"
_AFRESH = 'start the data afresh with checkpoint.resume.exclude = ["dataloader"]'


def build_dataloader(
    dataset: IterableDataset[Batch],
    batch_size: int,
    collate: Collate,
    seed: int,
    num_workers: int = 0,
    prefetch: int = 2,
    *,
    pin_memory: bool = False,
) -> Any:
    """Return a loader whose state is the position in the data.

    `num_workers`: processes that make batches; with 0 this process makes them. `prefetch`: those that each makes ahead.
    Data of your own is read by torchdata's StatefulDataLoader. A loader has its own generator, because a new iterator
    draws from it and would otherwise advance the run's generator.
    """
    settings: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    settings |= {"num_workers": num_workers, "pin_memory": pin_memory}
    if num_workers:
        settings["prefetch_factor"] = prefetch
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it ends at a fork, with a warning
    if isinstance(dataset, OrderedDataset):
        return OrderedLoader(dataset, batch_size, collate, **settings)
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        dataset, collate = ReadAgain(dataset), partial(_joined_own, collate)  # torchdata counts that twice
    with warnings.catch_warnings():  # torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        # torchdata cannot go on after a short batch
        return OwnDataLoader(dataset, batch_size, collate_fn=collate, drop_last=True, **settings)


class ReadAgain(IterableDataset[Any]):
    """Data of your own that gives no state: a resume reads it from its start to its position."""

    def __init__(self, data: IterableDataset[Any]) -> None:
        self.data = data
        self.number = 0
        """Samples that were read."""
        self._draws: bool | None = None
        """Whether reading the first sample draws from the process's generators, in which a step draws too."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples after the position; only what is wrong if it is not there. Raises: ConfigError."""
        before, samples = process_state(), iter(self.data)
        read = sum(1 for _ in islice(samples, self.number))
        if read < self.number:
            problem = f"it ends after {read} samples, and the position is after {self.number}: restore it, or {_AFRESH}"
            yield from repeat(_Unusable((f"data.dataset: {problem}",)))  # a batch with an error in it is one
        for sample in samples:
            if self._draws is None:  # each worker process has the generators of its start again
                self._draws = get_worker_info() is None and process_state() != before
                if read:
                    self.refuse_draws()
            self.number += 1
            yield sample

    def refuse_draws(self) -> None:
        """Raises: ConfigError for data that would not be the same when it is read again; asked for a position alone."""
        if self._draws:
            advice = (
                "give it state_dict and load_state_dict, or a generator that it seeds, or set data.num_workers to 1"
            )
            found = f"{type(self.data).__name__} draws from the process's random numbers and gives no state"
            raise ConfigError([f"data.dataset: {found}: a resume would read other samples; {advice}"])

    def state_dict(self) -> dict[str, Any]:
        return {_READ: self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict[_READ]


class OwnDataLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """Batches of data of your own."""

    _end: dict[str, Any] | None = None
    """The position after the last batch. torchdata's own state there is one at which the data begins anew."""

    def __iter__(self) -> Iterator[Any]:
        batches, self._end = super().__iter__(), None
        position = deepcopy(super().state_dict())
        for batch in batches:
            if isinstance(batch, _Unusable):
                raise DataError(batch.problems)
            yield batch
            position = deepcopy(super().state_dict())
        self._end = position

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the newest batch. Raises: ConfigError for data that has none."""
        if isinstance(self.dataset, ReadAgain):
            self.dataset.refuse_draws()
        state: dict[str, Any] = super().state_dict() if self._end is None else self._end
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position. Raises: LoadMismatchError for one at whose first batch torchdata would raise."""
        num_workers, states = _parts_of(state_dict)
        if state_dict and num_workers != self.num_workers:
            raise LoadMismatchError(
                "dataloader: the checkpoint's position is not one in data of your own with data.num_workers = "
                f"{self.num_workers}. Restore data.dataset and data.num_workers, or {_AFRESH}"
            )
        is_counted = [isinstance(state, dict) and _READ in state for state in states]
        if is_counted and {*is_counted} != {isinstance(self.dataset, ReadAgain)}:
            raise LoadMismatchError(
                "dataloader: of the checkpoint's position and this run's data.dataset, one has a state of your own and "
                f"the other counts what was read. Restore data.dataset, or {_AFRESH}"
            )
        self._end = None
        super().load_state_dict(state_dict)


def _parts_of(state_dict: dict[str, Any]) -> tuple[int | None, list[Any]]:
    """Return how many processes made the batches before a position of torchdata's, and the dataset's state in each.

    The number is None for a position of another loader.
    """
    if "_num_yielded" in state_dict:
        return 0, [state_dict.get("dataset_state")]
    snapshot = state_dict.get("_snapshot", {})
    found = snapshot.get("_main_snapshot", {}).get("_num_workers")
    states = [worker.get("dataset_state") for worker in snapshot.get("_worker_snapshots", {}).values()]
    return found if isinstance(found, int) else None, states


class OrderedLoader:
    """Batches of an OrderedDataset, whose position can be restored on any number of ranks and workers."""

    def __init__(self, dataset: OrderedDataset, batch_size: int, collate: Collate, **settings: Any) -> None:
        """`settings`: other arguments of torch's DataLoader."""
        dataset.batch_size = batch_size
        self.dataset = dataset
        self.dp_rank = dataset.rank
        self.dp_world_size = dataset.num_ranks
        self._next_index = 0
        self._bookmark: Bookmark = None
        self._is_whole = dataset.every_label_counts and getattr(collate, "func", collate) is join
        self._samples = _Samples(dataset, are_filled=not self.may_end)
        self._batches = DataLoader(self._samples, batch_size, collate_fn=partial(_collated, collate), **settings)

    @property
    def epoch(self) -> int:
        """Return the pass over the data that the next sequence belongs to, counted from 0; equal on every rank."""
        return self.dataset.epoch(self._taken)

    @property
    def may_end(self) -> bool:
        """Return whether there is an end beyond which it has no batch; other data fills the last ones."""
        return isinstance(self.dataset, MapDataset)

    @property
    def every_label_counts(self) -> bool:
        """Return whether the batches so far had no label without a loss, on any rank."""
        return self._is_whole and self._taken == self._next_index

    def end_after(self, epochs: int) -> int:
        """Let the data end with this pass over it, and return how many sequences are left until then.

        Sequences beyond the end have no labels, and those of MapDataset are left out. Call it before the first batch.
        Raises: ConfigError for data whose length is not known.
        """
        if not isinstance(self.dataset, IndexedDataset):
            kind = type(self.dataset).__name__
            raise ConfigError([f"training.epochs: the length of {kind} is not known; set training.steps"])
        self._samples.end = epochs * self.dataset.num_sequences
        return self.dataset.left(self._next_index, epochs)

    @property
    def _taken(self) -> int:
        """Return how many sequences all ranks have taken, without those that only fill the last batches."""
        return int(min(self._next_index, self._samples.end))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position. Raises: DataError for data that cannot be used."""
        self.dataset.next_index, self.dataset.bookmark = self._next_index, self._bookmark
        for batch, bookmark in self._batches:
            if isinstance(batch, _Unusable):
                raise DataError(batch.problems)
            self._next_index = self.dataset.after(self._next_index, self.dataset.batch_size)
            self._bookmark = bookmark
            yield batch

    def state_dict(self) -> dict[str, Any]:
        state = {"next_index": self._taken, "fingerprint": self.dataset.fingerprint}
        return state if self._bookmark is None else {**state, "bookmark": self._bookmark}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position. Raises: LoadMismatchError if it is a position in different data."""
        if not self._knows(state_dict):
            raise LoadMismatchError(
                "dataloader: the checkpoint's position is in other data than this run's (corpus, tokenizer, "
                f"sequence_length, number of samples, order or seed differ). Restore them, or {_AFRESH}"
            )
        self._next_index, self._bookmark = state_dict["next_index"], state_dict.get("bookmark")

    def _knows(self, state_dict: Any) -> bool:
        """Return whether this is a position in the same data; a loader of one's own may have left any other state."""
        return isinstance(state_dict, dict) and state_dict.get("fingerprint") == self.dataset.fingerprint

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Go on where a different number of data-parallel ranks stopped.

        Raises: LoadMismatchError for a position in different data, or if the ranks had different positions.
        """
        taken = sorted({state["next_index"] for state in state_dicts if self._knows(state)})
        if len(taken) > 1:
            raise LoadMismatchError(
                f"dataloader: the checkpoint's {len(state_dicts)} data-parallel ranks had taken {taken} sequences: "
                "they were not in step"
            )
        self.load_state_dict(
            state_dicts[-1]
        )  # each rank's bookmark comes before the position, the last one's is nearest


@dataclass(frozen=True, slots=True)
class _Unusable:
    """The problems of a ConfigError, because a worker's exception would arrive inside another one's text."""

    problems: tuple[str, ...]


class _Samples(IterableDataset[Any]):
    """The samples of a dataset; if the data cannot be used, ends with why."""

    end: float = inf
    """Sequences from this number on only fill the last batches of a run that ends with an epoch, if `are_filled`."""

    def __init__(self, dataset: OrderedDataset, *, are_filled: bool) -> None:
        self.dataset = dataset
        self.are_filled = are_filled

    def __iter__(self) -> Iterator[Any]:
        try:
            for index, (sample, bookmark) in zip(self.dataset.indices(), self.dataset.samples(), strict=False):
                if index >= self.end and not self.are_filled:
                    return
                yield (sample if index < self.end else without_labels(sample)), bookmark
        except ConfigError as error:
            while True:  # a batch with an error in it is one
                yield _Unusable(error.problems), None


def _joined_own(collate: Collate, samples: Sequence[Any]) -> Any:
    """Return one batch of samples; or the error among them."""
    return samples[0] if isinstance(samples[0], _Unusable) else collate(samples)


def _collated(collate: Collate, samples: Sequence[Any]) -> tuple[Any, Bookmark]:
    """Return one batch of samples, with the bookmark after its last one; or the error among them."""
    for sample, _ in samples:
        if isinstance(sample, _Unusable):
            return sample, None
    return collate([sample for sample, _ in samples]), samples[-1][1]
