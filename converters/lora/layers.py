"""Adapted modules, made by swapping a module's class: every base parameter keeps its name.

Owns the forward computation of adapted modules and their construction. Knows no fqns and no state dicts.
converter.py has the initial values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titan_ckpt.converters.qat.converter import QuantizedForward
from titan_ckpt.weights.low_rank import LowRank, spread


class Factor(nn.Module):
    """Matrix A or B, or DoRA's trained norm of every output row, which multiplies nothing by itself.

    It is no nn.Linear, so that a model's own initialization leaves it as it is.
    """

    bias: nn.Parameter | None

    def __init__(self, *shape: int, start: float | None = None, bias: bool = False, **where: Any) -> None:
        """`start`: the first value of all elements; None: they are drawn as for a linear module."""
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(shape, **where))
        self.bias = nn.Parameter(torch.empty(shape[0], **where)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight and add the bias. Shape: (..., num_in) in, (..., num_out) out."""
        return F.linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Fill with finite values; DoRA's norms come from the base weight after it is loaded."""
        if self.start is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        else:
            nn.init.constant_(self.weight, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LowRankPath(nn.Module):
    """A linear module of any class, GPT-2's Conv1D too, with an additional low-rank path.

    `super().forward` is the forward of the module's original class, so float8 modules keep their computation.
    """

    weight: torch.Tensor
    bias: nn.Parameter
    adapter: LowRank
    lora_dropout: float
    lora_a: Factor
    lora_b: Factor
    lora_magnitude: Factor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name is torch's
        """Add both paths. The low-rank path computes in the adapter's dtype; the result has the base's dtype."""
        base: torch.Tensor = super().forward(input)
        dropped = F.dropout(input, self.lora_dropout, self.training)
        inner = self.lora_a(dropped.to(self.lora_a.weight.dtype))
        rows = self.adapter.rows
        low = F.linear(inner, spread(self.lora_b.weight, rows), self.lora_b.bias) if rows else self.lora_b(inner)
        low = low * self.adapter.scaling
        if self.adapter.magnitude is None:
            return (base + low).to(base.dtype)
        with torch.no_grad():
            combined = self._combined()
        factor = self._growth(combined)
        # dropout also applies to the adapter's share of the base product. Source: peft, tuners/lora/dora.py
        plain: torch.Tensor = super().forward(dropped) if self.training and self.lora_dropout else base
        if self.bias is not None:
            plain = plain - self.bias
        return (base + (factor - 1) * plain + factor * low).to(base.dtype)

    def merged_weight(self) -> torch.Tensor:
        """Return the merged weight of a linear module in the base's dtype, differentiable in the adapter."""
        merged = self._combined()
        if self.adapter.magnitude is not None:
            merged = merged * self._growth(merged)[:, None]
        return merged.to(self.weight.dtype)

    def _combined(self) -> torch.Tensor:
        return self.adapter.combined(self.weight, *self.adapter.factors(self.lora_a.weight, self.lora_b.weight))

    def _growth(self, combined: torch.Tensor) -> torch.Tensor:
        """Return the factor that gives every output row DoRA's trained norm."""
        norms: torch.Tensor = torch.linalg.vector_norm(combined.detach(), dim=int(not self.adapter.transposed))
        return self.lora_magnitude.weight / norms  # a tensor that functional_call may have put there


class LoRALinear(LowRankPath, nn.Linear):
    """A subclass of nn.Linear with a low-rank path."""


class QuantizedLoRALinear(LoRALinear):
    """An adapter on a fake-quantized linear module. It fake-quantizes the merged weight, because that is exported.

    Quantizing only the base and adding the adapter in high precision would train a different model.
    """

    quantized: QuantizedForward
    """Set on the instance, so that it is not bound as a method."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.quantized(self, input, self.merged_weight())


class LoRAEmbedding(nn.Embedding):
    """An embedding with an additional low-rank table. A is (rank, num_embeddings), B (embedding_dim, rank)."""

    adapter: LowRank
    lora_scaled_by: str
    """Attribute by which the module's own forward multiplies what it looks up; see proof.py."""
    lora_a: Factor
    lora_b: Factor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Shape: token ids in, (..., embedding_dim) out."""
        base = super().forward(input)
        inner = F.embedding(input, self.lora_a.weight.t())
        if isinstance(inner, DTensor):  # A sharded by columns gives a masked partial sum, which must be reduced
            inner = inner.redistribute(placements=[Replicate()] * inner.device_mesh.ndim)
        low = F.linear(inner, self.lora_b.weight) * self.adapter.scaling
        if self.lora_scaled_by:
            scale = getattr(self, self.lora_scaled_by)
            # transformers rounds a tensor to the table's dtype, and multiplies by a float as it is
            low = low * (scale.to(self.weight.dtype) if isinstance(scale, torch.Tensor) else scale)
        out: torch.Tensor = (base + low).to(base.dtype)
        return out


class StackAdapter(nn.Module):
    """A and B of all experts. Shape: (experts, rank, d2) and (experts, d1, rank) for a weight (experts, d1, d2)."""

    def __init__(self, weight: torch.Tensor, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        num, d1, d2 = weight.shape
        self.lora_a = nn.Parameter(torch.empty(num, rank, d2, device=weight.device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(num, d1, rank, device=weight.device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw every expert's A as for a linear module, and set B to zero."""
        nn.init.uniform_(self.lora_a, -1 / math.sqrt(self.lora_a.shape[-1]), 1 / math.sqrt(self.lora_a.shape[-1]))
        nn.init.zeros_(self.lora_b)


class Substituting(nn.Module):
    """A module that computes with other values in place of some of its parameters, however it uses them."""

    def substitutes(self) -> dict[str, torch.Tensor]:
        """Return name of a parameter -> the value with which the next forward computes."""
        return {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with the substitutes in place of its parameters."""
        values = self.substitutes()
        # an instance attribute hides the registered parameter only from the lookup `self.name`
        self.__dict__.update(values)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in values:
                del self.__dict__[name]


class AdaptedStacks(Substituting):
    """A module with stacked experts' weights that computes with merged weights.

    How the module uses its stacks is unknown, so they are merged before each forward. This takes the memory of one
    layer's stacks.
    """

    adapters: dict[str, LowRank]
    """Name of the stacked parameter -> its adapter."""

    def substitutes(self) -> dict[str, torch.Tensor]:
        """Return the merged stacks."""
        return super().substitutes() | {name: self._merged(name, adapter) for name, adapter in self.adapters.items()}

    def _merged(self, name: str, adapter: LowRank) -> torch.Tensor:
        weight, factors = self._parameters[name], self.get_submodule(f"lora_{name}")
        assert weight is not None and isinstance(factors, StackAdapter)
        return adapter.combined(weight, *adapter.factors(factors.lora_a, factors.lora_b)).to(weight.dtype)


def attach(
    module: nn.Module,
    adapter: LowRank,
    dtype: torch.dtype,
    *,
    dropout: float = 0.0,
    scaled_by: str = "",
    quantized: QuantizedForward | None = None,
) -> None:
    """Turn the module into its adapted form in place, with uninitialized factors in `dtype` on the same device."""
    if adapter.operation == "stack":
        attach_to_stack(module, adapter, dtype)
        return
    weight = module.get_parameter("weight")
    where: dict[str, Any] = {"device": weight.device, "dtype": dtype}
    num_out, num_in = weight.shape[::-1] if adapter.transposed else weight.shape
    linear = LoRALinear if quantized is None else QuantizedLoRALinear
    kinds = {"linear": linear, "embedding": LoRAEmbedding, "conv1d": LowRankPath}
    swap_class(module, kinds[adapter.operation])
    module.lora_a = Factor(adapter.rank * max(1, len(adapter.rows)), num_in, **where)
    start = None if adapter.operation == "embedding" else 0.0
    module.lora_b = Factor(num_out, adapter.rank, start=start, bias=adapter.bias is not None, **where)
    if adapter.magnitude is not None:
        module.lora_magnitude = Factor(num_out, start=1.0, **where)
    if quantized is not None:
        module.quantized = quantized  # type: ignore[assignment]
    own: dict[str, Any] = {"adapter": adapter, "lora_dropout": dropout, "lora_scaled_by": scaled_by}
    vars(module).update(own)


def attach_to_stack(module: nn.Module, adapter: LowRank, dtype: torch.dtype) -> None:
    """Attach an adapter to a parameter of stacked experts, in place."""
    if not isinstance(module, AdaptedStacks):
        swap_class(module, AdaptedStacks)
        module.__dict__["adapters"] = {}
    assert isinstance(module, AdaptedStacks)
    name = adapter.weight.rpartition(".")[2]
    module.adapters[name] = adapter
    module.add_module(f"lora_{name}", StackAdapter(module.get_parameter(name), adapter.rank, dtype))


def swap_class(module: nn.Module, kind: Any) -> None:
    """Make a module one of a subclass of `kind`, whose `super().forward` is the module's own forward, in place."""
    base: Any = type(module)
    module.__class__ = _mixed(kind, base)


@cache
def _mixed(kind: Any, base: Any) -> type[Any]:
    return kind if base in kind.__mro__ else type(f"{kind.__name__}_{base.__name__}", (kind, base), {})
