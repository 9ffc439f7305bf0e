"""Qwen3: configuration, model, and its key table to and from Hugging Face names.

Owns the architecture and its shapes. Knows no files, no parallelism and no training loop.
Queries and keys are normalised per head, and head_dim is independent of dim. Rotary rows are two halves per head, as
Hugging Face stores them, so neither they nor the norms' weights (one entry per row of a head) are reordered in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from titan_ckpt.geometry.keymap import KeyMap, KeyRule
from titan_ckpt.models.config import DecoderConfig, check_config, read_shape
from titan_ckpt.models.decoder import BLOCK, HF_BLOCK, TORCHTITAN, Decoder, block_rules, embedding_rules
from titan_ckpt.models.layers import make_block, rotary_angles, rotary_frequencies, rotate_halves

FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""Keys of config.json with the only value that this family supports."""


@dataclass(frozen=True, slots=True)
class Qwen3Config(DecoderConfig):
    """The shape of a dense Qwen3 model."""

    rope_theta: float = 1_000_000.0

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str = "config.json") -> Qwen3Config:
        """Return the shape in a Qwen3's config.json of transformers 4 or 5.

        Raises: ConfigError listing everything that this model cannot represent.
        """
        check_config(config, source, fixed=FIXED | {"model_type": "qwen3"}, required=("head_dim",))
        return Qwen3Config(**read_shape(config))

    def to_hf(self) -> dict[str, Any]:
        """Return config.json for transformers 5, without special token ids."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **FIXED, **DecoderConfig.to_hf(self)}


def _debug(dim: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> Qwen3Config:
    """Return a small shape whose heads are wider than dim / heads, as in the smallest real Qwen3 models."""
    return Qwen3Config(dim, layers, heads, kv_heads, 2 * dim // heads, ffn, vocab, 1024, 10_000.0, tie_embeddings=tied)


_8B = Qwen3Config(
    dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, ffn_dim=12288, vocab_size=151_936,
    max_seq_len=40_960,
)  # fmt: skip

_SMALL = replace(_8B, num_layers=28, num_heads=16, tie_embeddings=True)

FLAVORS: Mapping[str, Qwen3Config] = {
    "debug-0.5m": _debug(96, 3, 4, 2, 224, 2048, tied=True),
    "debug-2m": _debug(160, 4, 4, 2, 448, 2048, tied=False),
    "debug-8m": _debug(320, 5, 8, 4, 768, 4096, tied=True),
    "debug-20m": _debug(448, 6, 8, 4, 1152, 4096, tied=False),
    "0.6B": replace(_SMALL, dim=1024, ffn_dim=3072),
    "1.7B": replace(_SMALL, dim=2048, ffn_dim=6144),
    "4B": replace(_8B, dim=2560, ffn_dim=9728, tie_embeddings=True),
    "8B": _8B,
}


def rotary_table(config: DecoderConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return cos + i sin of every position and pair. Shape: (max_seq_len, head_dim / 2), complex64."""
    return rotary_angles(rotary_frequencies(config.head_dim, config.rope_theta, device), config.max_seq_len)


_NORM_RULES = (
    KeyRule.of(f"{BLOCK}.attention.q_norm.weight", f"{HF_BLOCK}.self_attn.q_norm.weight"),
    KeyRule.of(f"{BLOCK}.attention.k_norm.weight", f"{HF_BLOCK}.self_attn.k_norm.weight"),
)
RULES = (*block_rules(), *_NORM_RULES)
"""The rows of the key table without those for embeddings and output."""


class Qwen3(Decoder[Qwen3Config]):
    """Qwen3; see Decoder."""

    def __init__(self, config: Qwen3Config) -> None:
        blocks = [make_block(config, rotate_halves, qk_norm=True) for _ in range(config.num_layers)]
        super().__init__(config, blocks, partial(rotary_table, config))

    def key_map(self) -> KeyMap:
        """Return the table between these names and Hugging Face's names."""
        return KeyMap((*embedding_rules(self.config.tie_embeddings), *RULES))

    def torchtitan_key_map(self) -> KeyMap:
        """Return the table between torchtitan 0.3's names and Hugging Face's names."""
        embeddings = embedding_rules(self.config.tie_embeddings, TORCHTITAN["output"])
        return KeyMap((*embeddings, *block_rules(qkv=TORCHTITAN["qkv"]), *_NORM_RULES))
