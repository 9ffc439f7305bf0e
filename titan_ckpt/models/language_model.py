"""What a training run and its checkpoints ask of a model. No architecture, no values."""

from __future__ import annotations

from typing import Any

from torch import nn

from titan_ckpt.keymap import KeyMap


class LanguageModel(nn.Module):
    """A causal language model that trains, loads and exports.

    Shape: (batch, seq) token ids in, (batch, seq, vocab) logits out.
    May be built under `torch.device("meta")`, and has its values from `init_weights`, or from `to_empty` and a load.
    """

    vocab_size: int
    max_seq_len: int | None
    """Tokens of the longest input, where there is a longest."""
    layers: nn.Module
    """Its children are the blocks in their order: what is sharded, or recomputed, one at a time."""

    def init_weights(self) -> None:
        """Fill every parameter in place from the current generator, and recompute the buffers."""
        raise NotImplementedError

    def reset_buffers(self) -> None:
        """Recompute what no checkpoint holds, on the device it is on."""
        raise NotImplementedError

    def key_map(self) -> KeyMap:
        """Return the table between the names of these parameters and those in a Hugging Face folder."""
        raise NotImplementedError

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json that Hugging Face reads this model with."""
        raise NotImplementedError
