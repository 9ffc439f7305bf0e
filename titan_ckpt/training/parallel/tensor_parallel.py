"""Tensor parallelism of decoders: heads, hidden rows and vocabulary are distributed, and tokens between matrices.

Owns the plans. Source of the dim along which each matrix is sharded: arXiv 1909.08053; of the tokens: arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titan_ckpt.models.decoder import Decoder
from titan_ckpt.models.qwen3_moe import MixtureOfExperts

Plan = Mapping[str, ParallelStyle]
FitPlan = Callable[[Plan], Plan]
"""Adapts a plan to modules that converters have changed."""

_TOKENS = Shard(1)


def split_matrices(model: Decoder[Any], mesh: DeviceMesh, *, sequence_parallel: bool, fit: FitPlan = dict) -> None:
    """Shard the matrices of a model part over the ranks of a mesh, in place, without communication.

    Every rank must pass equal values, or a model on meta. apply.py shards experts.
    """
    between = _TOKENS if sequence_parallel else Replicate()
    trained = {fqn: parameter.requires_grad for fqn, parameter in model.named_parameters()}
    parallelize_module(model, mesh, dict(fit(_ends(model, between))), src_data_rank=None)
    for layer in model.layers.children():
        parallelize_module(layer, mesh, dict(fit(_block(layer, between))), src_data_rank=None)
        if sequence_parallel and isinstance(layer.get_submodule("feed_forward"), MixtureOfExperts):
            # it has computed all tokens on every rank, so the output is sharded again
            again = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=_TOKENS)
            parallelize_module(layer.get_submodule("feed_forward"), mesh, again, src_data_rank=None)
    if model.norm is not None and model.config.tie_embeddings:
        # the embedding matrix needs a DTensor as input, and the logits are sharded along the vocabulary
        whole = PrepareModuleOutput(output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False)
        parallelize_module(model.norm, mesh, whole, src_data_rank=None)
        logits = PrepareModuleOutput(
            output_layouts=Shard(-1), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(model, mesh, logits, src_data_rank=None)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(trained[fqn])  # SequenceParallel makes new, trainable parameters of frozen ones


def _ends(model: Decoder[Any], between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Return the plan for the modules around the layers that this part has."""
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.norm is not None and between == _TOKENS:
        plan["norm"] = SequenceParallel()
    if model.output is not None:
        # logits stay a DTensor: FSDP2 does not accept a local view of one as a model's output
        plan["output"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate(), use_local_output=False)
    return plan


def _block(block: nn.Module, between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Return the plan for one layer; `between` is the placement of its input and output."""
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
    }
    if block.get_submodule("attention").q_norm is not None:
        # each rank normalises its own heads, so gradients of the weights must be summed; dim 2 counts heads
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"attention.q_norm": norm, "attention.k_norm": norm}
    sparse = isinstance(block.get_submodule("feed_forward"), MixtureOfExperts)
    if not sparse:
        plan |= {
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        }
    if between == _TOKENS:
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(_TOKENS, None), desired_input_layouts=(Replicate(), None)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),), use_local_output=sparse
            ),
        }
    return plan
