"""Apply all kinds of parallelism to a model, in the only order that works.

Owns the order: stages, matrices, experts, sequences, how layers run, then data-parallel sharding of the result; tensor
parallelism of decoders: heads, hidden rows and vocabulary are distributed, and tokens between matrices; and expert
parallelism: experts are distributed over `ep` ranks, and the hidden rows of each expert over `tp` ranks. It owns the
exchange of tokens. The model does the routing, which drops no token.
Source of the dim along which each matrix is sharded: arXiv 1909.08053; of the tokens: arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan_ckpt.errors import ConfigError
from titan_ckpt.models.decoder import Decoder
from titan_ckpt.models.language_model import Model
from titan_ckpt.models.qwen3_moe import Experts, MixtureOfExperts
from titan_ckpt.training.parallel.context_parallel import share_sequences
from titan_ckpt.training.parallel.data_parallel import shard
from titan_ckpt.training.parallel.pipeline import split_layers
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.tables import ParallelConfig

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

Plan = Mapping[str, ParallelStyle]
FitPlan = Callable[[Plan], Plan]
"""Adapts a plan to modules that converters have changed."""

_TOKENS = Shard(1)


def parallelize(
    model: Model,
    ranks: Ranks,
    parallel: ParallelConfig,
    compute_dtype: torch.dtype,
    sequence_length: int,
    fit: FitPlan = dict,
) -> list[nn.Module]:
    """Return this rank's parts of a whole model, on its device: its pipeline stages, or the model itself.

    Every rank must pass equal values, or a model on meta, which stays on meta. Nothing is communicated.
    `fit`: adapts tensor-parallel plans to modules that converters have changed.
    Raises: ConfigError for a model without `layers`.
    """
    degrees = ranks.degrees
    if not isinstance(getattr(model, "layers", None), nn.Module):
        lacks = f"{type(model).__name__} has no module `layers`, whose children are sharded and recomputed one by one"
        raise ConfigError([f"model.name: {lacks}; give it one, such as an nn.ModuleList of its blocks"])
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
        forward = torch.compile(forward)
    setattr(layer, "forward", forward)  # noqa: B010 - not a method of the class


def split_matrices(model: Decoder[Any], mesh: DeviceMesh, *, sequence_parallel: bool, fit: FitPlan = dict) -> None:
    """Shard the matrices of a model part over the ranks of a mesh, in place, without communication.

    Every rank must pass equal values, or a model on meta. `split_experts` shards experts.
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


Compute = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Experts.forward: (rows sorted by expert, number of rows of each expert) -> the same number of rows."""

_HIDDEN = {"w1": 1, "w2": 2, "w3": 1}
"""Dim of each parameter of Experts that counts hidden rows."""


def split_experts(experts: Experts, ranks: Ranks) -> None:
    """Distribute a layer's experts over the ranks of `ep`, and the hidden rows of each over those of `tp`, in place."""
    axes = tuple(axis for axis in ("ep", "tp") if ranks.degrees.of(axis) > 1)
    if not axes:
        return
    mesh = ranks.mesh(*axes)
    compute: Compute = experts.forward
    for name, parameter in [*experts.named_parameters()]:
        placements: list[Placement] = [Shard(0) if axis == "ep" else Shard(_HIDDEN[name]) for axis in axes]
        local = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    if "ep" in axes:
        compute = exchanged(compute, ranks.mesh("ep").get_group())
    if "tp" in axes:
        compute = summed(compute, ranks.mesh("tp"))
    setattr(experts, "forward", compute)  # noqa: B010 - not a method of the class


def exchanged(compute: Compute, group: ProcessGroup) -> Compute:
    """Return a function that sends each row to the rank with its expert, computes, and sends the result back.

    1 Tell every rank how many rows come for each of its experts. 2 Send the rows. 3 Compute. 4 Send them back.
    """

    def forward(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        size = group.size()
        sent = torch.tensor(counts, device=rows.device)
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent, group=group)
        outgoing = sent.view(size, -1).sum(dim=1).tolist()
        of_rank = expected.view(size, -1)  # of_rank[r, e]: number of rows that rank r has for this rank's expert e
        incoming = of_rank.sum(dim=1).tolist()
        received = all_to_all_single_autograd(rows, incoming, outgoing, group)
        local_experts = torch.arange(of_rank.shape[1], device=rows.device).repeat(size)
        by_expert = local_experts.repeat_interleave(of_rank.flatten()).argsort(stable=True)
        made = compute(received[by_expert], of_rank.sum(dim=0).tolist())
        returned: torch.Tensor = all_to_all_single_autograd(made[by_expert.argsort()], outgoing, incoming, group)
        return returned

    return forward


def summed(compute: Compute, mesh: DeviceMesh) -> Compute:
    """Return a function that sums the partial results of ranks that each have some of the hidden rows.

    The backward pass sums the gradients of the rows; every rank already has the gradient of the sum.
    Source: arXiv 1909.08053, f and g.
    """

    def forward(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        equal = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
        made = compute(equal.to_local(grad_placements=[Partial()]), counts)
        total = DTensor.from_local(made, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return total.to_local().clone()  # FSDP2 hooks onto outputs that are no views

    return forward
