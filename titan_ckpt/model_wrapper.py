"""ModelWrapper: model parts and converter hooks as one state dict, in a mode. Knows no files and no steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titan_ckpt.errors import ConverterError
from titan_ckpt.types import ModelHooks, StateDict, StateDictMode

_WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def clean_fqn(name: str) -> str:
    """Drop the segments that activation checkpointing, torch.compile and FSDP put into parameter names."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


class ModelWrapper:
    """One or more model parts (pipeline stages, or one module) seen as a single state dict.

    Nothing is cached but names: every value aliases the live parameter, so its storage is stable between saves as long
    as the model keeps its parameters.
    """

    def __init__(self, model_parts: Sequence[nn.Module], hooks: ModelHooks | None = None) -> None:
        self.parts = [p.module if isinstance(p, DistributedDataParallel) else p for p in model_parts]
        self.hooks = hooks
        self.tied = _tied_names(self.parts)
        """alias -> the fqn that is saved for it."""

    def state_dict(self, mode: StateDictMode = "full", last_step: bool = False) -> StateDict:
        """Return fqn -> tensor, in the order of the modules; tied aliases appear once, under their first name.

        full: everything persistent. base: without converter-owned keys. export: what the outside world should see,
        after the converters' last-step transforms; its values may be lazy. Collective where a converter's transform is.
        """
        tensors = {fqn: value for fqn, value in self._entries() if isinstance(value, torch.Tensor)}
        if self.hooks is not None:
            tensors = self.hooks.state_dict_transform(tensors, last_step=last_step or mode == "export")
        if mode == "base":
            return {fqn: value for fqn, value in tensors.items() if not self.owns(fqn)}
        return tensors

    def owned_state_dict(self) -> StateDict:
        """Return the converter-owned part of `full`: what an adapter-only checkpoint holds."""
        return {fqn: value for fqn, value in self.state_dict("full").items() if self.owns(fqn)}

    def owns(self, fqn: str) -> bool:
        """Say whether a converter owns this key."""
        return self.hooks is not None and self.hooks.key_filter(fqn)

    def extra_state(self) -> dict[str, Any]:
        """Return what modules keep beside tensors (`get_extra_state`), by fqn."""
        return {fqn: value for fqn, value in self._entries() if not isinstance(value, torch.Tensor)}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Give modules back what `extra_state` returned."""
        for part in self.parts:
            for name, module in part.named_modules():
                key = clean_fqn(f"{name}._extra_state" if name else "_extra_state")
                if key in extra:
                    module.set_extra_state(extra[key])

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return each live parameter's fqn (its first name, when tied)."""
        names: dict[nn.Parameter, str] = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                names.setdefault(parameter, clean_fqn(name))
        return names

    def _entries(self) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for part in self.parts:
            for name, value in part.state_dict().items():
                fqn = clean_fqn(name)
                if fqn in self.tied:
                    continue
                if fqn in seen:
                    raise ConverterError(f"two model parts both hold {fqn!r}: their parameter names must be disjoint")
                seen.add(fqn)
                yield fqn, value


def _tied_names(parts: Sequence[nn.Module]) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for part in parts:
        named = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
        for name, value in named:
            fqn = clean_fqn(name)
            owner = first.setdefault(id(value), fqn)
            if owner != fqn:
                tied[fqn] = owner
    return tied
