"""The shape of a decoder-only model, and its part of a Hugging Face config.json.

Owns the fields that every architecture has. Each architecture's module owns its additional fields and fixed values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titan_ckpt.encoding import strict_json
from titan_ckpt.encoding.paths import how_to_get, hub_folder
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError, refuse
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.store import Place, store_of

INIT_STD = 0.02
_HF_NAMES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
"""Field of DecoderConfig -> key of config.json, for the sizes."""
_NAMES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}
"""model_type of a config.json -> the name of its own architecture here; every other is taken by "hf"."""
_REQUIRED = [key for field, key in _HF_NAMES.items() if field not in ("num_kv_heads", "head_dim")]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder-only model: the sizes of its stack and its attention."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    """Length of the rotary table and of the longest input, in tokens."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        refuse(*self.problems(), source=type(self).__name__)

    def problems(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} heads"
        if self.head_dim % 2:
            yield f"head_dim: {self.head_dim} is odd, and rotary embeddings turn pairs"

    def to_hf(self) -> dict[str, Any]:
        """Return config.json for transformers 5, without special token ids."""
        return {
            **{key: getattr(self, field) for field, key in _HF_NAMES.items()},
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": INIT_STD,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "use_cache": True,
        }


def read_config_json(folder: str | Place) -> dict[str, Any]:
    """Return the contents of a Hugging Face folder's config.json. Raises: ConfigError; StoreError."""
    try:
        path = (hub_folder(folder) if isinstance(folder, str | Path) else folder) / "config.json"
    except CheckpointNotFoundError as error:
        raise ConfigError([f"model.folder: {error}"]) from None
    try:
        data = store_of(path).read_whole(path, strict_json.MAX_BYTES_BY_HAND, through_links=True)
        config = strict_json.decode_floats(strict_json.loads_by_hand(data))
    except (FileNotFoundError, NotADirectoryError):
        expected = f"expected a Hugging Face folder{how_to_get(str(folder))}"
        raise ConfigError([f"model.folder: {path} is not there; {expected}"]) from None
    except StoreError:
        raise
    except OSError as error:
        raise ConfigError([f"model.folder: {path} cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"model.folder: {path} is not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"model.folder: {path}: expected a JSON object, found {type(config).__name__}"])
    return config


def read_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DecoderConfig from a checked config.json of transformers 4 or 5."""
    heads = config["num_attention_heads"]
    return {
        **{field: config.get(key) for field, key in _HF_NAMES.items()},
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_theta": float(rotary(config)["rope_theta"]),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters: rope_parameters of transformers 5, or rope_theta and rope_scaling of 4."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    return rope


def check_config(
    config: Mapping[str, Any],
    source: str,
    *,
    fixed: Mapping[str, Any],
    required: Sequence[str] = (),
    rope_types: Mapping[str, Sequence[str]] = MappingProxyType({"default": ()}),
) -> None:
    """Check that an architecture can represent a config.json.

    `fixed`: values that the architecture always has; an absent key counts as equal. `required`: keys beside those that
    every model needs. `rope_types`: supported kinds of rotary embedding, each with the parameters that it needs.
    Raises: ConfigError listing everything that the architecture cannot represent.
    """
    found, expected_type = config.get("model_type"), fixed.get("model_type")
    if expected_type is not None and found not in (None, expected_type):
        name = _NAMES.get(str(found), "hf")
        takes = "takes every causal language model of transformers" if name == "hf" else "is its name here"
        cause = f"model_type: {found!r} is not supported, expected {expected_type!r}"
        raise ConfigError([f'{cause}; set model.name = "{name}", which {takes}'], source)
    problems = [
        f"{key}: {config[key]!r} is not supported, expected {expected!r}"
        for key, expected in fixed.items()
        if config.get(key, expected) != expected
    ]
    problems += [f"{key}: missing" for key in (*_REQUIRED, *required) if config.get(key) is None]
    rope = rotary(config)
    if rope["rope_type"] not in rope_types:
        expected = " or ".join(rope_types)
        problems.append(f"rope_parameters.rope_type: {rope['rope_type']!r} is not supported, expected {expected}")
    needed = rope_types.get(rope["rope_type"], ())
    problems += [f"rope_parameters.{key}: missing" for key in needed if key not in rope]
    if problems:
        if any("is not supported" in problem for problem in problems):
            problems[-1] += '; or set model.name = "hf", which takes it as it is'
        raise ConfigError(problems, source)


def written_config(config: Any, architecture: str) -> dict[str, Any]:
    """Return the config.json that save_pretrained writes; whether weights are tied is always in it.

    `config`: of transformers. `architecture`: the class that opens the model.
    """
    tied = {name: value for name, value in config.to_dict().items() if name == "tie_word_embeddings"}
    return {**config.to_diff_dict(), **tied, "architectures": [architecture]}
