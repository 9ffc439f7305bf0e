"""torchtitan's own LoRA: which keys of its model are adapters, how they merge, and their names in PEFT.

Owns the discovery of the adapted modules. The arithmetic and the names are those of converters/lora, whose tensors have
the same names. Source: torchtitan 0.3, components/lora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from titan_ckpt.converters import LoRAConfig, LoRAConverter
from titan_ckpt.converters.lora.sites import tied_modules
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, ConverterError
from titan_ckpt.geometry.chunks import dtype_name
from titan_ckpt.weights.lora import LoRARecord, common_settings
from titan_ckpt.weights.names import clean_fqn

_SCALING = "_lora_scaling"
"""Attribute of torchtitan's adapted modules: alpha / rank."""


def find_lora(model_parts: Sequence[nn.Module]) -> TorchtitanLoRA | None:
    """Return torchtitan's LoRA as a converter; None in a model without it. Collective: stages hold parts of a model.

    Raises: ConfigError if the ranks disagree on the adapter of a module.
    """
    line = Coordinator.current()
    of_ranks = line.gather_distinct("torchtitan-lora", lambda: {"adapted": _adapted(model_parts)})["adapted"].values()
    adapted = {fqn: values for of_rank in of_ranks for fqn, values in of_rank.items()}
    if not adapted:
        return None
    if differing := [f for f, values in adapted.items() if any(r.get(f, values) != values for r in of_ranks)]:
        raise ConfigError([f"LoRA: the ranks disagree on the adapter of {fqn}" for fqn in differing])
    own = [clean_fqn(name) for part in model_parts for name in part.state_dict()]
    names = line.gather_distinct("torchtitan-names", lambda: {"names": own})["names"].values()
    return TorchtitanLoRA(adapted, [*dict.fromkeys(name for of_rank in names for name in of_rank)])


def is_adapted(module: nn.Module) -> bool:
    """Return whether this is a module with torchtitan's adapter."""
    return hasattr(module, _SCALING)


def _adapted(model_parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the adapted modules of this rank: fqn -> rank, scaling, whether its weight is tied, dtype."""
    found: dict[str, Any] = {}
    for part in model_parts:
        modules: list[tuple[str, Any]] = [(name, m) for name, m in part.named_modules() if is_adapted(m)]
        tied = tied_modules(part) if modules else ()
        for name, module in modules:
            fqn, dtype = clean_fqn(name), dtype_name(module.lora_a.weight.dtype)
            found[fqn] = [module.lora_a.out_features, getattr(module, _SCALING), fqn in tied, dtype]
    return found


class TorchtitanLoRA(LoRAConverter):
    """The adapters that torchtitan's LoRAConverter has put into a model."""

    def __init__(self, adapted: Mapping[str, Sequence[Any]], names: Sequence[str]) -> None:
        """Keep what `find_lora` found. `names`: those of the model's state dict."""
        updates = {  # with alpha without the error of its division by the rank
            fqn: LoRARecord(rank, float(f"{rank * scaling:.12g}"), False, False, {}, {}).low_rank(fqn)
            for fqn, (rank, scaling, *_) in adapted.items()
        }
        super().__init__(
            LoRAConfig(
                target_modules=tuple(dict.fromkeys(map(over_layers, updates))),
                dtype=next(iter(adapted.values()))[3],
                **common_settings([*updates.values()]),
            )
        )
        self.adapted = {fqn: replace(update, scaling=adapted[fqn][1]) for fqn, update in updates.items()}
        self.tied = {fqn for fqn, (_, _, tied, _) in adapted.items() if tied}
        self._owned = {name for update in updates.values() for name in update.tensors}
        hidden = {update.weight for update in updates.values()} | self._owned
        self.others = [name for name in names if name not in hidden]

    def convert(self, model: nn.Module) -> None:
        """Refuse: torchtitan has converted the model's config. Raises: ConverterError."""
        raise ConverterError("torchtitan's LoRAConverter has converted this model already")

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        """Leave the values that torchtitan's init_states() has drawn: A at random, B zero."""


def over_layers(fqn: str) -> str:
    """Return a name as a pattern over the layers."""
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))
