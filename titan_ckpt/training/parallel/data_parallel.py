"""Data parallelism by FSDP2: parameters sharded, or copied and sharded (HSDP), one group of them per layer.

A copy per rank (DDP) is HSDP whose shards are whole. Gradients are summed, never averaged: the loss is already divided
by the tokens of all ranks, and experts, which fewer ranks share, need no other divisor then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_ckpt.training.parallel.ranks import Ranks


def shard(model: nn.Module, ranks: Ranks, compute_dtype: torch.dtype, experts: Sequence[nn.Module] = ()) -> None:
    """Shard a model part in place over the ranks that see different data; `experts` over those that hold the same ones.

    Parameters stay in their dtype; they are gathered and multiplied in `compute_dtype`, gradients reduced in float32.
    """
    if not is_sharded(ranks):
        return
    copies = ("dp_replicate",) if ranks.degrees.dp_replicate > 1 else ()
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in experts:
        fully_shard(module, mesh=ranks.mesh(*copies, "fsdp_of_experts"), mp_policy=policy)
    mesh = ranks.mesh(*copies, "fsdp")
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def is_sharded(ranks: Ranks) -> bool:
    """Say whether FSDP2 holds the parameters."""
    return ranks.degrees.dp_replicate * ranks.degrees.of("fsdp") > 1


def sync_gradients(model_parts: Sequence[nn.Module], *, when: bool) -> None:
    """Say whether the next backward exchanges gradients between ranks; with accumulation only the last one does."""
    for part in model_parts:
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(when)
