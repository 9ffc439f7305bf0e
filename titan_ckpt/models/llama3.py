"""Llama 3: configuration, model, and its key table to and from Hugging Face names.

Owns the architecture and its initial values. Knows no files, no parallelism and no training loop.
The parameter names and the interleaved rotary order are torchtitan's (`models/llama3/model`), so its checkpoints and
ours hold the same tensors. Hugging Face stores rotary rows as two halves per head; the table converts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch

from titan_ckpt.geometry.keymap import KeyMap, PermuteRotary
from titan_ckpt.models.config import DecoderConfig, check_config, read_shape, rotary
from titan_ckpt.models.decoder import HF_BLOCK, TORCHTITAN, Decoder, block_rules, embedding_rules
from titan_ckpt.models.layers import make_block, rotary_angles, rotary_frequencies, rotate_pairs

_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys of config.json with the only value that this model supports."""
_ROPE_TYPES = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kind of rotary embedding -> the parameters it needs; those of "llama3" in the order of RopeScaling's fields."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary wavelengths for contexts longer than the original training context."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True)
class Llama3Config(DecoderConfig):
    """The shape of a Llama 3 model."""

    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: RopeScaling | None = None

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str = "config.json") -> Llama3Config:
        """Return the shape in a Llama's config.json of transformers 4 or 5.

        Raises: ConfigError listing everything that this model cannot represent.
        """
        check_config(config, source, fixed=_FIXED, rope_types=_ROPE_TYPES)
        rope = rotary(config)
        scaling = None
        if rope["rope_type"] == "llama3":
            factor, low, high, original_max_seq_len = (rope[key] for key in _ROPE_TYPES["llama3"])
            scaling = RopeScaling(float(factor), float(low), float(high), int(original_max_seq_len))
        return Llama3Config(**read_shape(config), rope_scaling=scaling)

    def to_hf(self) -> dict[str, Any]:
        """Return config.json for transformers 5, without special token ids."""
        config = {"architectures": ["LlamaForCausalLM"], **_FIXED, **DecoderConfig.to_hf(self)}
        if self.rope_scaling is not None:
            parameters = dict(zip(_ROPE_TYPES["llama3"], astuple(self.rope_scaling), strict=True))
            config["rope_parameters"] |= {"rope_type": "llama3", **parameters}
        return config


def _debug(dim: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> Llama3Config:
    return Llama3Config(dim, layers, heads, kv_heads, dim // heads, ffn, vocab, 1024, 10_000.0, tie_embeddings=tied)


_8B = Llama3Config(
    dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_dim=14336, vocab_size=128_256,
    max_seq_len=131_072, rope_scaling=RopeScaling(8.0),
)  # fmt: skip

_SMALL = replace(_8B, ffn_dim=8192, rope_scaling=RopeScaling(32.0), tie_embeddings=True)

FLAVORS: Mapping[str, Llama3Config] = {
    "debug-0.5m": _debug(96, 3, 4, 2, 256, 2048, tied=True),
    "debug-2m": _debug(192, 4, 6, 2, 512, 2048, tied=False),
    "debug-8m": _debug(320, 6, 8, 4, 896, 4096, tied=True),
    "debug-20m": _debug(448, 7, 8, 4, 1216, 4096, tied=False),
    "1B": replace(_SMALL, dim=2048, num_layers=16, head_dim=64),
    "3B": replace(_SMALL, dim=3072, num_layers=28, num_heads=24),
    "8B": _8B,
    "70B": replace(_8B, dim=8192, num_layers=80, num_heads=64, ffn_dim=28672),
}
"""Shapes by name; 8B and 70B are those of Llama 3.1, 1B and 3B those of Llama 3.2."""


def rotary_table(config: Llama3Config, device: torch.device | None = None) -> torch.Tensor:
    """Return cos + i sin of every position and pair. Shape: (max_seq_len, head_dim / 2), complex64.

    Source for the scaling: transformers, `modeling_rope_utils.py` _compute_llama3_parameters.
    """
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta, device)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)
        # 1 for wavelengths that are short compared with the original context, 0 for long ones, a ramp in between
        keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    return rotary_angles(frequencies, config.max_seq_len)


class Llama3(Decoder[Llama3Config]):
    """Llama 3; see Decoder."""

    def __init__(self, config: Llama3Config) -> None:
        blocks = [make_block(config, rotate_pairs) for _ in range(config.num_layers)]
        super().__init__(config, blocks, partial(rotary_table, config))

    def key_map(self) -> KeyMap:
        """Return the table between these names and Hugging Face's names."""
        return _key_map(self.config, "output.weight", "attention")

    def torchtitan_key_map(self) -> KeyMap:
        """Return the table between torchtitan 0.3's names and Hugging Face's names."""
        return _key_map(self.config, **TORCHTITAN)


def _key_map(config: Llama3Config, output: str, qkv: str) -> KeyMap:
    q, k = PermuteRotary(config.num_heads), PermuteRotary(config.num_kv_heads)
    rules = (*embedding_rules(config.tie_embeddings, output), *block_rules(q, k, qkv))
    return KeyMap(rules, ignored=(f"{HF_BLOCK}.self_attn.rotary_emb.inv_freq",))
