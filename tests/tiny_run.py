"""A training run of a few tiny steps, and what it has logged: what tests of the trainer start from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.world import whole
from titan_ckpt.config import from_dict
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.trainer import Trainer


def tables(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return the tables of a run of three tiny steps; `sections` change them; None takes a table or a value away."""
    raw: dict[str, Any] = {
        "output_folder": str(folder / "run"),
        "model": {"flavor": "debug-0.5m"},
        "data": {
            "sequence_length": 16,
            "cache_folder": os.environ["TITAN_CKPT_TESTS_CACHE"],  # one tokenizer for all runs of a session
            "tokenizer": 300,
        },
        "training": {"steps": 3, "batch_size": 4, "device": "cpu"},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"save": {"interval": 2}},
    }
    for name, table in sections.items():
        raw[name] = {**raw.get(name, {}), **table} if isinstance(table, dict) else table
    return raw


def settings(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return the config of such a run."""
    return from_dict(RunConfig, tables(folder, **sections))


def export_base(folder: Path, **export: Any) -> Path:
    """Train one step, and return the Hugging Face folder that it exports."""
    config = settings(folder, training={"steps": 1}, checkpoint={"export": {"format": "hf", **export}})
    Trainer(config).run()
    return folder / "run" / "exports" / "step-1"


def write_toml(folder: Path, **sections: Any) -> Path:
    """Write the run file of such a run to run.toml."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return f"{{ {', '.join(f'{key} = {text(item)}' for key, item in value.items() if item is not None)} }}"
        return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else json.dumps(value)

    path = folder / "run.toml"
    raw = tables(folder, **sections)
    path.write_text("".join(f"{name} = {text(value)}\n" for name, value in raw.items() if value is not None))
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has logged."""
    return [*read_metrics(folder / "run" / "metrics.jsonl")]


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has logged."""
    return [row["loss"] for row in rows(folder)]


class Gradients(Callback):
    """Keeps the whole gradients of every step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer(self, trainer: Any, step: int, grad_norm: float) -> None:
        grads = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        self.found.append(whole({name: grad for name, grad in grads.items() if grad is not None}))


class AfterStep(Callback):
    """Does something when a step ends."""

    def __init__(self, step: int, act: Callable[[Any], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, trainer: Any, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.act(trainer)


def post(trainer: Any, kind: Any = "stop") -> None:
    """Ask for a stop or a save, and wait until that is noticed: by the end of this step, and not within the next."""
    trainer.guard._board.post(kind, "a test")
    while not trainer.guard._board._due:
        time.sleep(0.001)


class Recorder(Callback):
    """Writes down every event that it gets: its name, and the step or the number it is of."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.published: list[str] = []
        """Those of another thread, which come at any time."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(trainer: Any, *about: Any) -> None:
            first = about[0] if about else ""
            number = first.step if isinstance(first, (LoadResult, StepMetrics)) else first
            kept = self.published if name in ("on_committed", "on_exported") else self.events
            kept.append(f"{name.removeprefix('on_')} {number}".strip())

        return note
