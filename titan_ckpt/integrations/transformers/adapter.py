"""The two parts of a PEFT model: what a run changes, which is saved, and the base, of which a digest is saved.

A run therefore never resumes an adapter on another base, and no save holds the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.weights.identity import check_base, identify_base
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper


def is_adapter_model(model: Any) -> bool:
    """Return whether PEFT has wrapped the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_part(model: nn.Module) -> nn.Module:
    """Return a module with the trained parameters and all persistent buffers, by their names in the model."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return _tree(trained | ModelWrapper([model]).buffers())


class BaseWeights:
    """The frozen parameters under an adapter, as a Stateful that holds their digest."""

    def __init__(self, model: nn.Module) -> None:
        """Digest the frozen parameters. Collective; reads each weight once."""
        frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
        origin = {"path": getattr(getattr(model, "config", None), "name_or_path", None)}
        self._identity = identify_base(ModelWrapper([_tree(frozen)]), origin, Coordinator.current())

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the base."""
        return dict(self._identity)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the base with that of the checkpoint. Raises: BaseMismatchError."""
        check_base(self._identity, state_dict, "the adapter in the checkpoint")


def _tree(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return nested modules that hold these tensors by these names."""
    root = nn.Module()
    for name, value in tensors.items():
        *path, last = clean_fqn(name).split(".")
        module = root
        for part in path:
            if part not in module._modules:  # noqa: SLF001 - get_submodule would find attributes too
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(value, nn.Parameter):
            module.register_parameter(last, value)
        else:
            module.register_buffer(last, value)
    return root
