"""AcceleratedLoader: the position in a loader that accelerate has prepared.

accelerate's own loop fetches one batch ahead: random numbers that a dataset or a collator draws for the next batch come
before those of the step. This loop fetches each batch when it is asked for, but in a stream without a length, where
accumulate() asks whether a batch is the last.
Source: accelerate 1.15, data_loader.py DataLoaderShard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from accelerate.state import GradientState
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import IterableDataset

from titan_ckpt.components.items.item import DataRank
from titan_ckpt.components.known.loaders import POSITIONED, length_of, samplers_of
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.integrations.loop import Iterated

_SKIPS = "data: skip_first_batches: a resume skips what was read by itself: give the loader of prepare()"


class AcceleratedLoader(PositionedLoader):
    """Iterates as accelerate's wrapper does around a DataLoader."""

    undispatched = "DataLoaderConfiguration(dispatch_batches=False)"
    """The setting by which each rank reads for itself."""

    def __init__(self, loader: Any, allow: Collection[str] = ()) -> None:
        """Wrap what accelerate has prepared. `allow`: as of PositionedLoader.

        Raises: ConfigError for data whose position cannot be known.
        """
        self._is_prepared = isinstance(loader, DataLoaderShard)
        if isinstance(loader, DataLoaderDispatcher):
            ahead = "rank 0 reads ahead for all ranks, so its position is not that of the training"
            raise ConfigError([f"data: dispatch_batches: {ahead}: set {self.undispatched}"])
        if self._is_prepared and loader.skip_batches:
            raise ConfigError([_SKIPS])
        inner = loader.base_dataloader if self._is_prepared else loader
        super().__init__(loader, inner, _share(inner, is_prepared=self._is_prepared), allow)

    @property
    def num_batches_at_once(self) -> int:
        """Return how many of the sampler's batches all ranks read together: one, if accelerate splits it among them."""
        sampler = _sharding(self.inner)
        return 1 if sampler is not None and sampler.split_batches else self.dp_world_size

    def begin_epoch(self) -> None:
        """Bring the ranks' order together, as accelerate does."""
        if not self._is_prepared:
            return
        if self.loader.rng_types is not None:
            synchronize_rng_states(self.loader.rng_types, self.loader.synchronized_generator)
        self.loader.begin()
        self.loader.set_epoch(self.epoch)

    def deliver(self, batch: Any) -> Any:
        """Return the batch on the device of the training."""
        if not self._is_prepared:
            return batch
        self.loader.end_of_dataloader = self.is_over
        if self.loader.device is None:
            return batch
        return send_to_device(batch, self.loader.device, non_blocking=self.loader._non_blocking)  # noqa: SLF001 - accelerate's setting

    def end_epoch(self) -> None:
        """Leave accelerate's list of loaders in use."""
        if self._is_prepared:
            self.loader.end()


class LoopLoader(AcceleratedLoader):
    """The position in a loader of a loop of the user's own. accelerate's wrapper, `loader`, counts the epochs."""

    def __init__(self, loader: Any, allow: Collection[str] = ()) -> None:
        """Wrap what accelerate has prepared. `allow`: as of PositionedLoader. Raises: as AcceleratedLoader."""
        begun = loader.iteration
        super().__init__(loader, allow)
        self.epoch = begun

    @property
    def epoch(self) -> int:
        """Return the epoch, which the loop may set too."""
        number: int = self.loader.iteration
        return number

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.loader.iteration = number

    @property
    def looks_ahead(self) -> bool:
        """Return whether accumulate() cannot know from the length which batch is the last."""
        return length_of(self.loader) is None

    def leave_epoch(self) -> None:
        """Begin the same epoch anew, as accelerate does."""
        self.begin_next()
        self.epoch -= 1

    def check_epoch(self, epoch: int) -> None:
        """Raise LoadMismatchError for an epoch that the loop begins with in place of that of the position."""
        if self.is_resumed and epoch != self.epoch:
            raise LoadMismatchError(
                f"set_epoch({epoch}) after a load: the run goes on in epoch {self.epoch}, which is the loader's "
                "attribute `iteration`: begin the loop there: for epoch in range(loader.iteration, num_epochs)"
            )


class Positioned(Iterated):
    """The methods of accelerate's wrapper that are different from now on."""

    titan_ckpt: LoopLoader

    def set_epoch(self, epoch: int) -> None:
        if self.titan_ckpt.is_over:  # the loop has left its iterator at the last batch
            self.titan_ckpt.begin_next()
        self.titan_ckpt.check_epoch(epoch)
        super().set_epoch(epoch)  # type: ignore[misc]  # DataLoaderShard, which `extend` puts behind, has it


class Beside:
    """The methods of a prepared loader beside the training's, which say whether it is being read."""

    titan_ckpt_num_read = 0
    """How many iterations over it are open."""

    def __iter__(self) -> Iterator[Any]:
        self.titan_ckpt_num_read += 1
        try:
            yield from super().__iter__()  # type: ignore[misc]  # the class that `extend` puts behind has it
        finally:
            self.titan_ckpt_num_read -= 1
            self.end()  # type: ignore[attr-defined]  # or accumulate() takes one that a break left for the training's


def begin(loader: Any) -> None:
    """Note that a loader of accelerate begins, in place of the method of GradientState.

    Raises: ConfigError for one that skip_first_batches has made of a loader with a position, which it would not move.
    """
    samplers = samplers_of(loader)
    for read in POSITIONED:
        around = [*takewhile(lambda each: each is not read.batch_sampler and each is not read.sampler, samplers)]  # noqa: B023
        is_skipped = len(around) < len(samplers) and any(isinstance(each, SkipBatchSampler) for each in around)
        if is_skipped or (getattr(loader, "skip_batches", False) and loader.dataset is read.dataset):
            raise ConfigError([_SKIPS])
    GradientState._add_dataloader(GradientState(), loader)  # noqa: SLF001 - accelerate has no public name for it


def _sharding(inner: Any) -> BatchSamplerShard | None:
    """Return the sampler by which accelerate divides batches among processes; None if it divides none."""
    samplers = (getattr(inner, "batch_sampler", None), getattr(inner, "sampler", None))
    return next((sampler for sampler in samplers if isinstance(sampler, BatchSamplerShard)), None)


def _share(inner: Any, *, is_prepared: bool) -> DataRank | None:
    """Return which batches accelerate gives to this process; None for streams and loaders of your own.

    Ranks of tensor parallelism get the same batches: accelerate leaves a loader whole if there are no other ranks.
    """
    if (sampler := _sharding(inner)) is not None:
        return DataRank(sampler.process_index, sampler.num_processes)
    is_whole = is_prepared and not isinstance(inner.dataset, IterableDataset)
    return DataRank(0, 1) if is_whole else None
