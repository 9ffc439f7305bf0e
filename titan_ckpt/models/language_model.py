"""The interface between a model and its training run and checkpoints. No architecture, no values."""

from __future__ import annotations

from typing import Any

from torch import nn

from titan_ckpt.geometry.keymap import KeyMap


class LanguageModel(nn.Module):
    """A causal language model that trains, loads and exports.

    Shape: (batch, seq) token ids in, (batch, seq, vocab) logits out.
    It may be built under `torch.device("meta")`. It gets values from `init_weights`, or from `to_empty` and a load.
    """

    vocab_size: int
    max_seq_len: int | None
    """Length of the longest input in tokens; None if there is no limit."""
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
