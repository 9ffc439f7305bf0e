"""The converters of a model that torchtitan's Trainer has built: torchtitan's own LoRA, or those of this package."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from titan_ckpt.converters import LoRAConverter, ModelConverters
from titan_ckpt.integrations.torchtitan.converters import converters_of
from titan_ckpt.integrations.torchtitan.lora import find_lora
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper


def find_hooks(model_parts: Sequence[nn.Module]) -> ModelConverters | None:
    """Return the converters that changed the model; None without any. Collective.

    Raises: ConfigError; ConverterError if both have put LoRA into it.
    """
    own, lora = converters_of(model_parts), find_lora(model_parts)
    return own if lora is None else ModelConverters([*(own or ()), lora])


def adapted_modules(hooks: ModelConverters | None) -> dict[str, bool]:
    """Return fqn -> whether its weight is tied, of each module with an adapter."""
    converters = [converter for converter in hooks or () if isinstance(converter, LoRAConverter)]
    return {fqn: fqn in converter.tied for converter in converters for fqn in converter.adapted}


def trained_beside_adapters(model_parts: Sequence[nn.Module], hooks: ModelConverters | None) -> list[str]:
    """Return the parameters that are trained and that no adapter owns; none for a model without adapters."""
    if not adapted_modules(hooks):
        return []
    wrapper = ModelWrapper(model_parts, hooks)
    trained = (clean_fqn(name) for part in model_parts for name, p in part.named_parameters() if p.requires_grad)
    return [fqn for fqn in trained if not wrapper.owns(fqn)]
