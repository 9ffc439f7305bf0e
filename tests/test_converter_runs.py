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
from tests.tiny_run import settings
from tests.world import assert_same_bytes
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


def run_config(folder: Path, base: Path | None) -> RunConfig:
    """Return a run of 16 steps on the built-in text over a base from a folder, or the two steps that make one."""
    save = {"save": {"interval": 4, "async_mode": "thread"}, "export": [{"format": "hf"}]}
    sections: dict[str, Any] = {
        "output_folder": str(folder),
        "data": {"sequence_length": 32, "tokenizer": {}},
        "training": {"steps": 2, "max_grad_norm": 1.0},
        "optimizer": {"lr": 1e-2},
        "checkpoint": save,
    }
    if base is not None:
        sections["model"] = {"flavor": None, "folder": str(base)}
        sections["data"]["tokenizer"] = {"folder": str(base)}
        sections["training"]["steps"] = STEPS
        save["initial_load"] = [{"path": str(base)}]
    return settings(folder, **sections)


def train(name: str | None, folder: Path, base: Path | None, *callbacks: Callback) -> list[float]:
    """Run to the end, from wherever the folder's steps left off, and return all losses."""
    tables = [] if name is None else SETS[name]
    if name == "lora":
        tables = [{**tables[0], "dropout": 0.2}]  # draws from the generators that a step stores
    converters = from_tables(tables)
    Trainer(run_config(folder, base), converters, callbacks).run()
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def train_slowly(name: str, folder: Path, base: Path) -> None:
    """Run in a process that is to be killed."""
    torch.set_num_threads(1)
    train(name, folder, base, Slow())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has read little text, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    train(None, folder, None)
    return folder / "exports/step-2"


@pytest.mark.parametrize("name", SETS)
def test_a8_the_loss_falls_and_a_killed_run_goes_on(name: str, base: Path, tmp_path: Path) -> None:
    """Killed with -9 once step 4 is committed, the resumed run has the losses and the export of the other, bit for bit.

    Interval saves of adapters hold adapters alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(name, tmp_path / "whole", base)
        assert sum(whole[-4:]) < sum(whole[:4])
        process = Program(train_slowly, name, tmp_path / "run", base, output=tmp_path / "killed.log")
        committed = tmp_path / "run/checkpoints/step-4/MANIFEST.json"
        deadline = time.monotonic() + 100
        while not committed.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, process.text()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "run/exports").exists()
        assert train(name, tmp_path / "run", base) == whole
    finally:
        torch.set_num_threads(threads)
    assert_same_bytes(*(tmp_path / run / f"exports/step-{STEPS}" for run in ("whole", "run")))
    with safe_open(tmp_path / "run/checkpoints/step-8/rank-00000.safetensors", "pt") as file:
        saved = {key for key in file.keys() if key.startswith("model.")}  # noqa: SIM118  # not a mapping
    assert all("lora_" in key for key in saved) == ("lora" in name) and saved
