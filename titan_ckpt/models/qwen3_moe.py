"""Qwen3-MoE: Qwen3 with sparse layers, in which each token passes through a few of many feed-forwards.

Owns routing, the experts and their shapes; qwen3.py has everything else. Knows no files, no parallelism and no loop.
In memory, one parameter holds a projection of all experts, so that one optimizer step, one shard and one all-gather
serve all of them; on disk every expert has its own tensors. Routing drops no token: an expert takes any number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.geometry.keymap import KeyMap, KeyRule, Unstack
from titan_ckpt.models.config import INIT_STD, DecoderConfig, check_config, read_shape
from titan_ckpt.models.decoder import BLOCK, HF_BLOCK, Decoder, embedding_rules
from titan_ckpt.models.layers import ExactBuffers, SubLayer, TransformerBlock, local_shard, make_block, rotate_halves
from titan_ckpt.models.qwen3 import FIXED, RULES, rotary_table

_REQUIRED = ("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
_HF_NAMES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "dense_layers": "mlp_only_layers",
    "sparse_step": "decoder_sparse_step",
    "output_router_logits": "output_router_logits",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
"""Field of Qwen3MoeConfig -> key of config.json, for what DecoderConfig lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """The shape of a Qwen3-MoE model; `ffn_dim` is the hidden size of its dense layers."""

    rope_theta: float = 1_000_000.0
    num_experts: int
    experts_per_token: int
    expert_dim: int
    norm_topk_prob: bool = True
    """Scale the weights of a token's experts so that they sum to one."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers that have one feed-forward for all tokens."""
    sparse_step: int = 1
    """Layers outside `dense_layers` are sparse if their number plus one is divisible by this."""
    output_router_logits: bool = False
    """Whether transformers adds the load-balancing loss to the loss that it returns."""
    router_aux_loss_coef: float = 0.001
    """Factor of the load-balancing loss."""

    @property
    def balance_coefficient(self) -> float:
        """Return the factor of the load-balancing loss that config.json asks for; 0 if it asks for none."""
        return self.router_aux_loss_coef if self.output_router_logits else 0.0

    def problems(self) -> Iterator[str]:
        yield from DecoderConfig.problems(self)
        if not 0 < self.experts_per_token <= self.num_experts:
            yield f"experts_per_token: {self.experts_per_token} of {self.num_experts} experts"
        if self.sparse_step < 1:
            yield f"sparse_step: {self.sparse_step} is not a positive number of layers"

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer chooses among experts."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str = "config.json") -> Qwen3MoeConfig:
        """Return the shape in a Qwen3-MoE's config.json of transformers 4 or 5.

        Raises: ConfigError listing everything that this model cannot represent.
        """
        # transformers 5 writes num_local_experts, all other writers num_experts
        experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
        fixed = FIXED | {"model_type": "qwen3_moe"}
        check_config(config, source, fixed=fixed, required=(*_REQUIRED, experts))
        given = {field: value for field, key in _HF_NAMES.items() if (value := config.get(key)) is not None}
        given |= {"num_experts": config[experts], "dense_layers": tuple(given.get("dense_layers", ()))}
        return Qwen3MoeConfig(**read_shape(config), **given)

    def to_hf(self) -> dict[str, Any]:
        """Return config.json for transformers 5, without special token ids."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **FIXED,
            **DecoderConfig.to_hf(self),
            **{key: getattr(self, field) for field, key in _HF_NAMES.items()},
            "mlp_only_layers": list(self.dense_layers),
        }


_DEBUG = Qwen3MoeConfig(
    dim=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=48, ffn_dim=256, vocab_size=2048, max_seq_len=1024,
    rope_theta=10_000.0, num_experts=8, experts_per_token=2, expert_dim=64, dense_layers=(0,),
)  # fmt: skip

FLAVORS: Mapping[str, Qwen3MoeConfig] = {
    "debug-1m": _DEBUG,
    "debug-8m": replace(_DEBUG, dim=192, num_layers=6, num_experts=16, expert_dim=128, ffn_dim=768),
    "30B-A3B": Qwen3MoeConfig(
        dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, ffn_dim=6144, vocab_size=151_936,
        max_seq_len=40_960, num_experts=128, experts_per_token=8, expert_dim=768,
    ),
}  # fmt: skip


def imbalance(tokens: torch.Tensor) -> float:
    """Return the busiest expert's share divided by an even share: 1 is even, the number of experts the worst.

    Shape: (num_experts,), the number of tokens that a router has given to each.
    """
    return float(tokens.max() / tokens.float().mean())


def entropy(tokens: torch.Tensor) -> float:
    """Return the entropy of the experts' shares divided by that of even shares: 1 is even, 0 is a single expert."""
    shares = tokens / tokens.sum()
    return float(torch.special.entr(shares).sum()) / math.log(len(shares)) if len(shares) > 1 else 1.0


