"""Tensor parallelism of decoders: heads, hidden rows and the vocabulary are dealt out, and tokens between them.

Owns the plans. Source for which matrix is cut along which dim: arXiv 1909.08053; for the tokens: arXiv 2205.05198.
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
"""Makes a plan fit what converters have made of the modules that it names."""

_TOKENS = Shard(1)


def split_matrices(model: Decoder[Any], mesh: DeviceMesh, *, sequence_parallel: bool, fit: FitPlan = dict) -> None:
    """Deal the matrices of a model part out over the ranks of a mesh, in place, without communication.

    Every rank brings the same values, or none yet. Experts are left to expert_parallel.py.
    """
    between = _TOKENS if sequence_parallel else Replicate()
    trained = {fqn: parameter.requires_grad for fqn, parameter in model.named_parameters()}
    _apply(model, mesh, fit(_ends(model, between)))
    for layer in model.layers.children():
        _apply(layer, mesh, fit(_block(layer, between)))
        if sequence_parallel and isinstance(layer.get_submodule("feed_forward"), MixtureOfExperts):
            # it has computed all tokens on every rank
            again = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=_TOKENS)
            parallelize_module(layer.get_submodule("feed_forward"), mesh, again, src_data_rank=None)
    if model.norm is not None and model.config.tie_embeddings:
        # the embedding matrix multiplies a DTensor, and what comes out is cut along the vocabulary
        whole = PrepareModuleOutput(output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False)
        parallelize_module(model.norm, mesh, whole, src_data_rank=None)
        logits = PrepareModuleOutput(
            output_layouts=Shard(-1), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(model, mesh, logits, src_data_rank=None)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(trained[fqn])  # SequenceParallel makes frozen parameters anew, to be trained


def _apply(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    parallelize_module(module, mesh, dict(plan), src_data_rank=None)


def _ends(model: Decoder[Any], between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Return the plan for what is around the layers, as far as this part has it."""
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.norm is not None and between == _TOKENS:
        plan["norm"] = SequenceParallel()
    if model.output is not None:
        # logits stay a DTensor: a local view of one is not what FSDP2 wants a model to return
        plan["output"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate(), use_local_output=False)
    return plan


def _block(block: nn.Module, between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Return the plan for one layer, whose input and output lie as `between` says."""
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
    }
    if block.get_submodule("attention").q_norm is not None:
        # each rank normalises its own heads, so the gradients of the weights are to be summed: dim 2 counts heads
        plan |= {
            "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        }
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
