"""TrainerLoader: the position of a Trainer in its data, inside of accelerate's wrapper.

accelerate's own loop fetches one batch ahead: random numbers that a collator draws for the next batch come before those
of the step. This loop fetches each batch when it is asked for.
Source: accelerate, data_loader.py DataLoaderShard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import IterableDataset

from titan_ckpt.components.items.data_position import DataRank
from titan_ckpt.components.known.loaders import samplers_of
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.loader_position import PositionedLoader, length_of

_END = object()
_DIVIDED = (
    "data: accelerate divides an IterableDataset among ranks while it is read, and it cannot return to a position: "
    'with one process, set accelerator_config={"dispatch_batches": False}; with more, override get_train_dataloader to '
    "return torchdata's StatefulDataLoader over each rank's own share, or use a dataset with a length"
)


class TrainerLoader(PositionedLoader):
    """The loader that an attached Trainer iterates over."""

    def __init__(self, loader: Any, allow: Collection[str] = ()) -> None:
        """Wrap the result of get_train_dataloader(). `allow`: as of PositionedLoader.

        Raises: ConfigError for data whose position cannot be known.
        """
        is_dispatched = type(loader) is DataLoaderDispatcher
        self._is_prepared = is_dispatched or type(loader) is DataLoaderShard
        inner = loader.base_dataloader if self._is_prepared else loader
        if is_dispatched or isinstance(getattr(inner, "dataset", None), IterableDatasetShard):
            raise ConfigError([_DIVIDED])
        super().__init__(loader, inner, _share(inner, is_prepared=self._is_prepared), allow)
        self._is_told = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate as the Trainer does after set_epoch; a callback that looks at the data moves no position."""
        is_told, self._is_told = self._is_told, False
        return super().__iter__() if is_told else self._look()

    def _look(self) -> Iterator[Any]:
        """Iterate without a position, and leave the workers and the state of the training's iteration as they are."""
        kept, self.inner._iterator = getattr(self.inner, "_iterator", None), None  # noqa: SLF001 - where torch keeps it
        batches = iter(self.loader)
        try:
            first = next(batches, _END)
        finally:
            self.inner._iterator = kept  # noqa: SLF001 - as above
        if first is not _END:
            yield first
            yield from batches

    @property
    def at_end(self) -> bool:
        """Return whether the Trainer reads no more batches of this epoch; False while the length is unknown."""
        return self.num_batches > 0 and self.num_batches == length_of(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch, as the Trainer says it before it iterates."""
        self._is_told = True
        self.epoch = epoch
        if self._resumed is None:
            self.num_batches, self._goes_on = 0, False
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

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
        self.loader.end_of_dataloader = self.at_end
        if self.loader.device is None:
            return batch
        return send_to_device(batch, self.loader.device, non_blocking=self.loader._non_blocking)  # noqa: SLF001 - accelerate's setting

    def end_epoch(self) -> None:
        """Leave accelerate's list of loaders in use."""
        if self._is_prepared:
            self.loader.end()


def draw_alike(loader: Any) -> None:
    """Let a loader draw from generators of its own, which begin anew now, and not from the process's."""
    inner = getattr(loader, "base_dataloader", loader)
    owners = [inner, *samplers_of(inner)]
    inner.generator = getattr(inner, "generator", None) or torch.Generator()
    for generator in (getattr(owner, "generator", None) for owner in owners):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(generator.initial_seed())


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
