"""config.json of a torchtitan model: every setting of its own args that changes what the same weights compute.

Owns what is known of each model's args. Reads attributes alone and imports no torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from titan_ckpt.components.classes import class_name, names_of
from titan_ckpt.errors import ConfigError

ROPE = "rope_parameters"
_OWN = (
    "torchtitan.components.", "torchtitan.config.", "torchtitan.models.common.", "torchtitan.overrides.",
    "torchtitan.protocols.", "titan_ckpt.", "builtins.",
)  # fmt: skip
_OTHER_NORMS = frozenset(f"torchtitan.models.common.nn_modules.{name}.Config" for name in ("Identity", "LayerNorm"))
"""What a norm may be in torchtitan, and is in no model that is described here."""
LOW_RANK_EPS = "q_a_layernorm.eps, kv_a_layernorm.eps"
"""What transformers and DeepSeek's own code have as a constant of 1e-6, and torchtitan as a setting."""


def described(model: Any) -> dict[str, Any]:
    """Return config.json as transformers 5 writes it; empty for a model whose args are not known.

    A setting that differs between layers, which config.json cannot say, is a tuple of its values.
    Raises: ConfigError for a size of 0, by which others are divided.
    """
    known = _known_class(model)
    try:
        return {} if known is None else _MODELS[known](model)
    except ZeroDivisionError as error:
        raise ConfigError([f"{known}: a number of heads or experts, or the size of one, is 0"]) from error


def _known_class(model: Any) -> str | None:
    return next((name for name in names_of(type(model)) if name in _MODELS), None)


def foreign_classes(model: Any) -> list[str]:
    """Return the classes of args whose settings are not known: a user's, and those of torchtitan's other models."""
    known = _known_class(model)
    own = (*_OWN, "torchtitan." if known is None else f"{known.partition('.model.')[0]}.")
    names = dict.fromkeys(name for args in tree(model) for name in names_of(type(args)))
    return [name for name in names if not name.startswith(own) or name in _OTHER_NORMS]


def unsaid(model: Any) -> list[str]:
    """Return the settings of a known model that no config.json says, and that transformers' model does not have."""
    names = (f"{class_name(args)}.{name}" for args in tree(model) for name in _odd(args))
    return [*dict.fromkeys(names)] if described(model) else []


def _odd(args: Any) -> Iterator[str]:
    window = getattr(args, "sliding_window_size", None)
    causal = (-1 if window is None else window - 1, 0)
    if tuple(getattr(getattr(args, "inner_attention", None), "window_size", causal)) != causal:
        yield "inner_attention"
    if not getattr(args, "elementwise_affine", True):
        yield "elementwise_affine"
    if getattr(args, "eps", 0.0) is None:
        yield "eps"
    if getattr(args, "_debug_force_load_balance", False):
        yield "_debug_force_load_balance"


def tree(args: Any) -> Iterator[Any]:
    """Yield the args of a model and of all its parts, as torchtitan's Config.traverse finds them."""
    if isinstance(args, (list, tuple)):
        for item in args:
            yield from tree(item)
    elif hasattr(type(args), "traverse"):
        yield args
        for name in type(args).__dataclass_fields__:
            yield from tree(getattr(args, name, None))


def _one(values: Iterable[Any]) -> Any:
    """Return the value that all parts of a model have, or else all of them."""
    distinct = [*dict.fromkeys(v for value in values for v in (value if isinstance(value, tuple) else (value,)))]
    return distinct[0] if len(distinct) == 1 else tuple(distinct)


