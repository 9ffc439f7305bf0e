"""Reports of a run in training: metrics.jsonl, a line on the console, a progress bar. Rank 0 only.

When a run starts or resumes at step n, the rows of later steps are removed from metrics.jsonl, because those steps will
be done again. So the file always reads like one uninterrupted run.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from titan_ckpt.errors import counted
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.progress import CONSOLE
from titan_ckpt.telemetry.events import read_events
from titan_ckpt.training.callbacks.base import Callback, LogValue, StepMetrics, Trainer

logger = logging.getLogger(__name__)


class Logging(Callback):
    """Reports every `log_interval` steps, at the first and the last step, and when a callback measured something.

    It calls on_log of all callbacks; its own on_log writes metrics.jsonl and a line on the console. What is measured
    after the report of a step, which a save follows, gets into the same row.
    """

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)
        self._row: dict[str, LogValue] = {}
        """The newest row."""
        self._unwritten: list[dict[str, LogValue]] = []
        """Rows that the disk has refused; they are written before the next one."""
        self._reported: tuple[int, Collection[str]] = (0, ())
        """The newest step that was reported, and the names of what was measured by then."""

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        if trainer.ranks.rank == 0:
            trainer.log_history.clear()
            trainer.log_history.extend(self._file.truncate_after(result.step))

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        step, names = self._reported
        if step == metrics.step:  # what was measured since
            values = {name: value for name, value in trainer.measurements.items() if name not in names}
        elif trainer.is_log_due(metrics.step) or trainer.measurements:
            values = {**asdict(metrics), **trainer.measurements}
            if not trainer.is_measured:
                del values["loss"], values["grad_norm"]
        else:
            return
        self._reported = metrics.step, {*trainer.measurements}
        if values:
            trainer.callbacks.on_log(trainer, metrics.step, {"step": metrics.step, **values})

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        if trainer.ranks.rank:
            return
        metrics = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        measured = "".join(f"  {name} {value:.4g}" for name, value in metrics.items() if "/" in name)
        if self._row.get("step") == step:
            self._row |= values
            self._write(self._row, again=True)
            if measured:
                logger.info("step %d/%d%s", step, trainer.num_steps, measured)
            return
        speed = metrics["num_tokens"] / metrics["seconds"]
        times = {"unix_seconds": time.time(), "total_tokens": trainer.state.num_tokens, "tokens_per_second": speed}
        self._row = {**values, **times}
        trainer.log_history.append(self._row)
        self._write(self._row)
        logger.info(
            "step %d/%d%s  lr %.2e  %s %s/s%s",
            step,
            trainer.num_steps,
            f"  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}" if "loss" in metrics else "",
            metrics["lr"],
            f"{speed:,.0f}",
            "tok" if isinstance(trainer.model, LanguageModel) else "samples",
            measured,
        )

    def on_train_end(self, trainer: Trainer) -> None:
        if self._unwritten and not self._write():
            logger.warning("%s: %s lost", self._file.path, counted(len(self._unwritten), "row is", "rows are"))

    def _write(self, *rows: dict[str, LogValue], again: bool = False) -> bool:
        """Write these rows after those that were refused before; a full disk does not end a run that can go on.

        `again`: the row is the newest one, and is in the file or among those that were refused.
        """
        was_refused = bool(self._unwritten)
        if not (again and was_refused):
            self._unwritten += rows
        try:
            self._file.append(*self._unwritten, over_last=again and not was_refused)
        except OSError as error:
            if not was_refused:
                logger.warning("%s: rows wait until the disk takes them: %s", self._file.path, error)
            return False
        self._unwritten.clear()
        return True


class ProgressBar(Callback):
    """Shows a progress bar on an interactive console; does nothing if the output is a file or a pipe."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.ranks.rank or not CONSOLE.is_terminal:
            return
        columns = (TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[loss]}"), console=CONSOLE, transient=True)
        self._progress.start()
        done = trainer.state.step
        self._task = self._progress.add_task("", total=trainer.num_steps, completed=done, loss="")

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step)
            if trainer.is_measured:
                self._progress.update(self._task, loss=f"loss {metrics.loss:.4f}")

    def on_train_end(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class MetricsFile:
    """An append-only file of JSON objects, each with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = 0
        """Where the last row begins."""

    def append(self, *rows: Mapping[str, object], over_last: bool = False) -> None:
        """Append rows, or write one over the last one, of which it has all values.

        They are handed to the operating system before this returns, so a killed process loses no row.
        Raises: OSError; the file then ends before them.
        """
        lines = [json.dumps(dict(row)).encode() + b"\n" for row in rows]
        data = b"".join(lines)
        with self.path.open("r+b" if over_last else "ab", buffering=0) as file:
            start = file.seek(self._last) if over_last else file.seek(0, os.SEEK_END)
            self._last = start + len(data) - len(lines[-1])
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(start)
                raise

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove rows of later steps, and a last line that a kill truncated; return the others. Atomic.

        Creates the folder.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        new.write_text("".join(json.dumps(row) + "\n" for row in kept))
        new.replace(self.path)
        return kept


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl in the order of their steps; no rows if there is no file."""
    yield from (row for row in read_events(path) if "step" in row)
