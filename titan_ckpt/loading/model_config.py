"""Whether the config.json of a Hugging Face folder describes the model of this run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.loading.plan import LoadSource

logger = logging.getLogger(__name__)
_OF_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings of a config.json that a model must share with the folder it loads."""
_OF_VALUES = ("rms_norm_eps", "hidden_act", "num_experts_per_tok", "norm_topk_prob")
"""Settings with which the same weights compute different values."""


def check_model_config(source: LoadSource, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise if a folder's config.json describes a different model than this run's, which shapes cannot show.

    The number of heads, for example, decides how the rows of a weight are arranged. Settings that a run may change on
    purpose, such as the rotary base, are only logged.
    Raises: LoadMismatchError with both values.
    """
    theirs, ours = _settings(theirs), _settings(ours)
    if source.initialize or source.ignore:  # layers may be new or dropped, and each of their tensors has to be named
        del ours["num_hidden_layers"]
    both = [key for key in ours if ours[key] is not None and theirs.get(key) is not None]
    differing = {key: f"{key}: {theirs[key]} there, {ours[key]} here" for key in both if ours[key] != theirs[key]}
    if faults := [line for key, line in differing.items() if key in _OF_SHAPE]:
        raise LoadMismatchError(
            f"{source.path}: its config.json describes another model than this run's; nothing was loaded\n  "
            + "\n  ".join(faults)
            + "\n  Take the model's shape from that folder, or restore its config.json"
        )
    if differing:
        logger.warning("load: %s has another config.json than this run: %s", source.path, "; ".join(differing.values()))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are compared; one that a config.json does not have is absent or None."""
    settings = {key: config.get(key) for key in (*_OF_SHAPE, *_OF_VALUES)}
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, Mapping) or any(isinstance(value, Mapping) for value in rotary.values()):
        return settings  # each kind of layer has its own, which transformers 4 spelled in many ways
    if rotary or "rope_theta" in config:
        settings |= {"rope_theta": config.get("rope_theta"), "rope_type": rotary.get("type", "default"), **rotary}
    return settings
