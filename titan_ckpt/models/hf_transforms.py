"""The names and the config files with which the user's own model of transformers is read and exported.

hf_keys.py finds the table of names. Nothing is built, loaded or imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_ckpt.errors import ConfigError, KeyMapError
from titan_ckpt.models.config import written_config
from titan_ckpt.models.hf_keys import find_key_map
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import unwrapped


def transforms_of(model: nn.Module) -> StateDictTransforms:
    """Return what StateDictTransforms.from_transformers returns. Reads no values. Raises: ConfigError; KeyMapError."""
    inner: Any = unwrapped(model)
    what = f"{type(inner).__module__}.{type(inner).__qualname__}"
    if hasattr(inner, "peft_config"):
        next_step = (
            "merge them (merge_and_unload) and export that model, or let PEFT write the adapter (save_pretrained)"
        )
        raise ConfigError(
            [f"{what} has adapters of PEFT, which a folder of the whole model does not have: {next_step}"]
        )
    if not _is_pretrained(inner):
        next_step = "give StateDictTransforms its key_map and hf_config"
        raise ConfigError([f"{what} is no PreTrainedModel of transformers: {next_step}"])
    if getattr(inner, "hf_quantizer", None) is not None:
        next_step = "load the model without quantization_config to export it"
        raise ConfigError([f"{what} has weights that transformers has quantized: {next_step}"])
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    is_tied = getattr(inner.config, "tie_word_embeddings", False)  # models without tokens have no such setting
    ties = getattr(inner, "all_tied_weights_keys", None) if is_tied else None
    for key, other in (ties or {}).items():
        if key in parameters and other in parameters and parameters[key] is not parameters[other]:
            next_step = "set model.config.tie_word_embeddings = False, or tie them again (model.tie_weights())"
            raise ConfigError([f"{what} has {key} of its own, and its config ties it to {other}: {next_step}"])
    config = written_config(inner.config, _architecture(inner))
    settings = inner.generation_config if inner.can_generate() else None
    generation = None if settings is None else json.loads(settings.to_json_string())
    return StateDictTransforms(find_key_map(inner), config, generation_config=generation)


def transforms_for(parts: Sequence[nn.Module], *, exports: bool) -> StateDictTransforms:
    """Return the same for the parts of a run's model; names that are equal in memory and in files for any other model.

    `exports`: the run needs them. Raises: ConfigError and KeyMapError, if it does.
    """
    if len(parts) == 1 and _is_pretrained(unwrapped(parts[0])):
        try:
            return transforms_of(parts[0])
        except (ConfigError, KeyMapError):
            if exports:
                raise
    return StateDictTransforms()


def _is_pretrained(model: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _architecture(model: Any) -> str:
    """Return the name of the class that opens the model, as save_pretrained writes it: transformers' own if it can."""
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, base) and not issubclass(kind, FSDPModule)]
    kinds = [kind for kind in kinds if not kind.__name__.endswith("PreTrainedModel")]  # as the bases of a family
    own = [kind for kind in kinds if kind.__module__.startswith("transformers.models.")]
    if kinds[0] not in own and (named := model.config.architectures):
        return str(named[0])
    return [*own, kinds[0]][0].__name__