def _of_layers(layers: Iterable[Any], describe: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what each layer says, with all values of a setting that differs between layers."""
    described = [describe(layer) for layer in layers]
    keys = dict.fromkeys(key for layer in described for key in layer)
    return {key: _one(layer[key] for layer in described if key in layer) for key in keys}


def _whole(model: Any) -> dict[str, Any]:
    """Return what every known model says of itself as a whole."""
    table = model.tok_embeddings
    return {
        "hidden_size": _one((model.dim, table.embedding_dim)),
        "vocab_size": _one((model.vocab_size, table.num_embeddings, model.lm_head.out_features)),
        "num_hidden_layers": len(model.layers),
        "tie_word_embeddings": model.enable_weight_tying,
        "hidden_act": "silu",
    }


def _layer(model: Any, layer: Any, mscale: float | None = None) -> dict[str, Any]:
    """Return what every known model says of a layer. `mscale`: see `_rope`."""
    attention = layer.attention
    norms = [model.norm, layer.attention_norm, layer.ffn_norm, getattr(attention, "qk_norm", None)]
    return {
        "rms_norm_eps": _eps(norm for norm in norms if norm is not None),
        "max_position_embeddings": attention.rope.max_seq_len,
        **_rope(attention.rope, mscale),
    }


def _decoder(model: Any) -> dict[str, Any]:
    """Return what llama3 and qwen3 have in common."""

    def of_layer(layer: Any) -> dict[str, Any]:
        attention, feed_forward = layer.attention, layer.feed_forward
        return {
            **_heads(attention, attention.head_dim or model.dim // attention.n_heads),
            **({"intermediate_size": feed_forward.w1.out_features} if feed_forward else {}),
            **_layer(model, layer),
            "attention_bias": attention.wo.bias,
        }

    return {**_whole(model), **_of_layers(model.layers, of_layer), "sliding_window": None}


def _heads(attention: Any, head_dim: int) -> dict[str, Any]:
    """Return the heads as the attention names them and as its projections compute them. `head_dim`: as it is named."""
    qkv = attention.qkv_linear
    num_kv = qkv.n_kv_heads if hasattr(qkv, "n_kv_heads") else _number(qkv.wkv.out_features, qkv.head_dim)
    return {
        "num_attention_heads": _one((attention.n_heads, _number(attention.wo.in_features, qkv.head_dim))),
        "num_key_value_heads": _one((attention.n_kv_heads or attention.n_heads, num_kv)),
        "head_dim": _one((head_dim, qkv.head_dim, attention.rope.dim)),
    }


def _number(rows: int, size: int) -> float:
    """Return how many parts of a size the rows are; a fraction if the last part is not whole."""
    return rows / size if rows % size else rows // size


def _eps(norms: Iterable[Any]) -> Any:
    return _one(getattr(norm, "eps", None) for norm in norms)


def _experts(moe: Any, number: str = "num_experts", size: str = "moe_intermediate_size") -> dict[str, Any]:
    """Return what every known model says of its experts. `number`, `size`: how it calls their number and their size."""
    experts = moe.routed_experts.inner_experts
    return {
        number: _one((moe.num_experts, experts.num_experts, moe.router.gate.out_features)),
        "num_experts_per_tok": _one((moe.router.top_k, moe.routed_experts.token_dispatcher.top_k)),
        size: experts.hidden_dim,
    }


def _routed(layer: Any, number: str = "num_experts") -> dict[str, Any]:
    return {**_experts(layer.moe, number), "norm_topk_prob": layer.moe.router.route_norm}


def _llama3(model: Any) -> dict[str, Any]:
    if any(layer.feed_forward is None for layer in model.layers):
        return {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder(model),
        "mlp_bias": _one(layer.feed_forward.w1.bias for layer in model.layers),
    }


def _qwen3(model: Any) -> dict[str, Any]:
    """Describe a dense Qwen3 or a Qwen3 MoE; without norms of heads, or with other routers, it is another model."""
    if any(layer.attention.qk_norm is None for layer in model.layers):
        return {}
    shape = {"use_sliding_window": False, **_decoder(model)}
    sparse = [layer for layer in model.layers if layer.moe is not None]
    if not sparse:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | shape
    routers = [layer.moe.router for layer in sparse]
    known = all((r.score_func, r.route_scale, r.num_expert_groups) == ("softmax", 1.0, None) for r in routers)
    if not known or any(layer.moe.shared_experts is not None for layer in sparse):
        return {}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **shape,
        **_of_layers(sparse, _routed),
        "mlp_only_layers": [i for i, layer in enumerate(model.layers) if layer.moe is None],
        "decoder_sparse_step": 1,
    }


def _rope(rope: Any, mscale: float | None = None) -> dict[str, Any]:
    """Return the rotary settings. `mscale`: factor of the attention's scale under yarn, as DeepSeek has it."""
    found = {"rope_theta": float(rope.theta), "rope_type": "default"}
    if rope.scaling == "llama":
        original = rope.original_max_position_embeddings
        found |= {name: getattr(rope, name) for name in ("low_freq_factor", "high_freq_factor")}
        found |= {"rope_type": "llama3", "factor": rope.scaling_factor, "original_max_position_embeddings": original}
    elif rope.scaling == "yarn" and rope.rope_factor > 1:
        found |= {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "truncate")}
        found |= {"rope_type": "yarn", "factor": rope.rope_factor}
        found |= {"attention_factor": 1.0} if not mscale else {"mscale": mscale, "mscale_all_dim": mscale}
        found |= {"original_max_position_embeddings": rope.original_seq_len}
    return {f"{ROPE}.{name}": value for name, value in found.items()}


