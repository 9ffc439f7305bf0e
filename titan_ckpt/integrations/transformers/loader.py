"""TrainerLoader: the position of a Trainer in its data, inside of accelerate's wrapper.

accelerate's own loop fetches one batch ahead: random numbers that a collator draws for the next batch come before those
of the step. This loop fetches each batch when it is asked for.
Source: accelerate, data_loader.py DataLoaderShard.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.utils import send_to_device, synchronize_rng_states

from titan_ckpt.components.data_position import DataRank
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.loader_position import PositionedLoader

_DIVIDED = (
    "data: accelerate divides an IterableDataset among ranks while it is read, which has no position to return to: "
    "override get_train_dataloader to return torchdata's StatefulDataLoader over each rank's own share, or use a "
    "dataset with a length"
)


class TrainerLoader(PositionedLoader):
    """The loader that an attached Trainer iterates over."""

    def __init__(self, loader: Any) -> None:
        """Wrap the result of get_train_dataloader(). Raises: ConfigError for data whose position cannot be known."""
        is_dispatched = type(loader) is DataLoaderDispatcher
        self._is_prepared = is_dispatched or type(loader) is DataLoaderShard
        inner = loader.base_dataloader if self._is_prepared else loader
        if is_dispatched or isinstance(getattr(inner, "dataset", None), IterableDatasetShard):
            raise ConfigError([_DIVIDED])
        super().__init__(loader, inner, _share(inner))

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch, as the Trainer says it."""
        self.epoch = epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    @property
    def num_batches_at_once(self) -> int:
        """Return how many of the sampler's batches all ranks read together: one, if accelerate splits it among them."""
        is_split = getattr(getattr(self.inner, "batch_sampler", None), "split_batches", False)
        return 1 if is_split else self.dp_world_size

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


def _share(inner: Any) -> DataRank | None:
    """Return which batches accelerate gives to this process; ranks of tensor parallelism get the same."""
    sampler = getattr(inner, "batch_sampler", None)
    if isinstance(sampler, BatchSamplerShard):
        return DataRank(sampler.process_index, sampler.num_processes)
    return None
