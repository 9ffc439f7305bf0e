"""Drawn runs of transformers' Trainer: limits, accumulation, places of the kill in the epoch, one rank and two.

A run must read the samples that the uninterrupted one reads, in their order, as well as have its weights and log.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer, TrainingArguments

from tests.integrations.trainer_cases import verdicts_of
from tests.integrations.trainer_runs import LeaveBehind, Tokens, arguments, model, write
from tests.zoo.worlds import Row
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.integrations.transformers import attach


class Point(NamedTuple):
    """A run, and the step that the killed one resumes from."""

    ranks: int
    samples: int
    resumed_from: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.ranks} rank(s), {self.samples} samples, resumed from step {self.resumed_from}: {settings}"


def drawn(number: int) -> Point:
    """Return a point; each is the same in every run."""
    draw = random.Random(number)
    ranks, samples, accumulated = number % 2 + 1, draw.randint(9, 22), draw.choice((1, 2, 3))
    drops = draw.random() < 0.3
    batches = (math.floor if drops else math.ceil)(samples / (2 * ranks))
    steps = max(1, math.ceil(batches / accumulated))
    epochs = draw.choice((2, 3, 2.5))
    last = math.ceil(epochs * steps)
    limit: dict[str, Any] = {"num_train_epochs": epochs}
    if draw.random() < 0.5:
        last = draw.randint(2, last)
        limit = {"max_steps": last}
    places = {"end": [s for s in range(1, last) if s % steps == 0], "within": [s for s in range(1, last) if s % steps]}
    step = draw.choice(draw.choice([place for place in places.values() if place]))
    settings = {
        **limit,
        "gradient_accumulation_steps": accumulated,
        "dataloader_drop_last": drops,
        "eval_strategy": draw.choice(("no", "epoch", "steps")),
        "logging_steps": draw.choice((1, 2, 3)),
        "train_sampling_strategy": draw.choice(("random", "random", "sequential")),
    }
    return Point(ranks, samples, step, settings)


class Recording(Tokens):
    """Says which samples were read for which step."""

    trainer: Trainer

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.read: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append((self.trainer.state.global_step, index))
        return super().__getitem__(index)


def run_point(folder: str, number: str, killed_at: int | None) -> None:
    """Train as a point says."""
    path, point, rank = Path(folder), drawn(int(number)), int(os.environ.get("RANK", 0))
    data = Recording(point.samples)
    callbacks = [] if killed_at is None else [LeaveBehind(killed_at, path / "checkpoints" / f"step-{killed_at}")]
    args = TrainingArguments(**arguments(path, **point.settings))
    trainer = Trainer(model(), args, train_dataset=data, eval_dataset=Tokens(4), callbacks=[*callbacks])
    data.trainer = trainer
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=1)))
    trainer.train()
    write(path, trainer, data.num_read)
    if path.name == "resumed":  # what was read before the kill is not known to this process
        before = torch.load(path.parent / "whole" / f"beside-{rank}.pt")["read"]
        data.read[:0] = [(step, index) for step, index in before if step < point.resumed_from]
    torch.save({"read": data.read}, path / f"beside-{rank}.pt")


def judge(numbers: Iterable[int], folder: Path) -> list[Row]:
    """Return whether the points of these numbers are exact."""
    points = {str(number): drawn(number) for number in numbers}
    rows: list[Row] = []
    for ranks in sorted({point.ranks for point in points.values()}):
        stops = {number: point.resumed_from for number, point in points.items() if point.ranks == ranks}
        rows += verdicts_of(__name__, "run_point", stops, ranks, folder / str(ranks))
    return [(str(points[number]), verdict, note) for number, verdict, note in rows]
