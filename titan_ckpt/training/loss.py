"""The loss of a batch, as a sum. Pure."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titan_ckpt.models.layers import local_tensor
from titan_ckpt.training.data.batch import IGNORED, Batch


def num_predicted(batch: Batch) -> int:
    """Return how many labels of the batch count in the loss."""
    return int((batch["labels"] != IGNORED).sum())


def summed_cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum over all predicted tokens in float32; a sum, so that the mean can be taken over all ranks.

    Shape: (batch, sequence, vocab) logits, a DTensor under tensor parallelism; a scalar out.
    """
    return F.cross_entropy(
        local_tensor(logits).flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
