"""Expert parallelism: experts are distributed over `ep` ranks, and the hidden rows of each expert over `tp` ranks.

Owns the exchange of tokens. The model does the routing, which drops no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from titan_ckpt.models.qwen3_moe import Experts
from titan_ckpt.training.parallel.ranks import Ranks

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
