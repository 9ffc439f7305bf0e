"""Tiny models of transformers that are no causal language models, by the task that people train them for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
_IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_PAIR: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
}  # fmt: skip

TASKS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "vision-language": (
        "llava",
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **_IMAGES},
            "text_config": {"model_type": "llama", **_TEXT},
            "image_token_index": 63,
            "vision_feature_layer": -1,
        },
    ),
    "encoder-decoder": ("t5", "T5ForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    }),
    "translation": ("marian", "MarianMTModel", {**_PAIR, "max_position_embeddings": 64}),
    "speech to text": ("whisper", "WhisperForConditionalGeneration", {
        **_PAIR, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
    }),
    "speech": ("wav2vec2", "Wav2Vec2ForCTC", _SOUND),
    "images": ("vit", "ViTForImageClassification", _IMAGES),
    "classification": ("llama", "LlamaForSequenceClassification", {**_TEXT, "pad_token_id": 0}),
    "tokens": ("bert", "BertForTokenClassification", _TEXT),
}  # fmt: skip
"""Task -> (model_type, class, settings)."""

_TOKENS = torch.tensor([[5, 63, 63, 63, 63, 7, 9, 8], [3, 63, 63, 63, 63, 2, 4, 6]])
_INPUTS: Mapping[str, Callable[[], dict[str, torch.Tensor]]] = {
    "llava": lambda: {"input_ids": _TOKENS, "pixel_values": _drawn(2, 3, 16, 16)},
    "t5": lambda: {"input_ids": _TOKENS, "decoder_input_ids": _TOKENS},
    "marian": lambda: {"input_ids": _TOKENS, "decoder_input_ids": _TOKENS},
    "whisper": lambda: {"input_features": _drawn(2, 8, 32), "decoder_input_ids": _TOKENS},
    "wav2vec2": lambda: {"input_values": _drawn(2, 400)},
    "vit": lambda: {"pixel_values": _drawn(2, 3, 16, 16)},
}


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def made(task: str, seed: int = 0) -> Any:
    """Return a model with random values, of which none that is trained is at its initial value."""
    kind, name, settings = TASKS[task]
    torch.manual_seed(seed)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # Marian computes its positions
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def logits(model: Any) -> torch.Tensor:
    """Return the logits of fixed inputs, with dropout if the model trains."""
    inputs = _INPUTS.get(model.config.model_type, lambda: {"input_ids": _TOKENS})
    found: torch.Tensor = model(**inputs()).logits
    return found


@torch.no_grad()
def evaluated(model: Any) -> torch.Tensor:
    """Return the same without dropout."""
    return logits(model.eval())
