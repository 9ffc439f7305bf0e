"""Saves and exports: at the end of a step, call the manager, which decides whether one is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_ckpt.training.callbacks.base import Callback, StepMetrics

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer


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
