"""Evaluation: the loss on held-out text, all of it the same text every time, dealt to all ranks.

Changes nothing of the run: neither random numbers nor the position in the data, and no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from titan_ckpt.rng import RandomState
from titan_ckpt.training.callbacks.base import Callback, StepMetrics
from titan_ckpt.training.config import EvaluationConfig
from titan_ckpt.training.data import IGNORED, Batch, PackedDataset
from titan_ckpt.training.loss import num_predicted

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer


class Evaluation(Callback):
    """Measures `eval/loss`, the mean over all predicted tokens, and `eval/perplexity`; at the last step as well."""

    def __init__(self, config: EvaluationConfig, dataset: PackedDataset) -> None:
        """Take the whole held-out text, the same on every rank."""
        self._config = config
        self._dataset = dataset

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step % self._config.interval == 0 or metrics.step == trainer.config.training.steps:
            loss = self.evaluate(trainer)
            values = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
            trainer.measurements |= values
            trainer.callbacks.on_evaluate(trainer, metrics.step, values)

    def evaluate(self, trainer: Trainer) -> float:
        """Return the mean loss over the tokens of all ranks, each counted once. Collective."""
        random_state = RandomState()
        before = random_state.state_dict()
        loss, num_tokens = torch.zeros(2, dtype=torch.float64, device=trainer.ranks.device)
        for part in trainer.model_parts:
            part.eval()
        try:
            for batch in self._batches(trainer):
                loss += trainer.measure_loss(batch)
                num_tokens += num_predicted(batch)
                trainer.guard.check()
        finally:
            for part in trainer.model_parts:
                part.train()
            random_state.load_state_dict(before)
        reshard(*trainer.model_parts)
        return float(trainer.ranks.sum(loss) / trainer.ranks.sum(num_tokens, over_data=True))

    def _batches(self, trainer: Trainer) -> Iterator[Batch]:
        """Yield this rank's batches; every rank has as many, for each forward may be collective."""
        config, ranks = self._config, trainer.ranks
        num_sequences = min(self._dataset.num_sequences, config.max_sequences or self._dataset.num_sequences)
        size = trainer.config.training.batch_size
        for first in range(0, num_sequences, size * ranks.data_size):
            mine = range(first + ranks.data_rank * size, first + (ranks.data_rank + 1) * size)
            yield trainer.collate([self._sequence(number, num_sequences) for number in mine])

    def _sequence(self, number: int, num_sequences: int) -> Batch:
        """Return a sequence; beyond the last one, a repeated one whose labels do not count."""
        sample = self._dataset.sequence(number % num_sequences)
        if number < num_sequences:
            return sample
        return sample | {"labels": torch.full_like(sample["labels"], IGNORED)}


def reshard(*model_parts: torch.nn.Module) -> None:
    """Give back what a forward without a backward has left gathered, so that parameters are shards again."""
    modules: Sequence[torch.nn.Module] = [module for part in model_parts for module in part.modules()]
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
