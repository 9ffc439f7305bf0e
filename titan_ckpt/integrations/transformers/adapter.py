"""The two parts of a PEFT model: the adapters, which are saved, and the frozen base, of which a digest is saved.

A run therefore never resumes an adapter on another base, and no save holds the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from titan_ckpt.components.known.switches import is_of_peft
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import SaveError, listed
from titan_ckpt.weights.identity import check_base, identify_base
from titan_ckpt.weights.live_memory import Watched
from titan_ckpt.weights.names import clean_fqn
from titan_ckpt.weights.wrapper import ModelWrapper


def is_adapter_model(model: Any) -> bool:
    """Return whether PEFT has wrapped the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def saves_adapter_alone(model: Any, config: CheckpointConfig) -> bool:
    """Return whether steps hold the adapter of a model and not its base."""
    return is_adapter_model(model) and not (config.save is not None and config.save.include_base)


_TO_THE_BASE = frozenset({"base_layer", "base_model", "lora_model", "model", "original_module"})
"""Attributes of PEFT's modules that lead to what they adapt."""
_REPEATED = frozenset({True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "olora"})
"""Values of init_lora_weights with which a new process has the same base again."""


def adapter_part(model: nn.Module) -> nn.Module:
    """Return a module with the adapters, frozen ones too, whatever else is trained, and all persistent buffers."""
    base = frozen_base(model)
    return _tree({n: p for n, p in model.named_parameters() if n not in base} | ModelWrapper([model]).buffers())


def frozen_base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters that are no part of an adapter, by their names in the model."""
    of_peft = {name for name, module in model.named_modules() if is_of_peft(module)}
    return {n: p for n, p in model.named_parameters() if not p.requires_grad and _is_of_base(n, of_peft)}


def _is_of_base(name: str, of_peft: set[str]) -> bool:
    """Return whether the innermost module of PEFT that holds a parameter leads by it to what it adapts."""
    parts = name.split(".")
    depth = next((i for i in range(len(parts) - 1, -1, -1) if ".".join(parts[:i]) in of_peft), None)
    return depth is None or parts[depth] in _TO_THE_BASE


def needs_base(model: Any, optimizer: Any) -> Iterator[str]:
    """Yield one line for each reason why steps without the base are not enough. `optimizer`: None before it is made."""
    with_base = "save the base too, SaveConfig(include_base=True)"
    groups = optimizer.param_groups if optimizer is not None else []
    if {id(p) for p in frozen_base(model).values()} & {id(p) for group in groups for p in group["params"]}:
        yield f"optimizer {type(optimizer).__qualname__}: its groups have frozen parameters of the base: {with_base}"
    for name, config in model.peft_config.items():
        init = getattr(config, "init_lora_weights", True)
        if init not in _REPEATED:
            yield (
                f"adapter {name!r}: init_lora_weights={init!r} changes the base at the start, and a new process would "
                f"change it otherwise: {with_base}"
            )


class _Merged(list[str]):
    """PEFT's list of the adapters that are in a weight now, which also knows whether there ever was one."""

    ever = False

    def append(self, name: str) -> None:
        self.ever = True
        super().append(name)

    def __reduce_ex__(self, _: Any) -> Any:
        return list, ([*self],)  # a copy of the model has a plain list


class BaseWeights:
    """The frozen parameters under an adapter, as a Stateful that holds their digest."""

    def __init__(self, model: nn.Module) -> None:
        """Digest the frozen parameters. Collective; reads each weight once."""
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "merged_adapters")]
        for layer in self._layers:
            layer.merged_adapters = _Merged(layer.merged_adapters)
        # its forward pass puts the adapter on a parameter, and the same value back
        wrappers = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
        wrapped = {id(p) for module in wrappers for p in module.parameters()}
        self._watched = Watched({n: p for n, p in frozen_base(model).items() if id(p) not in wrapped})
        origin = {"path": getattr(getattr(model, "config", None), "name_or_path", None)}
        self._identity = identify_base(ModelWrapper([_tree(frozen_base(model))]), origin, Coordinator.current())

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the base. Raises: SaveError for a base that has changed since it was digested."""
        change = f"{listed(names)} changed" if (names := self._watched.changed()) else ""
        if any(getattr(layer.merged_adapters, "ever", True) for layer in self._layers):
            change = "adapters were merged into it, and unmerge_adapter() leaves rounding errors"
        if change:
            raise SaveError(
                f"the base is no longer that of the start: {change}. A step of the adapters alone cannot hold that: "
                "save the base too, SaveConfig(include_base=True), or merge into a copy of the model"
            )
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
