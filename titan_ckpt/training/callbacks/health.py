"""Gradient health: stop the run before a gradient that is not finite reaches the weights."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from titan_ckpt.errors import GradientError
from titan_ckpt.rng import RandomState
from titan_ckpt.training.callbacks.base import Callback

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer

logger = logging.getLogger(__name__)


class GradientHealth(Callback):
    """Stops the run, and saves the last good step with the data position and generators from before the bad step."""

    def __init__(self) -> None:
        self._random = RandomState()
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if trainer.config.checkpoint.save is not None:
            self._before = trainer.dataloader.state_dict(), self._random.state_dict()

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Raises: GradientError, on all ranks, because `grad_norm` is the norm of the whole gradient."""
        if math.isfinite(grad_norm):
            return
        if self._before is not None and step > 1:
            position, random_state = self._before
            trainer.dataloader.load_state_dict(position)
            self._random.load_state_dict(random_state)
            trainer.manager.save(step - 1, force=True)
        raise GradientError(
            f"step {step}: the gradient's norm is {grad_norm}; the weights are those of step {step - 1}. "
            "Resume from a checkpoint with a lower optimizer.lr, or with training.max_grad_norm set",
            step,
        )
