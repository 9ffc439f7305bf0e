"""The modules that LoRA puts in the place of others, by class swap: every base parameter keeps its name.

Owns the forward computation of adapted modules, and how a module becomes one. Knows no names and no state dicts.
Initial values are in lora_init.py.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import skip_init

from converters.lora_merge import spread
from converters.qat import QuantisedForward


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one module is given."""

    rank: int
    scaling: float
    dropout: float
    dora: bool
    dtype: torch.dtype
    rows: tuple[int, ...] = ()
    """A fused weight's parts; see lora_merge.AdaptedWeight."""


class LoRAUp(nn.Linear):
    """B: starts at zero, so that a fresh adapter changes nothing. Shape: weight (out_features, rank)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Magnitude(nn.Module):
    """DoRA's trained length of every output row. Shape: weight (out_features,)."""

    def __init__(self, num_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Fill with ones, a finite placeholder: the right values are the base weight's, once it is there."""
        nn.init.ones_(self.weight)


class LoRALinear(nn.Linear):
    """A linear module, or a subclass of one, with a low-rank path beside its own.

    `super().forward` is that of the class it was before, so quantised and float8 modules keep their computation.
    """

    adapter: Adapter
    lora_a: nn.Linear
    lora_b: LoRAUp

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name is torch's
        """Compute both paths, the low-rank one in its own dtype; the result has the base's."""
        base: torch.Tensor = super().forward(input)
        dropped = F.dropout(input, self.adapter.dropout, self.training)
        inner = self.lora_a(dropped.to(self.lora_a.weight.dtype))
        rows = self.adapter.rows
        low = F.linear(inner, spread(self.lora_b.weight, rows)) if rows else self.lora_b(inner)
        low = low * self.adapter.scaling
        if not self.adapter.dora:
            return (base + low).to(base.dtype)
        factor = self.magnitude / self._row_norms()
        # dropout applies to the adapter's share of the base product too; Source: peft, tuners/lora/dora.py
        plain: torch.Tensor = super().forward(dropped) if self.training and self.adapter.dropout else base
        if self.bias is not None:
            plain = plain - self.bias
        return (base + (factor - 1) * plain + factor * low).to(base.dtype)

    @property
    def magnitude(self) -> torch.Tensor:
        """DoRA's trained row lengths."""
        return child_weight(self, "lora_magnitude")

    def merged_weight(self) -> torch.Tensor:
        """Return the weight that base and adapter make together, differentiable in the adapter, in the base's dtype."""
        merged = self._combined()
        if self.adapter.dora:
            norms = torch.linalg.vector_norm(merged.detach(), dim=1)
            merged = merged * (self.magnitude / norms)[:, None]
        return merged.to(self.weight.dtype)

    @torch.no_grad()
    def _row_norms(self) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(self._combined(), dim=1)
        return norms

    def _combined(self) -> torch.Tensor:
        b = spread(self.lora_b.weight, self.adapter.rows)
        return combine(self.weight, self.lora_a.weight, b, self.adapter.scaling)


class QuantisedLoRALinear(LoRALinear):
    """An adapter on a fake-quantised linear: what is quantised is the merged weight, as it will be exported.

    To quantise the base alone and add the adapter in high precision trains another model than the one that is exported.
    """

    quantised: QuantisedForward
    """An attribute of the instance, so it is not bound."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.quantised(self, input, self.merged_weight())


class LoRAEmbedding(nn.Embedding):
    """An embedding with a low-rank table beside its own. A is (rank, num_embeddings), B (embedding_dim, rank)."""

    adapter: Adapter
    lora_a: nn.Linear
    lora_b: nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Shape: token ids in, (..., embedding_dim) out."""
        base = super().forward(input)
        inner = F.embedding(input, self.lora_a.weight.t())
        if isinstance(inner, DTensor):  # cut by rows it is a masked sum, which nothing but a reduction understands
            inner = inner.redistribute(placements=[Replicate()] * inner.device_mesh.ndim)
        low = F.linear(inner, self.lora_b.weight)
        out: torch.Tensor = (base + low * self.adapter.scaling).to(base.dtype)
        return out


class StackAdapter(nn.Module):
    """A and B of every expert of a stack. Shape: (experts, rank, d2) and (experts, d1, rank) for (experts, d1, d2)."""

    def __init__(self, weight: torch.Tensor, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        num, d1, d2 = weight.shape
        self.lora_a = nn.Parameter(torch.empty(num, rank, d2, device=weight.device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(num, d1, rank, device=weight.device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw every expert's A like a linear module's; B starts at zero."""
        nn.init.uniform_(self.lora_a, -1 / math.sqrt(self.lora_a.shape[-1]), 1 / math.sqrt(self.lora_a.shape[-1]))
        nn.init.zeros_(self.lora_b)


class AdaptedStacks(nn.Module):
    """A module of stacked experts' weights, which computes with the merged ones.

    What it does with its stacks is its own, so they are merged before each forward: memory of one layer's stacks.
    """

    adapters: dict[str, Adapter]
    """By name of the parameter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with the merged stacks in place of its parameters."""
        merged = {name: self._merged(name, adapter) for name, adapter in self.adapters.items()}
        # an attribute of the instance hides the registered parameter from `self.name`, and from nothing else
        self.__dict__.update(merged)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in merged:
                del self.__dict__[name]

    def _merged(self, name: str, adapter: Adapter) -> torch.Tensor:
        weight, factors = self._parameters[name], self.get_submodule(f"lora_{name}")
        assert weight is not None and isinstance(factors, StackAdapter)
        return combine(weight, factors.lora_a, factors.lora_b, adapter.scaling).to(weight.dtype)


class TrainedCopy(nn.Module):
    """A module that is trained in full as a copy, `trained`, while its own parameters stay the frozen base's."""

    trained: nn.Module

    def forward(self, *args: Any) -> torch.Tensor:
        """Compute with the copy, in its dtype; the result has the base's."""
        trained = next(self.trained.parameters()).dtype
        cast = [a.to(trained) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        out: torch.Tensor = self.trained(*cast)
        return out.to(next(self.parameters(recurse=False)).dtype)


def combine(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return b @ a * scaling + weight in float32, or in float64 for such a weight.

    The same operations in the same order as converters/lora_merge.py, so that what was trained is what is exported.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return (b.to(dtype) @ a.to(dtype)) * scaling + weight


def attach(module: nn.Module, adapter: Adapter, quantised: QuantisedForward | None) -> None:
    """Turn the module into its adapted form, in place, with untrained adapters on the same device."""
    assert isinstance(module, nn.Linear | nn.Embedding)
    where: dict[str, Any] = {"device": module.weight.device, "dtype": adapter.dtype}
    embedding = isinstance(module, nn.Embedding)
    num_out, num_in = module.weight.shape[::-1] if embedding else module.weight.shape
    linear = LoRALinear if quantised is None else QuantisedLoRALinear
    base: Any = type(module)
    module.__class__ = _mixed(LoRAEmbedding if embedding else linear, base)
    # skip_init: what is drawn here would be overwritten, and would move the run's generator
    module.lora_a = skip_init(nn.Linear, num_in, adapter.rank * max(1, len(adapter.rows)), bias=False, **where)
    up = nn.Linear if embedding else LoRAUp
    module.lora_b = skip_init(up, adapter.rank, num_out, bias=False, **where)
    if adapter.dora:
        module.lora_magnitude = Magnitude(num_out, **where)
    if quantised is not None:
        module.quantised = quantised  # type: ignore[assignment]
    module.adapter = adapter  # type: ignore[assignment]


def attach_to_stack(module: nn.Module, name: str, adapter: Adapter) -> None:
    """Put an adapter beside a parameter of stacked experts, in place."""
    if not isinstance(module, AdaptedStacks):
        base: Any = type(module)
        module.__class__ = _mixed(AdaptedStacks, base)
        module.__dict__["adapters"] = {}
    assert isinstance(module, AdaptedStacks)
    module.adapters[name] = adapter
    module.add_module(f"lora_{name}", StackAdapter(module.get_parameter(name), adapter.rank, adapter.dtype))


def attach_copy(module: nn.Module, dtype: torch.dtype) -> None:
    """Turn a leaf module into one that computes with a trained copy of itself, in place."""
    trained = copy.deepcopy(module).to(dtype).requires_grad_(True)
    base: Any = type(module)
    module.__class__ = _mixed(TrainedCopy, base)
    module.trained = trained


@cache
def _mixed(kind: Any, base: Any) -> type[Any]:
    """Return the class whose `super().forward` is `base`'s."""
    return kind if base in kind.__mro__ else type(f"{kind.__name__}_{base.__name__}", (kind, base), {})


def child_weight(module: nn.Module, child: str) -> torch.Tensor:
    """Return the weight of a module that an adapter added."""
    weight = module.get_submodule(child).weight
    assert isinstance(weight, torch.Tensor)
    return weight
