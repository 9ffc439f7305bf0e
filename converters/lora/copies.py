"""Modules that are trained in full: each computes with a trained copy of itself, and its own parameters stay the base.

Owns the copies and how they compute. Knows no fqns. init.py has the initial values.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from titan_ckpt.converters.lora.layers import mixed


class TrainedCopy(nn.Module):
    """A module that computes with a copy, `trained`; its own parameters are the frozen base."""

    trained: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy's own forward with its parameters rounded to the base's dtypes, as an export writes them."""
        own = self._parameters
        rounded = {
            name: parameter.to(base.dtype)
            for name, parameter in self.trained.named_parameters(recurse=False)
            if (base := own[name]) is not None and base.dtype != parameter.dtype
        }
        if not rounded:
            return self.trained(*args, **kwargs)
        return torch.func.functional_call(self.trained, rounded, args, kwargs)


def attach_copy(module: nn.Module, dtype: torch.dtype) -> None:
    """Turn a leaf module into one that computes with a trained copy of itself, in place. Parameters get `dtype`."""
    trained = copy.deepcopy(without_hooks(module))
    for name, parameter in trained.named_parameters(recurse=False):
        if parameter.is_floating_point():
            setattr(trained, name, nn.Parameter(parameter.detach().to(dtype)))
    base: Any = type(module)
    module.__class__ = mixed(TrainedCopy, base)
    module.trained = trained


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the module that shares its tensors and has no hooks: they run around the original."""
    twin: nn.Module = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name.startswith(("_forward_", "_backward_")):
            vars(twin)[name] = type(value)()
        else:
            vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    return twin
