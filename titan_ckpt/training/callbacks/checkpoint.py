"""Saves and exports: when a step ends, ask the manager, which knows whether one is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_ckpt.training.callbacks.base import Callback, StepMetrics

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer


class Checkpointing(Callback):
    """Saves when a step is due; the manager has the optimizer wait for what is still being copied."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        last_step = metrics.step == trainer.config.training.steps
        measured = {name: value for name, value in trainer.measurements.items() if isinstance(value, float)}
        known = {"loss": metrics.loss, **measured}
        if trainer.manager.save(metrics.step, last_step=last_step, metrics=known, export=False):
            trainer.callbacks.on_save(trainer, metrics.step)


class Export(Callback):
    """Makes the exports of [[checkpoint.export]]: at their interval, and the last step's when it is saved."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        trainer.manager.export(metrics.step, last_step=metrics.step == trainer.config.training.steps)