class Router(ExactBuffers):
    """Chooses each token's experts. In training mode it also counts its choices, without a gradient."""

    tokens: torch.Tensor
    """How many tokens each expert has got since the last `reset_buffers`. Shape: (num_experts,), int64."""
    is_watched: bool = False
    """Keep `last`. A layer that is computed again in the backward pass must not: that would hold its graph."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    """The tokens of each expert in the last watched forward pass, and their summed probabilities with gradient."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        # Not an nn.Linear, so that converters of linear modules do not quantize the routing.
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.register_buffer("tokens", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and indices of each token's experts, the most probable first.

        Shape: (tokens, dim) in; (tokens, experts_per_token) twice out. Probabilities are computed in float32.
        """
        probabilities = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training:
            tokens = torch.bincount(chosen.flatten(), minlength=len(self.tokens))
            self.tokens += tokens
            if self.is_watched:
                self.last = tokens, probabilities.sum(dim=0)
        return weights.type_as(x), chosen

    def reset_buffers(self) -> None:
        self.tokens = torch.zeros_like(self.tokens)


class Experts(nn.Module):
    """The feed-forwards of all experts: expert e computes w2[e] (silu(w1[e] x) * w3[e] x)."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.dim, config.expert_dim))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, config.dim))

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Shape: (rows, dim) in and out; the first `counts[0]` rows belong to expert 0, and so on."""
        # unbind, because each w1[e] would have a gradient as large as w1; a DTensor gives this rank's experts
        weights = zip(*(local_shard(w).unbind() for w in (self.w1, self.w2, self.w3)), strict=True)
        return torch.cat([
            F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2)
            for rows, (w1, w2, w3) in zip(x.split(counts), weights, strict=True)
        ])  # fmt: skip


class MixtureOfExperts(SubLayer):
    """The weighted sum of the outputs of each token's experts."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, seq, dim) in and out."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router.weight))
        made = self.experts(tokens[by_expert // chosen.shape[1]], counts.tolist())
        per_token = made[by_expert.argsort()].unflatten(0, chosen.shape)
        result: torch.Tensor = (per_token * weights.unsqueeze(-1)).sum(dim=1).view_as(x)
        return result

    def init_weights(self, residual_std: float) -> None:
        nn.init.trunc_normal_(self.router.weight, std=INIT_STD)
        nn.init.trunc_normal_(self.experts.w1, std=INIT_STD)
        nn.init.trunc_normal_(self.experts.w3, std=INIT_STD)
        nn.init.trunc_normal_(self.experts.w2, std=residual_std)


def _block(config: Qwen3MoeConfig, layer: int) -> TransformerBlock:
    experts = MixtureOfExperts(config) if config.is_sparse(layer) else None
    return make_block(config, rotate_halves, qk_norm=True, feed_forward=experts)


class Qwen3Moe(Decoder[Qwen3MoeConfig]):
    """Qwen3-MoE; see Decoder."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        blocks = [_block(config, layer) for layer in range(config.num_layers)]
        super().__init__(config, blocks, partial(rotary_table, config))

    def routers(self) -> dict[str, Router]:
        """Return the routers by fqn, for callbacks that watch their loads."""
        return {fqn: module for fqn, module in self.named_modules() if isinstance(module, Router)}

    def key_map(self) -> KeyMap:
        """Return the table between these names and Hugging Face's names."""
        num = self.config.num_experts

        def per_expert(name: str) -> list[str]:
            return [f"{HF_BLOCK}.mlp.experts.{e}.{name}.weight" for e in range(num)]

        experts = f"{BLOCK}.feed_forward.experts"
        return KeyMap((
            *embedding_rules(self.config.tie_embeddings),
            *RULES,
            KeyRule.of(f"{BLOCK}.feed_forward.router.weight",   f"{HF_BLOCK}.mlp.gate.weight"),
            KeyRule.of(f"{experts}.w1",                         per_expert("gate_proj"), Unstack(num)),
            KeyRule.of(f"{experts}.w2",                         per_expert("down_proj"), Unstack(num)),
            KeyRule.of(f"{experts}.w3",                         per_expert("up_proj"), Unstack(num)),
        ))  # fmt: skip
