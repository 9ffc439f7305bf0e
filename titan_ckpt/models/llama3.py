"""Llama 3: configuration, model, and its table to and from Hugging Face names.

Owns the architecture and its initial values. Knows no files, no parallelism and no training loop.
The parameter names and the interleaved rotary order are torchtitan's (`models/llama3/model`), so that its checkpoints
and ours hold the same tensors; Hugging Face stores rotary rows as two halves per head, which the table accounts for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.keymap import KeyMap, KeyRule, PermuteRotary

_INIT_STD = 0.02
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What this model always is, as config.json says it."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths for contexts longer than it was first trained on."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True)
class Llama3Config:
    """The shape of a Llama 3 model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    """Tokens; the length of the rotary table, and the longest input."""
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} heads")
        if self.head_dim % 2:
            problems.append(f"head_dim: {self.head_dim} is odd, and rotary embeddings turn pairs")
        if problems:
            raise ConfigError(problems, "Llama3Config")

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str = "config.json") -> Llama3Config:
        """Read a Hugging Face config.json of a Llama, as transformers 4 or 5 writes it.

        Raises: ConfigError listing everything that this model cannot represent.
        """
        problems = [
            f"{key}: {config[key]!r} is not supported, expected {expected!r}"
            for key, expected in _FIXED.items()
            if config.get(key, expected) != expected
        ]
        required = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings",
        )  # fmt: skip
        problems += [f"{key}: missing" for key in required if key not in config]
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3"):
            problems.append(f"rope_parameters.rope_type: {rope_type!r} is not supported, expected default or llama3")
        if problems:
            raise ConfigError(problems, source)
        heads = config["num_attention_heads"]
        scaling = None
        if rope_type == "llama3":
            scaling = RopeScaling(
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
        return Llama3Config(
            dim=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_dim=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_seq_len=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            rope_scaling=scaling,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 reads this model with; of the vocabulary only its size."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if (scaling := self.rope_scaling) is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        return {
            "architectures": ["LlamaForCausalLM"],
            **_FIXED,
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": _INIT_STD,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "use_cache": True,
        }


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
"""The true shapes are those of Llama 3.1 (8B, 70B) and 3.2 (1B, 3B)."""


def rotary_table(config: Llama3Config, device: torch.device | None = None) -> torch.Tensor:
    """Return cos + i sin of every position and pair.

    Shape: (max_seq_len, head_dim / 2), complex64: mixed-precision wrappers cast floating-point inputs and would take a
    table of cosines down to bfloat16; complex ones they leave alone.
    Source: arXiv 2104.09864; for the scaling, transformers `modeling_rope_utils.py` _compute_llama3_parameters.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)
        # 1 where the wavelength is short against the original context, 0 where it is long, a ramp between
        keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device=device), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of the last dim by their position's angle, in float32.

    Shape: x (batch, seq, heads, head_dim), table (seq, head_dim / 2); same shape and dtype out.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key-value head."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, seq, dim) in and out. The number of heads is read off, so it may be a rank's share of them."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary(q, table), apply_rotary(k, table)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        result: torch.Tensor = self.wo(out.transpose(1, 2).flatten(-2))
        return result


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        result: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result

    def init_weights(self, residual_std: float) -> None:
        """Fill in place; `residual_std` is for the two matrices that write into the residual stream."""
        attention, feed_forward = self.attention, self.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
            nn.init.trunc_normal_(linear.weight, std=_INIT_STD)
        for linear in (attention.wo, feed_forward.w2):
            nn.init.trunc_normal_(linear.weight, std=residual_std)
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()


class Llama3(nn.Module):
    """A causal language model. May be built under `torch.device("meta")`; values come from `init_weights` or a load.

    A tied model has no `output`: it uses the embedding matrix, so nothing can untie it.
    A pipeline stage is a model whose `tok_embeddings`, `layers`, `norm` or `output` were removed: layers keep their
    names because a ModuleDict does not renumber.
    """

    rope_table: torch.Tensor

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config) for i in range(config.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rope_table", rotary_table(config), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits.

        Shape: (batch, seq) token ids, or (batch, seq, dim) on a later stage; (batch, seq, vocab) out.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens are longer than max_seq_len {self.config.max_seq_len}")
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        table = self.rope_table[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x, table)
        if self.norm is None:
            return x
        x = self.norm(x)
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, "a tied model cannot be cut between its embedding and its output"
            return F.linear(x, self.tok_embeddings.weight)
        assert self.output is not None, "the stage with the norm has the output"
        logits: torch.Tensor = self.output(x)
        return logits

    def init_weights(self) -> None:
        """Fill every parameter in place from the current generator, and recompute the buffers."""
        with torch.no_grad():
            if self.tok_embeddings is not None:
                nn.init.normal_(self.tok_embeddings.weight, std=_INIT_STD)
            for block in self.layers.values():
                assert isinstance(block, TransformerBlock)
                block.init_weights(_INIT_STD / math.sqrt(2 * self.config.num_layers))
            if self.norm is not None:
                self.norm.reset_parameters()
            if self.output is not None:
                nn.init.trunc_normal_(self.output.weight, std=self.config.dim**-0.5)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Recompute what no checkpoint holds, on the device it is on."""
        self.rope_table = rotary_table(self.config, self.rope_table.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Llama3:
        """Move or cast like any module, but keep the rotary table exact: it changes device, never dtype."""
        table = self._buffers["rope_table"]
        assert table is not None
        self._buffers["rope_table"] = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device=table.device)).device
        self._buffers["rope_table"] = rotary_table(self.config, device) if device != table.device else table
        return self

    def key_map(self) -> KeyMap:
        """Return the table between these names and Hugging Face's."""
        q, k = PermuteRotary(self.config.num_heads), PermuteRotary(self.config.num_kv_heads)
        block, hf = "layers.{i}", "model.layers.{i}"
        return KeyMap((
            KeyRule.of("tok_embeddings.weight",               "model.embed_tokens.weight"),
            KeyRule.of(f"{block}.attention.wq.weight",        f"{hf}.self_attn.q_proj.weight", q),
            KeyRule.of(f"{block}.attention.wk.weight",        f"{hf}.self_attn.k_proj.weight", k),
            KeyRule.of(f"{block}.attention.wv.weight",        f"{hf}.self_attn.v_proj.weight"),
            KeyRule.of(f"{block}.attention.wo.weight",        f"{hf}.self_attn.o_proj.weight"),
            KeyRule.of(f"{block}.feed_forward.w1.weight",     f"{hf}.mlp.gate_proj.weight"),
            KeyRule.of(f"{block}.feed_forward.w2.weight",     f"{hf}.mlp.down_proj.weight"),
            KeyRule.of(f"{block}.feed_forward.w3.weight",     f"{hf}.mlp.up_proj.weight"),
            KeyRule.of(f"{block}.attention_norm.weight",      f"{hf}.input_layernorm.weight"),
            KeyRule.of(f"{block}.ffn_norm.weight",            f"{hf}.post_attention_layernorm.weight"),
            KeyRule.of("norm.weight",                         "model.norm.weight"),
            KeyRule.of("output.weight",                       "lm_head.weight"),
        ))  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json of this model."""
        return self.config.to_hf()
