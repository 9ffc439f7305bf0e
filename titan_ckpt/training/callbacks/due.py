"""Does what is due after a step: an evaluation, a save, an export. The manager decides whether the last two are due.

An evaluation does not change the run: not its random numbers, its position in the data, its weights or the mode of a
module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from titan_ckpt.process import RandomState
from titan_ckpt.training.callbacks.base import Callback, StepMetrics, Trainer
from titan_ckpt.training.config import EVALUATED, EvaluationConfig
from titan_ckpt.training.data.batch import Batch, without_labels
from titan_ckpt.training.data.sequences import IndexedDataset
from titan_ckpt.training.loss import num_predicted
from titan_ckpt.training.parallel.data_parallel import free_gathered


@dataclass(eq=False)
class Evaluation(Callback):
    """Measures `eval/loss`, the mean over all predicted tokens of held-out text, and `eval/perplexity`.

    It is equal every time, distributed over all ranks, and also made at the last step.
    """

    config: EvaluationConfig
    dataset: IndexedDataset
    """The whole held-out text, equal on every rank."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        is_due = metrics.step % self.config.interval == 0 or metrics.step == trainer.num_steps
        if is_due and EVALUATED[0] not in trainer.measurements:  # a step may turn out later to be the last
            loss = self.evaluate(trainer)
            values = dict(zip(EVALUATED, (loss, math.exp(min(loss, 700.0))), strict=True))
            trainer.measurements |= values
            trainer.callbacks.on_evaluate(trainer, metrics.step, values)

    def evaluate(self, trainer: Trainer) -> float:
        """Return the mean loss over the tokens of all ranks, each counted once. Collective."""
        random_state = RandomState()
        before = random_state.state_dict()
        loss, num_tokens = torch.zeros(2, dtype=torch.float64, device=trainer.ranks.device)
        modes = [(module, module.training) for part in trainer.model_parts for module in part.modules()]
        for part in trainer.model_parts:
            part.eval()
        try:
            for batch in self._batches(trainer):
                loss += trainer.measure_loss(batch)
                num_tokens += num_predicted(batch)
                trainer.guard.check()
        finally:
            for module, mode in modes:  # a frozen part may be in eval mode in training too
                module.training = mode
            random_state.load_state_dict(before)
        free_gathered(trainer.model_parts)
        return float(trainer.ranks.sum(loss) / trainer.ranks.sum(num_tokens, over_data=True))

    def _batches(self, trainer: Trainer) -> Iterator[Batch]:
        """Yield this rank's batches; every rank has the same number, because each forward may be collective."""
        config, ranks = self.config, trainer.ranks
        num_sequences = min(self.dataset.num_sequences, config.max_sequences or self.dataset.num_sequences)
        size = trainer.config.training.batch_size
        for first in range(0, num_sequences, size * ranks.data_size):
            numbers = range(first + ranks.data_rank * size, first + (ranks.data_rank + 1) * size)
            yield trainer.collate([self._sequence(number, num_sequences) for number in numbers])

    def _sequence(self, number: int, num_sequences: int) -> Batch:
        """Return a sequence; for a number beyond the last sequence, a repeated one whose labels are IGNORED."""
        sample = self.dataset.sequence(number % num_sequences)
        return sample if number < num_sequences else without_labels(sample)


class Checkpointing(Callback):
    """Saves if the step is due; the manager delays the next optimizer step until its copy is complete."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        last_step = metrics.step == trainer.num_steps
        measured = {name: value for name, value in trainer.measurements.items() if isinstance(value, float)}
        if trainer.manager.is_save_due(metrics.step, last_step):
            trainer.callbacks.on_save_begin(trainer, metrics.step)
        values = ({"loss": metrics.loss} if trainer.is_measured else {}) | measured
        if trainer.manager.save(metrics.step, last_step=last_step, metrics=values, export=False):
            trainer.callbacks.on_save(trainer, metrics.step)


class Export(Callback):
    """Makes the exports of [[checkpoint.export]] at their interval and at the last step."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        trainer.manager.export(metrics.step, last_step=metrics.step == trainer.num_steps)
