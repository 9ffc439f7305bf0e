"""Apply all kinds of parallelism to a model, in the only order that works.

Owns the order: stages, matrices, experts, sequences, how layers run, then data-parallel sharding of the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan_ckpt.models.decoder import Decoder
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.qwen3_moe import Experts
from titan_ckpt.training.parallel.config import ParallelConfig
from titan_ckpt.training.parallel.context_parallel import share_sequences
from titan_ckpt.training.parallel.data_parallel import shard
from titan_ckpt.training.parallel.expert_parallel import split_experts
from titan_ckpt.training.parallel.pipeline import split_layers
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.parallel.tensor_parallel import FitPlan, split_matrices

# ruff: noqa: SLF001 - these operators have no other names
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_KEPT: list[Any] = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _c10d.all_to_all_single.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
]
"""Operators whose results are kept: repeating the computation or communication costs more than the memory."""


def parallelize(
    model: LanguageModel,
    ranks: Ranks,
    parallel: ParallelConfig,
    compute_dtype: torch.dtype,
    sequence_length: int,
    fit: FitPlan = dict,
) -> list[nn.Module]:
    """Return this rank's parts of a whole model, on its device: its pipeline stages, or the model itself.

    Every rank must pass equal values, or a model on meta, which stays on meta. Nothing is communicated.
    `fit`: adapts tensor-parallel plans to modules that converters have changed.
    """
    degrees = ranks.degrees
    parts: list[nn.Module] = [model]
    if degrees.pp > 1:
        assert isinstance(model, Decoder), "find_degrees() refuses others"
        parts = split_layers(model, ranks, parallel)
    for part in parts:
        if not any(value.is_meta for value in part.parameters()):
            part.to(ranks.device)
        if degrees.tp > 1:
            assert isinstance(part, Decoder), "find_degrees() refuses others"
            split_matrices(part, ranks.mesh("tp"), sequence_parallel=parallel.sequence_parallel, fit=fit)
        experts = [module for module in part.modules() if isinstance(module, Experts)]
        for module in experts:
            split_experts(module, ranks)
        if degrees.cp > 1:
            share_sequences(part, ranks, sequence_length)
        for layer in part.get_submodule("layers").children():
            if parallel.compile or parallel.activation_checkpoint != "none":
                run_layer(layer, parallel)
        shard(part, ranks, compute_dtype, experts if degrees.ep > 1 else (), parallel.reshard_after_forward)
    return parts


def run_layer(layer: nn.Module, parallel: ParallelConfig) -> None:
    """Run a layer with activation checkpointing, and compiled from its first call on, as the settings say.

    Replaces its forward method and wraps no module, so parameters keep their names; its hooks are not compiled.
    """
    forward: Any = layer.forward
    if parallel.activation_checkpoint != "none":
        selective = {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)}
        contexts: dict[str, Any] = selective if parallel.activation_checkpoint == "selective" else {}
        forward = partial(checkpoint, forward, use_reentrant=False, **contexts)
    if parallel.compile:
        forward = torch.compile(forward, backend=parallel.compile_backend)
    setattr(layer, "forward", forward)  # noqa: B010 - not a method of the class
