"""The loss of a batch, as a sum, and the global norm of gradients. Pure but for the gradients that are scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.training.data import IGNORED, Batch


def num_predicted(batch: Batch) -> int:
    """Return how many of the batch's labels are predicted."""
    return int((batch["labels"] != IGNORED).sum())


def summed_cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum over all predicted tokens, in float32; a sum, so that the mean can be taken over all ranks.

    Shape: (batch, sequence, vocab) logits; a scalar out.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Return the global norm of the gradients, scaled down in place to `max_norm` where that is given.

    Collective where parameters are DTensors.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
