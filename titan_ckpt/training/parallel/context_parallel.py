"""Context parallelism: ranks share every sequence; each has some queries and all keys and values.

Owns the distribution of tokens over ranks, and attention over them. Keys and values are gathered, which every backend
supports; PyTorch's own `context_parallel` passes them around a ring and only works with CUDA's attention kernels.
Source of gathering, and of one piece from each end of the sequence so that causal attention costs all ranks the same:
arXiv 2407.21783, 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import CausalBias, causal_lower_right

from titan_ckpt.models.layers import Attention
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.parallel.ranks import Ranks


def positions(sequence_length: int, rank: int, size: int) -> torch.Tensor:
    """Return the positions of a rank's tokens: of 2 * `size` pieces of the sequence, the rank-th from each end."""
    pieces = torch.arange(sequence_length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def share_of(batch: Batch, ranks: Ranks) -> Batch:
    """Return this rank's tokens of every sequence with their labels; without context parallelism the batch itself."""
    size = ranks.degrees.cp
    if size == 1:
        return batch
    share = positions(batch["tokens"].shape[1], ranks.place.cp, size)
    return {**batch, **{name: batch[name][:, share] for name in ("tokens", "labels")}}


def share_sequences(model: nn.Module, ranks: Ranks, sequence_length: int) -> None:
    """Make every attention in a model part attend from this rank's tokens, at their true positions, to all tokens."""
    rank, size = ranks.place.cp, ranks.degrees.cp
    share = positions(sequence_length, rank, size)
    everyone = torch.cat([positions(sequence_length, r, size) for r in range(size)])
    piece = sequence_length // (2 * size)
    masks = [causal_lower_right(piece, end * piece) for end in (rank + 1, 2 * size - rank)]
    attend = partial(attention, masks=masks, order=everyone.argsort(), mesh=ranks.mesh("cp"))
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend
            module.register_forward_pre_hook(lambda _, args: (args[0], args[1][share.to(args[1].device)]))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    masks: Sequence[CausalBias],
    order: torch.Tensor,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """Return causal attention of this rank's queries over the keys and values of all ranks.

    Shape: (batch, tokens of this rank, heads, head_dim) in and out. `masks`: one for each piece of the queries; it ends
    at the piece's last position. `order`: the index of each position among the gathered tokens. Collective.
    """
    order = order.to(q.device)
    k, v = (_gather(x, mesh)[:, order].transpose(1, 2) for x in (k, v))
    out = []
    for part, mask in zip(q.transpose(1, 2).chunk(len(masks), dim=2), masks, strict=True):
        end = mask.seq_len_kv
        out.append(F.scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], mask, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2)


def _gather(values: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the tokens of all ranks in rank order. Shape: (batch, tokens, ...).

    The backward pass sums the gradients of all ranks.
    """
    whole = DTensor.from_local(values, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])
