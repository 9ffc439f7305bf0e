"""The layers that decoder-only models share: rotary embeddings, grouped attention, SwiGLU, and the block of both.

Owns their computation and initial values. Knows no architecture by name; decoder.py has the stack of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.models.config import INIT_STD, DecoderConfig

Rotate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotate x (batch, seq, heads, head_dim) by a table (seq, head_dim / 2); same shape and dtype out."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries, keys, values) -> attention output. Shape: (batch, seq, heads, head_dim); keys and values may have fewer
heads."""


def rotary_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> torch.Tensor:
    """Return the angle of each pair per position. Shape: (head_dim / 2,). Source: arXiv 2104.09864."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)


def rotary_angles(frequencies: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """Return cos + i sin of every position and pair.

    Shape: (max_seq_len, head_dim / 2), complex64: mixed-precision wrappers would cast a table of cosines to bfloat16,
    like every floating-point input, but they do not cast complex tensors.
    """
    positions = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_pairs(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the last dim (2i and 2i + 1), in float32. Shapes: see Rotate."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(-2).type_as(x)


def rotate_halves(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate pairs from the last dim's two halves (i and i + head_dim / 2), in float32. Shapes: see Rotate."""
    turned = torch.complex(*x.float().chunk(2, dim=-1)) * table[None, :, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).type_as(x)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ExactBuffers(nn.Module):
    """A module whose own non-persistent buffers change device but never dtype, and never hold garbage.

    A cast of the model does not change them. After a move from meta they are recomputed.
    """

    def reset_buffers(self) -> None:
        """Recompute the module's own non-persistent buffers on their device."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        kept = {
            name: buffer for name in self._non_persistent_buffers_set if (buffer := self._buffers[name]) is not None
        }
        self._buffers |= dict.fromkeys(kept)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            device = fn(torch.empty(0, device=buffer.device)).device
            self._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        if any(buffer.is_meta for buffer in kept.values()):
            self.reset_buffers()
        return self


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention: every query sees its own and earlier positions. Shapes: see Attend."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


class RMSNorm(nn.RMSNorm):
    """RMSNorm that computes in float32. If the weight is wider than the input, as under autocast, so is the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return self.weight * F.rms_norm(x, self.normalized_shape, eps=self.eps)


class SubLayer(nn.Module):
    """A part of a block that writes into the residual stream."""

    def init_weights(self, residual_std: float) -> None:
        """Fill every parameter in place; `residual_std` is for weights that write into the residual stream."""
        raise NotImplementedError


class Attention(SubLayer):
    """Causal self-attention in which groups of query heads share a key-value head.

    With `qk_norm_eps`, queries and keys are normalised per head before rotation. If ranks share the heads, each has
    the gradients of those norms for its own heads; SequenceParallel(sequence_dim=2) sums them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotate: Rotate,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotate = rotate
        self.attend: Attend = causal_attention
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, seq, dim) in and out; the table has at least `seq` positions.

        The number of heads is taken from the projections, so it may be a rank's share.
        """
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        table = table[: q.shape[1]]
        q, k = self.rotate(q, table), self.rotate(k, table)
        result: torch.Tensor = self.wo(self.attend(q, k, v).flatten(-2))
        return result

    def init_weights(self, residual_std: float) -> None:
        for linear in (self.wq, self.wk, self.wv):
            nn.init.trunc_normal_(linear.weight, std=INIT_STD)
        nn.init.trunc_normal_(self.wo.weight, std=residual_std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()


class FeedForward(SubLayer):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result

    def init_weights(self, residual_std: float) -> None:
        for linear in (self.w1, self.w3):
            nn.init.trunc_normal_(linear.weight, std=INIT_STD)
        nn.init.trunc_normal_(self.w2.weight, std=residual_std)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, dim: int, norm_eps: float, attention: SubLayer, feed_forward: SubLayer) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.ffn_norm = RMSNorm(dim, eps=norm_eps)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        result: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result

    def init_weights(self, residual_std: float) -> None:
        """Fill every parameter in place."""
        self.attention.init_weights(residual_std)
        self.feed_forward.init_weights(residual_std)
        self.attention_norm.reset_parameters()
        self.ffn_norm.reset_parameters()


def make_block(
    config: DecoderConfig, rotate: Rotate, *, qk_norm: bool = False, feed_forward: SubLayer | None = None
) -> TransformerBlock:
    """Return a block of this shape. `qk_norm`: see Attention. `feed_forward`: in place of a dense one."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    attention = Attention(config.dim, *heads, rotate, config.norm_eps if qk_norm else None)
    dense = FeedForward(config.dim, config.ffn_dim) if feed_forward is None else feed_forward
    return TransformerBlock(config.dim, config.norm_eps, attention, dense)
