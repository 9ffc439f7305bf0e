"""Every causal language model of the installed transformers, made tiny from its own configuration class.

Owns the configurations and how they are shrunk. No model is named here: sizes are recognised by the names of their
fields, lists that have one entry per layer keep one layer of each kind, and several sizes are tried until a model
builds and computes logits.
"""

from __future__ import annotations

import itertools
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SEQUENCE = 16
"""Length of the inputs in tokens."""
MAX_PARAMETERS = 8_000_000
_VOCABULARY = 96
_HEADS = 4
_KINDS = 4
"""A model has at most this many kinds of layers."""
_FILL = "fields that are None get a size too"

_SIZES: Mapping[str, int] = {
    **dict.fromkeys((
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "dim_model", "emb_dim", "embedding_size",
        "word_embed_proj_dim", "hidden_size_per_layer_input", "cross_attention_hidden_size", "attention_hidden_size",
        "input_embedding_size", "output_embedding_size", "lru_width", "out_hidden_size", "projection_dim",
        "text_hidden_size", "backbone_hidden_size", "audio_embed_dim", "mm_embed_dim", "output_proj_dims",
        "output_hidden_size", "hidden_size_global", "projector_hidden_size", "router_hidden_size", "ple_embed_dim",
        "adapter_out_dim", "vision_output_dim", "decoder_hidden_size", "downsample_hidden_size", "linear_hidden_size",
    ), 32),
    **dict.fromkeys((
        "intermediate_size", "ffn_dim", "dim_ff", "d_ff", "dff", "n_inner", "inner_dim", "ffn_hidden_size",
        "decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
        "shared_intermediate_size", "intermediate_size_mlp", "moe_shared_expert_intermediate_size", "mlp_dim",
        "dense_intermediate_size", "expert_ffn_hidden_size", "feed_forward_size", "prefix_dense_intermediate_size",
        "block_auto_adjust_ff_dim", "shared_experts_intermediate_size", "d_inner", "mamba_d_ssm", "moe_latent_size",
    ), 64),
    **dict.fromkeys((
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "decoder_layers", "encoder_layers",
        "num_decoder_layers", "num_encoder_layers", "conf_num_hidden_layers", "num_layers_per_stack", "num_blocks",
    ), 2),
    **dict.fromkeys((
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "index_n_heads",
        "swa_num_attention_heads", "conf_num_attention_heads", "linear_num_heads", "indexer_n_heads",
    ), _HEADS),
    **dict.fromkeys((
        "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "indexer_kv_heads",
        "num_global_key_value_heads",
    ), 2),
    **dict.fromkeys((
        "head_dim", "kv_channels", "dim_head", "d_head", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
        "attention_head_size", "attention_head_dim", "swa_head_dim", "index_head_dim", "global_head_dim",
        "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim", "swa_v_head_dim",
        "rotary_dim", "v_channels",
    ), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys((
        "vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input",
        "ngram_vocab_size_base", "encoder_hash_byte_group_vocab", "audio_vocab_size",
    ), _VOCABULARY),
    **dict.fromkeys((
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "seq_length",
        "max_source_positions", "max_target_positions", "original_max_position_embeddings", "position_embedding_size",
    ), 64),
    **dict.fromkeys((
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
    ), 4),
    **dict.fromkeys((
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "index_topk",
    ), 2),
    **dict.fromkeys((
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group", "n_groups",
        "mamba_n_groups", "mamba_ngroups", "first_k_dense_replace", "num_dense_layers", "o_groups",
        "num_nextn_predict_layers", "zero_expert_num", "num_mem_blocks", "num_group", "num_shared_expert",
    ), 1),
    "num_kv_shared_layers": 0,
    **dict.fromkeys((
        "q_lora_rank", "kv_lora_rank", "o_lora_rank", "state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head",
        "mamba_head_dim", "time_step_rank", "mamba_dt_rank", "hc_lowrank", "adapter_rank", "gated_norm_rank",
        "laurel_rank", "prompt_length", "sliding_window", "sliding_window_size", "window_size", "chunk_size",
        "mamba_chunk_size", "attention_chunk_size", "attention_window_size", "local_attention", "block_size",
    ), 8),
    "image_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 8,
    "attn_layer_period": 2,
    "expert_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
}  # fmt: skip
"""Name of a field -> its size. A field that is smaller already, or None, keeps its value."""
_LAYERS = tuple(name for name, size in _SIZES.items() if name.endswith(("layers", "layer", "depth")) and size == 2)
_ALTERNATIVES: Sequence[Sequence[Mapping[str, int]]] = (
    ({}, {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4}, {"num_hidden_layers": 6, "num_layers": 6}),
    ({}, {"head_dim": 16, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64}),
    ({}, {"num_key_value_heads": _HEADS}, {"num_heads": 8}),
    ({}, {_FILL: 1}),
)
"""Other sizes; all combinations are tried one after the other."""


@dataclass(frozen=True, slots=True)
class Species:
    """A configuration class of the zoo, as it is or with the other setting of tied embeddings."""

    model_type: str
    other_ties: bool = False

    def __str__(self) -> str:
        return f"{self.model_type}, other ties" if self.other_ties else self.model_type


def species() -> list[Species]:
    """Return every configuration class of a causal language model, and each a second time with other ties."""
    return [Species(kind, other) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for other in (False, True)]


def tiny_config(kind: Species) -> PretrainedConfig:
    """Return the configuration of the first size with which the model computes logits.

    Raises: the error of the first size, if no size does; NotTiedError if the model has no other ties.
    """
    errors: list[Exception] = []
    for parts in itertools.product(*_ALTERNATIVES):
        sizes = dict(ChainMap(*map(dict, parts), dict(_SIZES)))
        try:
            config = _shrunk(CONFIG_MAPPING[kind.model_type], sizes)
            ties = _try(config)
        except Exception as error:  # any size may be impossible for a model, in any way
            errors.append(error)
        else:
            return _with_other_ties(config, ties) if kind.other_ties else config
    raise errors[0]


class NotTiedError(Exception):
    """The setting of tied embeddings changes nothing in this model."""


def _with_other_ties(config: PretrainedConfig, ties: set[str]) -> PretrainedConfig:
    """Return the configuration with the other setting of tied embeddings. Raises: NotTiedError."""
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        part.tie_word_embeddings = not ties
    if _try(config) == ties:
        raise NotTiedError
    return config


def _try(config: PretrainedConfig) -> set[str]:
    """Build the model, run it once and return the names of tied parameters.

    Raises: any error of the model; ValueError if it is not tiny.
    """
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters")
    model = make(config)
    with torch.no_grad():
        logits = model(input_ids=tokens(config), use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ValueError("its logits are not finite")
    return set(model.all_tied_weights_keys)


def tokens(config: PretrainedConfig, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Return inputs without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, config.get_text_config().vocab_size - 8, (batch, SEQUENCE), generator=generator)


def _shrunk(kind: type[PretrainedConfig], sizes: Mapping[str, int]) -> PretrainedConfig:
    """Return a configuration whose fields, those of its parts included, have at most these sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**dict(_fields(kind(), sizes)))


def _fields(default: PretrainedConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) of everything that differs from the default."""
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    layers = _kept_layers(fields, sizes)
    vocabulary = min(fields["vocab_size"], _VOCABULARY) if isinstance(fields.get("vocab_size"), int) else _VOCABULARY
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            yield name, {"model_type": value.model_type, **dict(_fields(value, sizes))}
        elif name.endswith(("_token_id", "_token_index", "_index")) and isinstance(value, int):
            if value >= vocabulary:
                yield name, vocabulary - 1 - sum(map(ord, name)) % 6
        elif name == "is_decoder":
            yield name, True
        elif name == "layer_types" and value is None and _FILL in sizes:
            yield name, ["full_attention"] * sizes["num_hidden_layers"]
        elif name.endswith("_vocab_size") and isinstance(value, int):
            yield name, min(value, _VOCABULARY)
        elif name in _LAYERS and layers and isinstance(value, int):
            yield name, len(layers)
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool):
            yield name, min(value, sizes[name])
        elif name in sizes and value is None and _FILL in sizes:
            yield name, sizes[name]
        elif layers and _is_per_layer(value, fields):
            yield name, type(value)(value[i] for i in layers)
        elif layers and name.endswith("_layers") and isinstance(value, list):  # indices of layers
            yield name, [index for index in value if index < len(layers)]


def _is_per_layer(value: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a field has one entry per layer, and these are of few kinds (and no indices of layers)."""
    is_list = isinstance(value, (list, tuple)) and len(value) == _num_layers(fields) > 0
    return is_list and len(set(map(repr, value))) <= _KINDS


def _num_layers(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), -1)


def _kept_layers(fields: Mapping[str, Any], sizes: Mapping[str, int]) -> list[int]:
    """Return the indices of layers that are kept: one of each kind; empty if no field has a list of the layers."""
    num = _num_layers(fields)
    lists = [value for value in fields.values() if _is_per_layer(value, fields)]
    if not lists:
        return []
    first: dict[str, int] = {}
    for index, row in enumerate(zip(*lists, strict=True)):
        first.setdefault(repr(row), index)
    least = max(2, len(first), sizes["num_hidden_layers"] if sizes["num_hidden_layers"] > 2 else 0)
    more = [i for i in range(num) if i not in first.values()]
    return sorted([*first.values(), *more[: max(0, least - len(first))]])
