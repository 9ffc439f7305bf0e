"""A run that is killed and resumed is the run that was never interrupted: bit for bit, in one process and in two."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
STEPS, HALF = 100, 50

CONFIG = """
output_folder = "{output}"

[model]
flavor = "debug-0.5m"

[data]
sequence_length = 32
cache_folder = "{cache}"

[training]
steps = 100
batch_size = 4
accumulation = 2
max_grad_norm = 1.0

[optimizer]
lr = 3e-3

[checkpoint.save]
interval = 50
async_mode = "{async_mode}"
"""

LORA = """
[[converters]]
kind = "lora"
target_modules = ["wq", "wk", "w2"]
rank = 4
dropout = 0.2
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share the tokenizer and the tokenised corpus between the runs of this file."""
    return tmp_path_factory.mktemp("cache")


@dataclass
class Run:
    """The processes of one run, one per rank."""

    ranks: list[subprocess.Popen[str]]

    def finish(self) -> None:
        """Wait for the run to end well."""
        outputs = [rank.communicate(timeout=240)[0] for rank in self.ranks]
        assert [rank.returncode for rank in self.ranks] == [0] * len(self.ranks), "\n".join(outputs)

    def wait_for(self, metrics: Path, step: int) -> None:
        """Return once the run has logged `step`."""
        deadline = time.monotonic() + 240
        while not rows(metrics) or rows(metrics)[-1]["step"] < step:
            assert all(rank.poll() is None for rank in self.ranks), "\n".join(r.communicate()[0] for r in self.ranks)
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send_signal(number)


def start(config: Path, num_ranks: int) -> Run:
    """Start train.py on the config with the environment that torchrun gives its ranks.

    Not by torchrun itself, which puts every rank in a session of its own, where a kill would have to look for it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1"}
    if num_ranks > 1:
        shared |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Run([
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), str(config)],
            env=shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ])  # fmt: skip


def rows(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics.jsonl that may be growing."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line) for line in lines]


def course(metrics: Path) -> list[tuple[float, ...]]:
    """Return what must repeat of every step."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["num_tokens"]) for r in rows(metrics)]


def contents(step: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return every tensor and every state of a committed step."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(step.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {f"{file.name}:{key}": opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    states = {file.name: json.loads(file.read_bytes()) for file in step.glob("*.json") if file.name != "MANIFEST.json"}
    return tensors, states


@pytest.mark.parametrize(
    ("num_ranks", "async_mode", "converters"),
    [(1, "disabled", ""), (1, "thread", LORA), (2, "disabled", "")],
    ids=["single", "lora_dropout_async", "fsdp2"],
)
def test_fifty_and_fifty_steps_with_a_kill_between_equal_a_hundred(
    tmp_path: Path, cache: Path, num_ranks: int, async_mode: str, converters: str
) -> None:
    """Losses, gradient norms, parameters, optimizer state, generators and data position all agree, to the last bit."""
    configs = {}
    for name in ("whole", "killed"):
        configs[name] = tmp_path / f"{name}.toml"
        text = CONFIG.format(output=tmp_path / name, cache=cache, async_mode=async_mode)
        configs[name].write_text(text + converters)
    start(configs["whole"], num_ranks).finish()

    metrics = tmp_path / "killed" / "metrics.jsonl"
    run = start(configs["killed"], num_ranks)
    run.wait_for(metrics, HALF + 3)
    run.send(signal.SIGKILL)
    for rank in run.ranks:
        rank.communicate()
    assert [rank.returncode for rank in run.ranks] == [-signal.SIGKILL] * num_ranks
    logged_before_kill = course(metrics)
    assert HALF + 3 <= logged_before_kill[-1][0] < STEPS, "the kill must come after the half and before the end"
    steps = tmp_path / "killed" / "checkpoints"
    assert (steps / f"step-{HALF}").is_dir()
    assert not (steps / f"step-{STEPS}").exists()
    start(configs["killed"], num_ranks).finish()

    whole = course(tmp_path / "whole" / "metrics.jsonl")
    assert [row[0] for row in whole] == list(range(1, STEPS + 1))
    assert course(metrics) == whole
    assert logged_before_kill == whole[: len(logged_before_kill)]
    tensors, states = contents(tmp_path / "whole" / "checkpoints" / f"step-{STEPS}")
    resumed_tensors, resumed_states = contents(steps / f"step-{STEPS}")
    assert resumed_tensors.keys() == tensors.keys()
    assert any(".exp_avg" in key for key in tensors)
    assert [k for k in tensors if not torch.equal(tensors[k], resumed_tensors[k])] == []
    assert resumed_states == states
    assert set(states["rank-00000.json"]) == {"rng", "dataloader"}
    assert {"optimizer", "lr_scheduler", "states"} <= set(states["state.json"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sigterm_saves_the_step_under_way_and_the_run_goes_on_from_there(
    tmp_path: Path, cache: Path, num_ranks: int
) -> None:
    """A run told to stop exits well with a checkpoint of its last step, though none was due, and resumes bit for bit."""
    configs = {}
    for name in ("whole", "stopped"):
        configs[name] = tmp_path / f"{name}.toml"
        configs[name].write_text(CONFIG.format(output=tmp_path / name, cache=cache, async_mode="disabled"))
    start(configs["whole"], num_ranks).finish()
    run = start(configs["stopped"], num_ranks)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    run.wait_for(metrics, 7)
    run.ranks[-1].terminate()  # one is enough: it tells the others
    run.finish()
    stopped = rows(metrics)[-1]["step"]
    assert 7 <= stopped < HALF
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{stopped}").is_dir()
    start(configs["stopped"], num_ranks).finish()
    assert course(metrics) == course(tmp_path / "whole" / "metrics.jsonl")
