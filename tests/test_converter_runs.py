"""Every converter and pair on real text: the loss falls, and a run that is killed goes on as if it had not been."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.converter_sets import SETS
from tests.forked import Program
from tests.world import assert_same_bytes
from titan_ckpt.config import from_dict
from titan_ckpt.converters import from_tables
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.callbacks.console import read_metrics
from titan_ckpt.training.config import RunConfig
from titan_ckpt.training.trainer import Trainer

STEPS = 16


class Slow(Callback):
    """Takes its time after step 5, so that the run is not over when it is killed."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if metrics.step > 5:
            time.sleep(0.3)


def run_config(folder: Path, base: Path | None, cache: Path) -> RunConfig:
    """Return a run of 16 steps on the built-in text over a base from a folder, or the two steps that make one."""
    raw: dict[str, Any] = {
        "output_folder": str(folder),
        "model": {"flavor": "debug-0.5m"} if base is None else {"folder": str(base)},
        "data": {"sequence_length": 32, "cache_folder": str(cache)},
        "training": {"steps": STEPS if base is not None else 2, "batch_size": 4, "max_grad_norm": 1.0, "device": "cpu"},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"save": {"interval": 4, "async_mode": "thread"}, "export": [{"format": "hf"}]},
    }
    if base is not None:
        raw["data"]["tokenizer"] = {"folder": str(base)}
        raw["checkpoint"]["initial_load"] = [{"path": str(base)}]
    return from_dict(RunConfig, raw)


def train(name: str | None, folder: Path, base: Path | None, cache: Path, *callbacks: Callback) -> list[float]:
    """Run to the end, from wherever the folder's steps left off, and return all losses."""
    converters = from_tables([] if name is None else SETS[name])
    Trainer(run_config(folder, base, cache), converters, callbacks).run()
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def train_slowly(name: str, folder: Path, base: Path, cache: Path) -> None:
    """Run in a process that is to be killed."""
    torch.set_num_threads(1)
    train(name, folder, base, cache, Slow())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that has read little text, as a Hugging Face folder; and the folder of what all runs share."""
    folder, cache = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("cache")
    train(None, folder, None, cache)
    return folder / "exports/step-2", cache


@pytest.mark.parametrize("name", SETS)
def test_a8_the_loss_falls_and_a_killed_run_goes_on(name: str, base: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed with -9 once step 4 is committed, the resumed run has the losses and the export of the other, bit for bit.

    Interval saves of adapters hold adapters alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(name, tmp_path / "whole", *base)
        assert sum(whole[-4:]) < sum(whole[:4])
        process = Program(train_slowly, name, tmp_path / "run", *base, output=tmp_path / "killed.log")
        committed = tmp_path / "run/checkpoints/step-4/MANIFEST.json"
        deadline = time.monotonic() + 100
        while not committed.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, process.text()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "run/exports").exists()
        assert train(name, tmp_path / "run", *base) == whole
    finally:
        torch.set_num_threads(threads)
    assert_same_bytes(*(tmp_path / run / f"exports/step-{STEPS}" for run in ("whole", "run")))
    with safe_open(tmp_path / "run/checkpoints/step-8/rank-00000.safetensors", "pt") as file:
        saved = {key for key in file.keys() if key.startswith("model.")}  # noqa: SIM118  # not a mapping
    assert all("lora_" in key for key in saved) == ("lora" in name) and saved
