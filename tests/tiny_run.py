"""A training run of a few tiny steps, and what it has logged: what tests of the trainer start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titan_ckpt.config import from_dict
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.config import RunConfig


def settings(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a run of three tiny steps; `sections` change it, table by table."""
    raw: dict[str, Any] = {
        "output_folder": str(folder / "run"),
        "model": {"flavor": "debug-0.5m"},
        "data": {
            "sequence_length": 16,
            "cache_folder": os.environ["TITAN_CKPT_TESTS_CACHE"],  # one tokenizer for all runs of a session
            "tokenizer": {"vocab_size": 300},
        },
        "training": {"steps": 3, "batch_size": 4, "device": "cpu"},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"save": {"interval": 2}},
    }
    for name, table in sections.items():
        raw[name] = {**raw.get(name, {}), **table}
    return from_dict(RunConfig, raw)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has logged."""
    return [*read_metrics(folder / "run" / "metrics.jsonl")]


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has logged."""
    return [row["loss"] for row in rows(folder)]


class Recorder(Callback):
    """Writes down every event that it gets: its name, and the step or the number it is of."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(trainer: Any, *about: Any) -> None:
            first = about[0] if about else ""
            number = first.step if isinstance(first, (LoadResult, StepMetrics)) else first
            self.events.append(f"{name.removeprefix('on_')} {number}".strip())

        return note
