"""The shape of a decoder-only model, and the part of a Hugging Face config.json that says it.

Owns the fields that every architecture has. What an architecture adds, and what it always is, its own module says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.layers import INIT_STD

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the stack and the attention of any decoder-only model are made from."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    """Tokens; the length of the rotary table, and the longest input."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise ConfigError(problems, type(self).__name__)

    def problems(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} heads"
        if self.head_dim % 2:
            yield f"head_dim: {self.head_dim} is odd, and rotary embeddings turn pairs"

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 reads this model with; of the vocabulary only its size."""
        return {
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_seq_len,
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


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """Return the contents of a Hugging Face folder's config.json. Raises: ConfigError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError([f"model.folder: {path} is not there; expected a Hugging Face folder"]) from None
    except OSError as error:
        raise ConfigError([f"model.folder: {path} cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"model.folder: {path} is not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"model.folder: {path}: expected a JSON object, found {type(config).__name__}"])
    return config


def read_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DecoderConfig from a config.json that was checked, as transformers 4 or 5 writes it."""
    heads = config["num_attention_heads"]
    return {
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["max_position_embeddings"],
        "rope_theta": float(rotary(config)["rope_theta"]),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gather what transformers 5 writes as rope_parameters, and 4 as rope_theta with rope_scaling beside it."""
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
    """Raise unless an architecture can represent a config.json.

    `fixed`: what the architecture always is; an absent key is taken for that. `required`: beside every model's own.
    `rope_types`: the kinds of rotary embedding it has, each with the parameters it needs.
    Raises: ConfigError listing everything that it cannot represent.
    """
    problems = [
        f"{key}: {config[key]!r} is not supported, expected {expected!r}"
        for key, expected in fixed.items()
        if config.get(key, expected) != expected
    ]
    problems += [f"{key}: missing" for key in (*_REQUIRED, *required) if key not in config]
    rope = rotary(config)
    if rope["rope_type"] not in rope_types:
        expected = " or ".join(rope_types)
        problems.append(f"rope_parameters.rope_type: {rope['rope_type']!r} is not supported, expected {expected}")
    needed = rope_types.get(rope["rope_type"], ())
    problems += [f"rope_parameters.{key}: missing" for key in needed if key not in rope]
    if problems:
        raise ConfigError(problems, source)
