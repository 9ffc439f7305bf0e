"""A run that is killed and resumed is the run that was never interrupted: bit for bit, in one process and in two."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.forked import Job
from tests.tiny_run import write_toml
from tests.world import same
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.training.launch import command

STEPS, HALF = 100, 50


def start(config: Path, num_ranks: int) -> Job:
    """Start train.py's `main` on the config with the environment that torchrun gives its ranks.

    Not by torchrun itself, which puts every rank in a session of its own, where a kill would have to look for it.
    """
    return Job(command.main, [str(config)], folder=config.parent, num_ranks=num_ranks)


def wait_for(run: Job, metrics: Path, step: int) -> None:
    """Return once the run has logged `step`."""
    run.wait_until(lambda: bool(logged := rows(metrics)) and logged[-1]["step"] >= step)


def finish(run: Job, code: int = 0) -> None:
    """Wait for the run to end with this exit code on every rank."""
    assert run.codes() == [code] * len(run.ranks), run.text()


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


def resumed_from(step: Path) -> Any:
    """Return the step that the run resumed from before it committed this one."""
    resumed = Manifest.from_bytes((step / MANIFEST_NAME).read_bytes()).resumed_from
    return resumed and resumed["step"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that gives the folder of an uninterrupted run, trained once for each way of training."""

    @functools.cache
    def run(num_ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        finish(start(write_config(folder), num_ranks))
        return folder

    return run


def write_config(folder: Path) -> Path:
    """Write a run's config beside its outputs."""
    return write_toml(
        folder,
        output_folder=str(folder),
        data={"sequence_length": 32},
        training={"steps": STEPS, "max_grad_norm": 1.0},
        optimizer={"implementation": "fused"},  # one operation a step, where FSDP2 takes long for one of each parameter
        checkpoint={"save": {"interval": HALF, "async_mode": "disabled"}},
    )


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["single", "fsdp2"])
def test_a6_fifty_and_fifty_steps_with_a_kill_between_equal_a_hundred(
    tmp_path: Path, whole_run: Callable[[int], Path], num_ranks: int
) -> None:
    """Losses, gradient norms, parameters, optimizer state, generators and data position all agree, to the last bit."""
    whole = whole_run(num_ranks)
    config = write_config(tmp_path)
    metrics, steps = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    run = start(config, num_ranks)
    wait_for(run, metrics, HALF + 3)
    run.wait_until((steps / f"step-{HALF}").exists)  # a thread may take longer
    for rank in run.ranks:
        rank.kill()
    finish(run, -signal.SIGKILL)
    logged_before_kill = course(metrics)
    assert HALF + 3 <= logged_before_kill[-1][0] < STEPS, "the kill must come after the half and before the end"
    assert not (steps / f"step-{STEPS}").exists()
    finish(start(config, num_ranks))

    expected = course(whole / "metrics.jsonl")
    assert [row[0] for row in expected] == list(range(1, STEPS + 1))
    assert course(metrics) == expected
    assert logged_before_kill == expected[: len(logged_before_kill)]
    tensors, states = contents(whole / "checkpoints" / f"step-{STEPS}")
    resumed_tensors, resumed_states = contents(steps / f"step-{STEPS}")
    assert any(".exp_avg" in key for key in tensors)
    assert same(resumed_tensors, tensors)
    for found in (states, resumed_states):
        assert found["state.json"]["states"]["train"].pop("seconds") > 0  # the time it took is all that may differ
    assert resumed_states == states
    assert set(states["rank-00000.json"]) == {"layout", "rng", "data_parallel", "dataloader"}
    assert {"optimizer", "lr_scheduler", "states"} <= set(states["state.json"])
    assert resumed_from(steps / f"step-{STEPS}") == HALF


def test_sigterm_saves_the_step_under_way_and_the_run_goes_on_from_there(
    tmp_path: Path, whole_run: Callable[[int], Path]
) -> None:
    """Asked for a save, a run saves and goes on; told to stop, it saves its last step, and resumes exactly, twice."""
    config = write_config(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "save-request").touch()
    run = start(config, 2)
    wait_for(run, metrics, 7)
    run.wait_until((tmp_path / "save-answer.json").exists)
    asked = json.loads((tmp_path / "save-answer.json").read_text())["step"]
    wait_for(run, metrics, asked + 1)
    run.ranks[-1].terminate()  # one is enough: it tells the others
    finish(run, 75)
    stopped = rows(metrics)[-1]["step"]
    assert max(7, asked + 1) <= stopped < HALF
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {f"step-{asked}", f"step-{stopped}"}
    resumed = start(config, 2)
    wait_for(resumed, metrics, stopped + 5)
    resumed.ranks[0].terminate()
    finish(resumed, 75)
    expected = course(whole_run(2) / "metrics.jsonl")
    assert course(metrics) == expected[: len(rows(metrics))]
    assert stopped + 5 <= len(rows(metrics)) < STEPS
