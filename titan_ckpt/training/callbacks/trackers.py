"""Trackers: send logged values to TensorBoard and Weights & Biases. Rank 0 only; both libraries are extras."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.training.callbacks.base import Callback, LogValue, Trainer
from titan_ckpt.training.config import TensorBoardConfig, WandbConfig

RUN_ID = "wandb-run-id"


def require(module: str, table: str) -> None:
    """Raises: ConfigError if the module that a TOML table needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError([f"{table}: {module} is not installed; pip install 'titan-ckpt[{module}]', or leave it out"])


class TensorBoard(Callback):
    """Writes event files. A resumed run adds a file that replaces the steps which are done again."""

    def __init__(self, config: TensorBoardConfig, base_folder: Path) -> None:
        """Raises: ConfigError if tensorboard is not installed."""
        require("tensorboard", "tensorboard")
        self._folder = base_folder / config.folder
        self._writer: Any = None

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if trainer.ranks.rank == 0:
            redone = result.step + 1 if result.step else None
            self._writer = SummaryWriter(str(self._folder), purge_step=redone)

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_histogram(name, np.asarray(value), step)
            elif name != "step":
                self._writer.add_scalar(name, value, step)

    def on_train_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb(Callback):
    """Sends logged values to Weights & Biases. A resumed run continues its W&B run, whose id is kept in a file."""

    def __init__(self, config: WandbConfig, base_folder: Path) -> None:
        """Raises: ConfigError if wandb is not installed."""
        require("wandb", "wandb")
        self._config = config
        self._folder = base_folder
        self._run: Any = None

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        """Raises: ConfigError on all ranks if W&B cannot start the run, for example without a key."""
        import wandb

        problem = ""
        if trainer.ranks.rank == 0:
            try:
                self._begin(trainer, resumed=result.step > 0)
            except wandb.Error as error:
                problem = f"{error} "
        if trainer.ranks.sum(torch.tensor(float(bool(problem)), device=trainer.ranks.device)):
            raise ConfigError([f"wandb: {problem}W&B cannot begin this run; write to disk with WANDB_MODE=offline"])

    def _begin(self, trainer: Trainer, *, resumed: bool) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / RUN_ID
        resumed = resumed and file.exists()
        self._run = wandb.init(
            dir=str(self._folder),
            id=file.read_text().strip() if resumed else None,
            resume="allow" if resumed else None,
            config=asdict(trainer.config),
            **asdict(self._config),
        )
        # W&B would drop steps that are done again after a resume, because its own counter is already past them.
        self._run.define_metric("*", step_metric="step")
        file.write_text(self._run.id)

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        if self._run is None:
            return
        import wandb

        # one bar per number: heights and edges
        bars = {n: (np.asarray(v), np.arange(len(v) + 1)) for n, v in values.items() if isinstance(v, list)}
        histograms = {name: wandb.Histogram(np_histogram=bar) for name, bar in bars.items()}
        self._run.log({**values, **histograms})

    def on_train_end(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
