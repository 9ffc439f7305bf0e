"""The process: profiler traces, and garbage collection at the same steps on every rank."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from titan_ckpt.training.callbacks.base import Callback, StepMetrics, Trainer
from titan_ckpt.training.config import ProfilingConfig

logger = logging.getLogger(__name__)

PROFILES = "profiles"
"""Folder of traces in the output folder."""


class Profiler(Callback):
    """Writes traces of a few steps at an interval: <folder>/step-<last traced>-rank-<r>.json.gz, for Perfetto."""

    def __init__(self, config: ProfilingConfig, base_folder: Path) -> None:
        self._config = config
        self._folder = base_folder / PROFILES
        self._profile: torch.profiler.profile | None = None
        self._step = 0

    def on_train_begin(self, trainer: Trainer) -> None:
        cuda = [ProfilerActivity.CUDA] if trainer.ranks.device.type == "cuda" else []
        self._folder.mkdir(parents=True, exist_ok=True)

        def write(profile: Any) -> None:
            path = self._folder / f"step-{self._step}-rank-{trainer.ranks.rank}.json.gz"
            profile.export_chrome_trace(str(path))
            logger.info("trace: %s", path)

        self._profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=torch.profiler.schedule(wait=self._config.interval - 2, warmup=1, active=1),
            on_trace_ready=write,
            record_shapes=True,
            acc_events=True,
        )
        self._profile.start()

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if self._profile is not None:
            self._step = metrics.step
            self._profile.step()

    def on_train_end(self, trainer: Trainer) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


class GarbageCollection(Callback):
    """Collects on all ranks at the same steps. Otherwise ranks pause at different steps, and all wait each time."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = False

    def on_train_begin(self, trainer: Trainer) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step % self._interval == 0:
            gc.collect()

    def on_train_end(self, trainer: Trainer) -> None:
        if self._was_enabled:
            gc.enable()
