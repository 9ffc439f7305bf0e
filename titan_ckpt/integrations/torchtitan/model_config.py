"""config.json of a torchtitan model: the one in hf_assets_path, checked against the model, or a derived one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titan_ckpt.disk import posix
from titan_ckpt.encoding.strict_json import MAX_BYTES_BY_HAND, loads_by_hand
from titan_ckpt.errors import ConfigError
from titan_ckpt.models.llama3 import Llama3Config, RopeScaling
from titan_ckpt.models.qwen3 import Qwen3Config

_SHAPE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def config_json(model_config: Any, assets: str | None) -> dict[str, Any]:
    """Return the config.json for an export of the model.

    Raises: ConfigError if hf_assets_path has none and none can be derived, or if its shape is not the model's.
    """
    derived = _derived(model_config)
    path = Path(assets) / "config.json" if assets else None
    if path is not None and path.is_file():
        try:
            given: Any = loads_by_hand(posix.read_whole(os.path.realpath(path), MAX_BYTES_BY_HAND))
        except (ValueError, OSError) as error:
            raise ConfigError([f"hf_assets_path: {path} is not JSON: {error}"]) from None
        if not isinstance(given, dict):
            raise ConfigError([f"hf_assets_path: {path}: expected a JSON object, found {type(given).__name__}"])
        wrong = [
            f"{k}: {given[k]!r} there, {v!r} here" for k, v in derived.items() if k in _SHAPE and given.get(k, v) != v
        ]
        if wrong:
            raise ConfigError([f"hf_assets_path: {path} describes another model: {', '.join(wrong)}"])
        return given
    if not derived:
        fault = f"no config.json in hf_assets_path ({assets}), and none can be derived for"
        kind = type(model_config).__qualname__
        raise ConfigError([f"checkpoint.last_save_in_hf: {fault} {kind}: put the model's config.json there"])
    return derived


def _derived(model: Any) -> dict[str, Any]:
    """Return the config.json of torchtitan's dense llama3 and qwen3; empty for other models."""
    # torchtitan's LoRA makes subclasses of configs with names of their own
    names = {base.__qualname__.partition(".")[0] for base in type(model).__mro__}
    kind = next((kind for kind in ("Llama3Model", "Qwen3Model") if kind in names), None)
    if kind is None or any(layer.feed_forward is None for layer in model.layers):
        return {}
    layer = model.layers[0]
    attention, rope = layer.attention, layer.attention.rope
    shape: dict[str, Any] = {
        "dim": model.dim,
        "num_layers": len(model.layers),
        "num_heads": attention.n_heads,
        "num_kv_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "ffn_dim": layer.feed_forward.w1.out_features,
        "vocab_size": model.vocab_size,
        "max_seq_len": rope.max_seq_len,
        "rope_theta": float(rope.theta),
        "norm_eps": model.norm.eps,
        "tie_embeddings": model.enable_weight_tying,
    }
    if kind == "Qwen3Model":
        return Qwen3Config(**shape).to_hf() if rope.scaling == "none" else {}
    if rope.scaling == "yarn":
        return {}
    if rope.scaling == "none":
        return Llama3Config(**shape).to_hf()
    original = rope.original_max_position_embeddings
    scaling = RopeScaling(rope.scaling_factor, rope.low_freq_factor, rope.high_freq_factor, original)
    # torchtitan shortens max_seq_len to that of the training data; the scaled embeddings reach at least this far
    shape["max_seq_len"] = max(rope.max_seq_len, int(rope.scaling_factor * original))
    return Llama3Config(**shape, rope_scaling=scaling).to_hf()
