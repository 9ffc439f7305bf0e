"""The interface between a model and its training run and checkpoints. No architecture, no values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from titan_ckpt.errors import DataError
from titan_ckpt.geometry.keymap import KeyMap


class Model(nn.Module):
    """A model of any kind of data that trains, loads and exports; its own step says what a batch is and what it costs.

    It may be built under `torch.device("meta")`. It gets values from `init_weights`, or from `to_empty` and a load.
    """

    layers: nn.Module
    """Its children are the blocks in order; sharding and recomputation treat one block at a time."""

    def init_weights(self) -> None:
        """Fill every parameter in place from the current generator, and recompute the buffers."""
        raise NotImplementedError

    def reset_buffers(self) -> None:
        """Recompute the buffers that no checkpoint holds, on their device."""
        raise NotImplementedError

    def key_map(self) -> KeyMap:
        """Return the table between the parameter names and the names in a Hugging Face folder."""
        raise NotImplementedError

    def torchtitan_key_map(self) -> KeyMap | None:
        """Return the table between torchtitan's names and those in a Hugging Face folder; None if there is none."""
        return None

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json with which transformers reads this model."""
        raise NotImplementedError

    def summed_loss(self, batch: Any) -> torch.Tensor:
        """Return the sum of the losses in a batch, which is whatever the data gives; call the model as `self(...)`.

        A step divides the sums of all ranks and micro-batches by their `num_counted`. Random numbers that it draws from
        the process's generators, such as noise, are those of an uninterrupted run after a resume.
        """
        raise NotImplementedError

    def num_counted(self, batch: Any) -> int:
        """Return how many losses the sum of a batch has: by default the rows of its first tensor.

        Raises: DataError for a batch that does not show it.
        """
        first = next(tensors_in(batch), None)
        if first is None or not first.dim():
            found = f"a {type(batch).__name__} without a tensor" if first is None else "a tensor without dimensions"
            raise DataError([f"data: {found} does not say how many losses it has: give your Model a num_counted"])
        return len(first)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested values, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


class LanguageModel(Model):
    """A causal language model that trains, loads and exports. The trainer checks its batches and computes its loss.

    Shape: (batch, seq) token ids in, (batch, seq, vocab) logits out.
    """

    vocab_size: int
    max_seq_len: int | None
    """Length of the longest input in tokens; None if there is no limit."""
