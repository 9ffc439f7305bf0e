"""What a run says while it trains: metrics.jsonl, a line on the console, a progress bar. Rank 0 only.

Owns metrics.jsonl: one JSON object per logged step. When a run starts or resumes at step n, the rows of later steps are
removed, because those steps are about to be done again: the file always reads as one uninterrupted run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from titan_ckpt.training.callbacks import Callback, StepMetrics

if TYPE_CHECKING:
    from titan_ckpt.manager import LoadResult
    from titan_ckpt.training.trainer import Trainer

logger = logging.getLogger(__name__)
CONSOLE = Console(stderr=True)


class MetricsFile:
    """An append-only file of JSON objects, each with its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is with the operating system when this returns, so a killed process loses none."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, and a last line that a kill cut short; atomic. Makes the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= step]
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        new.write_text("".join(kept))
        new.replace(self.path)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl in the order of their steps; nothing where there is no file."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # what a killed process had not written to its end


class MetricsLog(Callback):
    """Writes metrics.jsonl and a line on the console every `log_interval` steps, at the first step and at the last."""

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        if trainer.ranks.rank == 0:
            self._file.truncate_after(result.step)

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        training = trainer.config.training
        due = metrics.step % training.log_interval == 0 or metrics.step in (1, training.steps)
        if trainer.ranks.rank or not due:
            return
        self._file.append(asdict(metrics))
        logger.info(
            "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %s tokens/s",
            metrics.step,
            training.steps,
            metrics.loss,
            metrics.grad_norm,
            metrics.lr,
            f"{metrics.num_tokens / metrics.seconds:,.0f}",
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
