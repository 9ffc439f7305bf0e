"""Modules, parameters and rows of tables that are trained as copies; the module's own parameters stay the base.

Owns the copies and how modules compute with them, also modules that share a weight. Knows no fqns. converter.py has the
initial values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_ckpt.converters.lora.layers import LoRAEmbedding, Substituting, swap_class


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
    swap_class(module, TrainedCopy)
    module.trained = trained


class Copies(nn.Module):
    """Copies of some parameters of a module, by their names there; or rows of its weight, called `weight`."""

    def reset_parameters(self) -> None:
        """Fill with zeros, a finite placeholder; the real values come from the base after it is loaded."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class SomeCopied(Substituting):
    """A module that computes with copies of some of its parameters, `trained`, or of some rows of its weight."""

    copied_rows: tuple[int, ...]
    """Which rows of the weight `trained_rows` has; empty if it is not there."""

    def substitutes(self) -> dict[str, torch.Tensor]:
        """Return the copies, rounded to the base's dtypes, as an export writes them."""
        values = super().substitutes()
        copies = self._modules.get("trained")
        for name, copied in () if copies is None else copies.named_parameters():
            values[name] = copied.to(_dtype(self._parameters[name]))
        if self.copied_rows:
            table = values.get("weight", self._parameters["weight"])
            assert table is not None
            rows = self.get_parameter("trained_rows.weight").to(table.dtype)
            values["weight"] = table.index_copy(0, torch.tensor(self.copied_rows, device=table.device), rows)
        return values


class Follower(Substituting):
    """A linear module that shares the weight of a table, and computes with what became of it there."""

    leader: nn.Module
    """The table. It is no child of this module, so that its parameters have one name."""
    follows_adapter: bool

    def substitutes(self) -> dict[str, torch.Tensor]:
        """Return the copy of the table or the one with trained rows."""
        values = super().substitutes()
        if isinstance(self.leader, TrainedCopy):
            values["weight"] = self.leader.get_parameter("trained.weight").to(_dtype(self._parameters["weight"]))
        elif isinstance(self.leader, SomeCopied):
            values |= {name: value for name, value in self.leader.substitutes().items() if name == "weight"}
        return values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the low-rank path of the table, which is (B A)^T, to the module's own forward."""
        base: torch.Tensor = super().forward(x)
        if not (self.follows_adapter and isinstance(self.leader, LoRAEmbedding)):
            return base
        a, b = self.leader.lora_a.weight, self.leader.lora_b.weight
        low = F.linear(F.linear(x.to(b.dtype), b.t()), a.t()) * self.leader.adapter.scaling
        return (base + low).to(base.dtype)


def copy_parameters(module: nn.Module, names: Iterable[str], dtype: torch.dtype, *, trained: bool = True) -> None:
    """Let a module compute with copies of these parameters, in place. They have uninitialized values."""
    copies = Copies()
    for name in names:
        like = module.get_parameter(name)
        value = torch.empty_like(like, dtype=dtype if trained else like.dtype)
        copies.register_parameter(name, nn.Parameter(value, requires_grad=trained))
    _substituting(module).trained = copies


def copy_rows(module: nn.Module, rows: Sequence[int], dtype: torch.dtype) -> None:
    """Let a table compute with copies of these rows, in place. They have uninitialized values."""
    weight, copies = module.get_parameter("weight"), Copies()
    copies.weight = nn.Parameter(torch.empty(len(rows), *weight.shape[1:], device=weight.device, dtype=dtype))
    _substituting(module).trained_rows = copies
    vars(module)["copied_rows"] = tuple(rows)


def follow(module: nn.Module, leader: nn.Module, *, adapter: bool) -> None:
    """Let a linear module compute with the copy of a table that has its weight, in place, and its adapter if asked."""
    swap_class(module, Follower)
    vars(module).update(leader=leader, follows_adapter=adapter)


def _substituting(module: nn.Module) -> nn.Module:
    if not isinstance(module, SomeCopied):
        swap_class(module, SomeCopied)
        vars(module)["copied_rows"] = ()
    return module


def _dtype(parameter: nn.Parameter | None) -> torch.dtype:
    assert parameter is not None, "a copy is of a parameter"
    return parameter.dtype


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the module that shares its tensors and has no hooks: they run around the original."""
    twin: nn.Module = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name.startswith(("_forward_", "_backward_")):
            vars(twin)[name] = type(value)()
        else:
            vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    return twin
