"""TrainerLoader: the position of a Trainer in its data, inside of accelerate's wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_ckpt.components.known.loaders import length_of, samplers_of
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.accelerate.loader import AcceleratedLoader
from titan_ckpt.integrations.loader_random import generators_in

_END = object()


class TrainerLoader(AcceleratedLoader):
    """The loader that an attached Trainer iterates over."""

    undispatched = 'accelerator_config={"dispatch_batches": False}'
    judges_collator = is_told_draws = False
    _is_told = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate as the Trainer does after set_epoch; a callback that looks at the data moves no position.

        Raises: ConfigError if it would move that of a stream.
        """
        is_told, self._is_told = self._is_told, False
        if not is_told and self._reading.source is not None:
            one = "a callback reads from train_dataloader, and a stream has one position, which it would move"
            raise ConfigError([f"data: {one}: let it read from a loader over a stream of its own"])
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
        if not self.is_resumed:
            self.begin_next()
        self.epoch = epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)


def draw_alike(loader: Any) -> None:
    """Let a loader draw from generators of its own, which begin anew now, and not from the process's."""
    inner = getattr(loader, "base_dataloader", loader)
    inner.generator = getattr(inner, "generator", None) or torch.Generator()
    for generator in generators_in([inner, *samplers_of(inner)]):
        generator.manual_seed(generator.initial_seed())