def _deepseek_v3(model: Any) -> dict[str, Any]:
    """Describe a DeepSeek-V3; models with a vision encoder, or with the experts' scores of V2, are not known."""
    sparse = [layer for layer in model.layers if layer.moe is not None]
    dense = len(model.layers) - len(sparse)
    known = sparse and dense and all(layer.moe is None for layer in model.layers[:dense])
    if getattr(model, "vision_encoder", None) is not None or not known:
        return {}
    routers = [layer.moe.router for layer in sparse]
    shared = [_num_shared(layer.moe) for layer in sparse]
    if any(router.score_func != "sigmoid" for router in routers) or None in shared:
        return {}

    def of_layer(layer: Any) -> dict[str, Any]:
        attention = layer.attention
        content, rotary = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        low_rank = attention.q_lora_rank or None
        queries = (attention.wq_b if low_rank else attention.wq).out_features
        heads = _one(
            (
                attention.n_heads,
                _number(queries, content + rotary),
                _number(attention.wkv_b.out_features, content + attention.v_head_dim),
                _number(attention.wo.in_features, attention.v_head_dim),
            )
        )
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": _one((low_rank, attention.wq_a.out_features)) if low_rank else None,
            "kv_lora_rank": _one((attention.kv_lora_rank, attention.wkv_a.out_features - rotary)),
            "qk_nope_head_dim": content,
            "qk_rope_head_dim": rotary,
            "head_dim": _one((rotary, attention.rope.dim)),
            "v_head_dim": attention.v_head_dim,
            **_layer(model, layer, attention.mscale),
        }

    latent = [layer.attention for layer in model.layers]
    low_rank = [norm for a in latent for norm in (a.kv_norm, a.q_norm if a.q_lora_rank else a.kv_norm)]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_whole(model),
        **_of_layers(model.layers, of_layer),
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "intermediate_size": _one(layer.feed_forward.w1.out_features for layer in model.layers[:dense]),
        "n_shared_experts": _one(shared),
        **_of_layers(sparse, partial(_routed, number="n_routed_experts")),
        "n_group": _one(router.num_expert_groups or 1 for router in routers),
        "topk_group": _one(router.num_limited_groups if router.num_expert_groups else 1 for router in routers),
        "routed_scaling_factor": _one(router.route_scale for router in routers),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        LOW_RANK_EPS: _eps(low_rank),
        "attention_bias": False,
        "rope_interleave": True,
    }


def _gpt_oss(model: Any) -> dict[str, Any]:
    """Describe a gpt_oss; other ways to choose experts are other models."""
    routers = [layer.moe.router for layer in model.layers]
    softmax = all(
        (r.score_func, r.route_norm, r.route_scale, r.gate.bias) == ("softmax", True, 1.0, True) for r in routers
    )
    if not softmax or any(router.num_expert_groups is not None for router in routers):
        return {}

    def of_layer(layer: Any) -> dict[str, Any]:
        attention, qkv = layer.attention, layer.attention.qkv_linear
        projections = (qkv.wqkv,) if hasattr(qkv, "wqkv") else (qkv.wq, qkv.wkv)
        common = _layer(model, layer)
        common.pop(f"{ROPE}.attention_factor", None)  # the model scales its attention as transformers does without
        return {
            **_heads(attention, attention.head_dim),
            **common,
            **_experts(layer.moe, size="intermediate_size"),
            "swiglu_limit": layer.moe.routed_experts.inner_experts.swiglu_limit,
            "attention_bias": _one(linear.bias for linear in (attention.wo, *projections)),
        }

    windows = [layer.attention.sliding_window_size for layer in model.layers]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **_whole(model),
        **_of_layers(model.layers, of_layer),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": _one(window for window in windows if window is not None) or None,
        "swiglu_alpha": 1.702,
    }


def _num_shared(moe: Any) -> int | None:
    """Return how many experts of the routed ones' size the shared ones are; None if that is no whole number."""
    size: int = 0 if moe.shared_experts is None else moe.shared_experts.w1.out_features
    num, rest = divmod(size, moe.routed_experts.inner_experts.hidden_dim)
    return None if rest else num


_MODELS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "torchtitan.models.llama3.model.Llama3Model.Config": _llama3,
    "torchtitan.models.qwen3.model.Qwen3Model.Config": _qwen3,
    "torchtitan.models.deepseek_v3.model.DeepSeekV3Model.Config": _deepseek_v3,
    "torchtitan.models.gpt_oss.model.GptOssModel.Config": _gpt_oss,
}
