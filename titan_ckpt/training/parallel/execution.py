"""Run layers with activation checkpointing, and compiled.

Replaces forward methods and wraps no module, so parameters keep their names.
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
"""Operators whose results are kept: repeating the computation or communication costs more than the memory."""


def checkpoint_activations(layer: nn.Module, mode: Literal["full", "selective"]) -> None:
    """Keep only a layer's input for its backward pass ("full"), or also the results of _KEPT ("selective")."""
    contexts: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)} if mode == "selective" else {}
    )
    _replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **contexts))


def compile_forward(layer: nn.Module, backend: str) -> None:
    """Compile a layer's forward at its first call; its hooks are not compiled."""
    _replace_forward(layer, torch.compile(layer.forward, backend=backend))


def _replace_forward(layer: nn.Module, forward: Any) -> None:
    setattr(layer, "forward", forward)  # noqa: B010 - not a method of the class
