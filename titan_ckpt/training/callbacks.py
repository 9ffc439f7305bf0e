"""What happens around the steps of a run: the events, their order, and the callbacks every run has.

Owns the events. A callback of your own subclasses Callback and is handed to the Trainer; it comes after the named ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_ckpt.manager import LoadResult
    from titan_ckpt.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step, as seen by all ranks together."""

    step: int
    loss: float
    """Mean over all predicted tokens of the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_tokens: int
    """Predicted tokens of the step, over all ranks."""
    seconds: float


class Callback:
    """Every event does nothing here. All ranks call all of them, in the order in which they are written here."""

    def on_init_end(self, trainer: Trainer) -> None:
        """Everything is built, nothing is loaded."""

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        """Weights, and when resuming the run's state, are in place."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """The first step of this process comes next."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Nothing of the step is done."""

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        """The gradients of micro-batch `index` are added up."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Gradients are complete and clipped, weights are those of the step before."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Weights, schedule and data position are those after the step."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """A save of this step was started, or made."""

    def on_train_end(self, trainer: Trainer) -> None:
        """No further step follows; called after an exception too."""


class GradientHealth(Callback):
    """Stops the run before a gradient that is not finite reaches the weights."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {step}: the gradient's norm is {grad_norm}; the weights are those of step {step - 1}. "
                "Resume from a checkpoint with a lower optimizer.lr, or with training.max_grad_norm set"
            )


class Checkpointing(Callback):
    """Saves when a step is due, and keeps the optimizer from changing what is still being copied."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        trainer.manager.maybe_wait_for_staging()

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        last_step = metrics.step == trainer.config.training.steps
        if trainer.manager.save(metrics.step, last_step=last_step, metrics={"loss": metrics.loss}):
            trainer.callbacks.on_save(trainer, metrics.step)


@dataclass(slots=True)
class Callbacks(Callback):
    """The callbacks of a run, called in the order of the fields.

    Health comes first, so that a broken step is not reported as a step; reports come before the save, so that a saved
    step has its line in metrics.jsonl.
    """

    health: Callback
    metrics: Callback
    progress: Callback
    checkpoint: Callback
    user: tuple[Callback, ...] = ()

    def __iter__(self) -> Iterator[Callback]:
        yield from (getattr(self, f.name) for f in fields(self) if f.name != "user")
        yield from self.user

    def on_init_end(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_init_end(trainer)

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        for callback in self:
            callback.on_load(trainer, result)

    def on_train_begin(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_train_begin(trainer)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        for callback in self:
            callback.on_step_begin(trainer, step)

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        for callback in self:
            callback.on_substep_end(trainer, index)

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        for callback in self:
            callback.on_pre_optimizer(trainer, step, grad_norm)

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        for callback in self:
            callback.on_step_end(trainer, metrics)

    def on_save(self, trainer: Trainer, step: int) -> None:
        for callback in self:
            callback.on_save(trainer, step)

    def on_train_end(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_train_end(trainer)
