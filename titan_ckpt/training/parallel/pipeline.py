"""Pipeline parallelism: the layers of each stage, and forward and backward of an optimizer step through all stages.

Owns the division into stages and the schedule. Stages keep the parameter names of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titan_ckpt.models.decoder import Decoder
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.parallel.ranks import Ranks
from titan_ckpt.training.tables import ParallelConfig

Loss = Callable[[torch.Tensor, Batch], torch.Tensor]
"""(logits, batch) -> summed loss."""


def cut(num_layers: int, num_stages: int) -> list[list[int]]:
    """Return the layers of each stage, as evenly as possible; the first stages may have one more."""
    return [part.tolist() for part in np.array_split(np.arange(num_layers), num_stages)]


def split_layers(model: Decoder[Any], ranks: Ranks, parallel: ParallelConfig) -> list[nn.Module]:
    """Return this rank's stages, which share the model's modules; stage s is on pipeline rank s % pp."""
    stages = cut(len(model.layers), parallel.num_stages)
    numbers = range(ranks.place.pp, len(stages), ranks.degrees.pp)
    return [model.stage(stages[s], first=s == 0, last=s == len(stages) - 1) for s in numbers]


class Pipeline:
    """Runs this rank's stages with the schedule from the settings."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        ranks: Ranks,
        config: RunConfig,
        loss: Loss,
        accumulation: int,
        dtype: torch.dtype,
    ) -> None:
        """Connect this rank's stages with those of other ranks. `dtype`: that of activations between stages."""
        parallel, self._loss = config.parallel, loss
        self._scale: torch.Tensor | float = 1.0
        self._losses: list[torch.Tensor] = []
        self._device = ranks.device
        num_stages, rank = parallel.num_stages, ranks.place.pp
        self._has_first, self._has_last = rank == 0, (num_stages - 1) % ranks.degrees.pp == rank
        model = parts[0]
        assert isinstance(model, Decoder), "find_degrees() refuses others"
        size = config.training.batch_size // parallel.num_microbatches
        length = config.data.sequence_length // ranks.degrees.cp
        shared = ranks.degrees.tp if parallel.sequence_parallel else 1
        tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(size, length // shared, model.config.dim, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(size, length, model.vocab_size, dtype=dtype, device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                part, s, num_stages, ranks.device,
                input_args=tokens if s == 0 else hidden,
                output_args=logits if s == num_stages - 1 else hidden,
                group=ranks.mesh("pp").get_group(),
            )
            for part, s in zip(parts, range(rank, num_stages, ranks.degrees.pp), strict=True)
        ]  # fmt: skip
        several = parallel.pipeline_schedule == "Interleaved1F1B"
        make = partial(
            get_schedule_class(parallel.pipeline_schedule),
            stages if several else stages[0],
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )
        self._step = make(n_microbatches=parallel.num_microbatches * accumulation)
        self._evaluation = make(n_microbatches=parallel.num_microbatches)

    def forward_backward(self, batch: Batch, scale: torch.Tensor | float) -> torch.Tensor:
        """Accumulate the gradients of `scale` times the summed loss of all sequences of a step. Collective along `pp`.

        Data-parallel ranks exchange gradients only after the last piece.
        Returns: the summed loss, float64; zero on ranks without the last stage.
        """
        self._scale = scale
        return self._run(self._step.step, batch)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a batch like `forward_backward`, without gradients. Collective along `pp`."""
        return self._run(self._evaluation.eval, batch)

    def _run(self, act: Callable[..., object], batch: Batch) -> torch.Tensor:
        self._losses.clear()
        inputs = (batch["tokens"],) if self._has_first else ()
        act(*inputs, target=batch["labels"] if self._has_last else None, return_outputs=False)
        return sum(self._losses, torch.zeros((), dtype=torch.float64, device=self._device))

    def _scaled_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self._loss(logits, {"labels": labels})
        self._losses.append(loss.detach())
        return loss * self._scale
