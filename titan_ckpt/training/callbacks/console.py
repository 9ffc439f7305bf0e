"""What a run says while it trains: metrics.jsonl, a line on the console, a progress bar. Rank 0 only.

When a run starts or resumes at step n, the rows of later steps are removed from metrics.jsonl, because those steps are
about to be done again: the file always reads as one uninterrupted run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from titan_ckpt.progress import CONSOLE
from titan_ckpt.training.callbacks.base import Callback, LogValue, StepMetrics
from titan_ckpt.training.reporting import MetricsFile

if TYPE_CHECKING:
    from titan_ckpt.restoring import LoadResult
    from titan_ckpt.training.trainer import Trainer

logger = logging.getLogger(__name__)


class Logging(Callback):
    """Reports every `log_interval` steps, at the first step, at the last, and where something rare was measured.

    Raises the log event for all who report; its own part is metrics.jsonl and a line on the console.
    """

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        if trainer.ranks.rank == 0:
            self._file.truncate_after(result.step)

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.is_log_due(metrics.step) or trainer.measurements:
            trainer.callbacks.on_log(trainer, metrics.step, {**asdict(metrics), **trainer.measurements})

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        if trainer.ranks.rank:
            return
        self._file.append(values)
        metrics = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        measured = "".join(f"  {name} {value:.4g}" for name, value in metrics.items() if "/" in name)
        logger.info(
            "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %s tokens/s%s",
            step,
            trainer.config.training.steps,
            metrics["loss"],
            metrics["grad_norm"],
            metrics["lr"],
            f"{metrics['num_tokens'] / metrics['seconds']:,.0f}",
            measured,
        )


class ProgressBar(Callback):
    """A bar at the foot of an interactive console; nothing where the output is a file or a pipe."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.ranks.rank or not CONSOLE.is_terminal:
            return
        columns = (TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=CONSOLE, transient=True)
        self._progress.start()
        done = trainer.state.step
        self._task = self._progress.add_task("", total=trainer.config.training.steps, completed=done, loss=float("nan"))

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, loss=metrics.loss)

    def on_train_end(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
