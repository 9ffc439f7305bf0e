"""config.json of a Hugging Face folder beside the args of a torchtitan model: the same settings, or refused by name.

Owns the comparison, for folders that are loaded and for the config.json of an export. described.py knows the models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_ckpt.components.classes import class_name
from titan_ckpt.disk import posix
from titan_ckpt.encoding.strict_json import MAX_BYTES_BY_HAND, loads_by_hand
from titan_ckpt.errors import ConfigError, LoadMismatchError, refuse
from titan_ckpt.integrations.torchtitan.described import LOW_RANK_EPS, ROPE, described, foreign_classes, unsaid

logger = logging.getLogger(__name__)

_SHAPE = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "hidden_size"})
"""Settings that decide which row belongs to what: weights of other ones are never the model's."""
NO_EFFECT = frozenset(
    {
        "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype", "ep_size",
        "eos_token_id", "initializer_range", "layer_types", "max_position_embeddings", "max_window_layers",
        "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "pretraining_tp",
        "quantization_config", "router_aux_loss_coef", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Keys of config.json that change no logits of these models, or that the reader of the weights answers for."""
_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False, "decoder_sparse_step": 1, "hidden_act": "silu", "mlp_bias": False, "mlp_only_layers": [],
    "moe_layer_freq": 1, "q_lora_rank": None, "rms_norm_eps": 1e-6, "rope_interleave": True, "scoring_func": "sigmoid",
    "sliding_window": None, "tie_word_embeddings": False, "topk_method": "noaux_tc", "use_sliding_window": False,
    LOW_RANK_EPS: 1e-6, f"{ROPE}.attention_factor": None, f"{ROPE}.beta_fast": 32.0, f"{ROPE}.beta_slow": 1.0,
    f"{ROPE}.mscale": None, f"{ROPE}.mscale_all_dim": None, f"{ROPE}.partial_rotary_factor": 1.0,
    f"{ROPE}.truncate": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
"""What transformers takes for a key that is not there."""
_OWN_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 128, "q_lora_rank": 1536},
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
        "rope_theta": 150_000.0,
    },
}  # fmt: skip
"""model_type -> the same, where this model has another one."""
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
_UNSAID: Mapping[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": None, "dtype": "float32", "eos_token_id": None,
    "initializer_range": 0.02, "pad_token_id": None, "use_cache": True,
}  # fmt: skip
"""What an export's config.json says beside the model's args, if hf_assets_path has none."""


def check_folder(path: str, config: Mapping[str, Any], model: Any, allow: Collection[str]) -> None:
    """Check that the config.json of a folder to load describes this model.

    Raises: LoadMismatchError with both values of each setting that differs and is not allowed.
    """
    if not config:
        logger.warning("load: %s has no config.json, so nobody can tell whether its heads, rotary embedding and eps "
                       "are those of this run's model", path)  # fmt: skip
        return
    faults, ours = [*_unknown(model, allow)], described(model)
    faults += [] if not ours else _differing(config, ours, allow)
    if faults:
        raise LoadMismatchError(
            f"{path}: its config.json is not known to describe this run's model; nothing was loaded\n  "
            + "\n  ".join(faults)
            + "\n  Set the args of the model spec as that folder says"
        )
    if ours and (unread := sorted(_flat(config).keys() - ours.keys() - NO_EFFECT - _DEFAULTS.keys())):
        logger.warning("load: %s: config.json has keys that were not compared: %s", path, ", ".join(unread))


def config_json(model: Any, assets: str | None, allow: Collection[str] = ()) -> dict[str, Any]:
    """Return the config.json for an export: the model's own args, and what these do not say from hf_assets_path.

    Raises: ConfigError if hf_assets_path has none and none can be derived, or if the two contradict each other.
    """
    ours = described(model)
    path = Path(assets) / "config.json" if assets else None
    given = _read(path) if path is not None and path.is_file() else None
    if not ours and given is None:
        fault = f"no config.json in hf_assets_path ({assets}), and none can be derived for"
        kind = type(model).__qualname__
        raise ConfigError([f"checkpoint.last_save_in_hf: {fault} {kind}: put the model's config.json there"])
    faults = [f"checkpoint.last_save_in_hf: {fault}" for fault in _unknown(model, allow)]
    if given is not None:
        faults += [f"hf_assets_path: {path} describes another model: {f}" for f in _differing(given, ours, allow)]
    mixed = [key for key, value in ours.items() if isinstance(value, tuple)]
    faults += [
        f"checkpoint.last_save_in_hf: {key} is {' and '.join(map(str, ours[key]))} in parts of one model, which "
        "config.json cannot say; give all parts the same"
        for key in mixed
    ]
    if given is None and not mixed:
        unsaid = _differing(_nested(ours), ours, allow)
        faults += [f"checkpoint.last_save_in_hf: no config.json says {fault}" for fault in unsaid]
    refuse(*faults)
    if given is None:
        return {**_UNSAID, **_nested(ours)}
    differing = {key for key, _, _ in _pairs(given, ours)}
    if any(key.startswith(ROPE) for key in differing):
        given = {key: value for key, value in given.items() if key not in _ROTARY}
        differing.add(ROPE)
    return given | {key: value for key, value in _nested(ours).items() if key in differing}


def _read(path: Path) -> dict[str, Any]:
    try:
        given: Any = loads_by_hand(posix.read_whole(os.path.realpath(path), MAX_BYTES_BY_HAND))
    except (ValueError, OSError) as error:
        raise ConfigError([f"hf_assets_path: {path} is not JSON: {error}"]) from None
    if not isinstance(given, dict):
        raise ConfigError([f"hf_assets_path: {path}: expected a JSON object, found {type(given).__name__}"])
    return given


def is_allowed(name: str, allow: Collection[str], line: str) -> bool:
    """Return whether a name is allowed, and log then what is let through."""
    if name in allow:
        logger.warning("%s; checkpoint.allow lets it run", line)
    return name in allow


def _unknown(model: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield the fault of each class of the model's args, and each setting, that config.json does not say."""
    unknown = [*foreign_classes(model), *unsaid(model)]
    if not unknown and not described(model):
        unknown = [class_name(model)]
    for name in unknown:
        if not is_allowed(name, allow, f"{name}: config.json was not compared with it"):
            yield (
                f"{name}: it is not known which keys of config.json describe it: compare them yourself, then "
                f'set checkpoint.allow = ["{name}"]'
            )


def _differing(config: Mapping[str, Any], ours: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    """Yield each setting with another value in config.json than in the model, but for those that are allowed."""
    for key, there, here in _pairs(config, ours):
        line = f"{key}: {there!r} there, {here!r} here"
        if key in _SHAPE:
            yield line
        elif not is_allowed(name := f"config.json:{key}", allow, f"config.json: {line}"):
            yield f'{line}; to run with it all the same: checkpoint.allow = ["{name}"]'


def _pairs(config: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in config.json or its default, value in the model) where the two differ."""
    theirs = _flat(config)
    rotary = [key for key in theirs if key.startswith(ROPE)] if ours else []
    for key in dict.fromkeys((*ours, *rotary)):
        there, here = (values.get(key, _DEFAULTS.get(key)) for values in (theirs, ours))
        if (key not in NO_EFFECT or key == "layer_types") and there != here:
            yield key, there, here


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says, of transformers 4 or 5, as `described` does; None is a key that is not there."""
    heads, kind = config.get("num_attention_heads"), config.get("model_type")
    config = {**_OWN_DEFAULTS.get(str(kind), {}), **config}
    flat = {key: value for key, value in config.items() if key not in _ROTARY and value is not None}
    if "num_local_experts" in flat and "n_routed_experts" not in flat:
        flat.setdefault("num_experts", flat.pop("num_local_experts"))
    if kind in ("qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        flat.pop("sliding_window", None)
    if kind == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        flat.setdefault("layer_types", [kinds[i % 2] for i in range(config.get("num_hidden_layers", 0))])
    flat.setdefault("num_key_value_heads", heads)
    of_heads = config["hidden_size"] // heads if heads and "hidden_size" in config else None
    flat.setdefault("head_dim", config.get("qk_rope_head_dim", of_heads))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return flat | {f"{ROPE}.rope_type": rope}
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": rope.get("type", "default"), **rope}
    known = ("rope_theta", "rope_type", "partial_rotary_factor")
    rope = {k: v for k, v in rope.items() if k in known or (k != "type" and rope["rope_type"] != "default")}
    return flat | {f"{ROPE}.{key}": value for key, value in rope.items() if value is not None}


def _nested(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers 5 writes it."""
    rope = {key.removeprefix(f"{ROPE}."): value for key, value in ours.items() if key.startswith(f"{ROPE}.")}
    plain = {key: value for key, value in ours.items() if not key.startswith(f"{ROPE}.") and key != LOW_RANK_EPS}
    if plain["model_type"] == "gpt_oss":
        plain["num_local_experts"] = plain.pop("num_experts")
    # torchtitan shortens max_seq_len to that of the training data; the scaled embeddings reach at least this far
    reach = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    return plain | {ROPE: rope, "max_position_embeddings": max(plain["max_position_embeddings"], reach)}
