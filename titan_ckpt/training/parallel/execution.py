"""How a layer runs: with its activations recomputed in the backward pass, and compiled.

Replaces forward methods and wraps no module, so that parameters keep their names.
"""
# ruff: noqa: SLF001 - these operators have no other names

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_KEPT: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]
"""What costs more time to compute, or to send, again than memory to keep."""


def checkpoint_activations(layer: nn.Module, mode: Literal["full", "selective"]) -> None:
    """Keep a layer's input alone for its backward pass ("full"), or the results of costly operations too."""
    contexts: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)} if mode == "selective" else {}
    )
    _replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **contexts))


def compile_forward(layer: nn.Module, backend: str) -> None:
    """Compile a layer's computation, at its first call; what is done before and after it by hooks is left out."""
    _replace_forward(layer, torch.compile(layer.forward, backend=backend))


def _replace_forward(layer: nn.Module, forward: Any) -> None:
    setattr(layer, "forward", forward)  # noqa: B010 - not a method of the class
