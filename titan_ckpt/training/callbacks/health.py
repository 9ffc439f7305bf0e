"""Gradient health: stop the run before a gradient that is not finite reaches the weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titan_ckpt.errors import GradientError
from titan_ckpt.training.callbacks.base import Callback, StepMetrics

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer


class GradientHealth(Callback):
    """Stops the run, and saves the last good step with the data position and generators from before the bad step."""

    def __init__(self) -> None:
        self._good = 0
        """The newest step whose weights are known to be finite."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self._good = trainer.state.step

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.config.training.check_gradients == "step":  # also one that was left out, by an overflow in float16
            self._good = metrics.step

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Raises: GradientError, on all ranks, because `grad_norm` is the norm of the whole gradient."""
        if not trainer.is_measured:
            return
        if math.isfinite(grad_norm):
            self._good = step
            return
        advice = "Resume from a checkpoint with a lower optimizer.lr, or with training.max_grad_norm set"
        if self._good < step - 1:
            raise GradientError(
                f"step {step}: the gradient's norm is {grad_norm}; it was finite in step {self._good}, the last that "
                f"was checked, and nothing is saved. {advice}",
                step,
            )
        if trainer.step_back() and step > 1:
            trainer.manager.save(step - 1, force=True)
        raise GradientError(
            f"step {step}: the gradient's norm is {grad_norm}; the weights are those of step {step - 1}. {advice}", step
        )
