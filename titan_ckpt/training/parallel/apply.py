"""Apply all kinds of parallelism to a model, in the only order that works.

Owns the order: stages, matrices, experts, sequences, how layers run, then data-parallel sharding of the result.
"""

from __future__ import annotations

import torch
from torch import nn

from titan_ckpt.models.decoder import Decoder
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.training.parallel.config import ParallelConfig
from titan_ckpt.training.parallel.context_parallel import share_sequences
from titan_ckpt.training.parallel.data_parallel import shard
from titan_ckpt.training.parallel.execution import checkpoint_activations, compile_forward
from titan_ckpt.training.parallel.expert_parallel import find_experts, split_experts
from titan_ckpt.training.parallel.pipeline import split_layers
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.parallel.tensor_parallel import FitPlan, split_matrices


def parallelise(
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
        experts = find_experts(part)
        for module in experts:
            split_experts(module, ranks)
        if degrees.cp > 1:
            share_sequences(part, ranks, sequence_length)
        for layer in part.get_submodule("layers").children():
            if parallel.activation_checkpoint != "none":
                checkpoint_activations(layer, parallel.activation_checkpoint)
            if parallel.compile:
                compile_forward(layer, parallel.compile_backend)
        shard(part, ranks, compute_dtype, experts if degrees.ep > 1 else (), parallel.reshard_after_forward)
    return parts
