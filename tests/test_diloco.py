"""The worked example of weights from outside: a server and a worker, two processes and a folder between them."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from docs.examples import diloco
from tests.forked import Program
from tests.tiny_run import settings
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.callbacks.diloco import DiLoCoWorker
from titan_ckpt.training.trainer import Trainer

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "diloco.py"
ROUNDS = 4
WORKER = "titan_ckpt.training.callbacks.diloco:DiLoCoWorker"
WITHOUT_DATA = ["optimizer", "lr_scheduler", "rng", "states"]


def as_script(*words: str) -> None:
    sys.argv = [str(EXAMPLE), *words]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def command(role: str, folder: Path) -> Program:
    """Start a role as its docstring says."""
    folder.mkdir(exist_ok=True)
    return Program(as_script, role, str(folder), "--rounds", str(ROUNDS), output=folder / f"{role}.log")


def start(folder: Path) -> tuple[Program, Program]:
    """Start server and worker, as the command does."""
    folder.mkdir(exist_ok=True)
    server = Program(diloco.serve, folder, ["a"], ROUNDS, output=folder / "server.log")
    return server, Program(diloco.work, folder, "a", ROUNDS, output=folder / "worker.log")


def finish(*processes: Program) -> None:
    for process in processes:
        assert process.wait(120) == 0, process.text()


def test_c3_a_parameter_server_run_goes_on_after_both_were_killed(tmp_path: Path) -> None:
    """Weights from the server, inner optimizer and progress from the worker's checkpoint: as if nothing happened."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(command("server", straight), command("worker", straight))
    server, worker = start(killed)
    worker.wait_until((killed / "worker-a" / "step-6").exists)
    worker.kill()
    server.kill()
    worker.wait()
    server.wait()
    finish(*start(killed))
    first, last = (load_file(straight / f"weights-{number}.safetensors") for number in (0, ROUNDS))
    found = load_file(killed / f"weights-{ROUNDS}.safetensors")
    assert all(torch.equal(found[name], value) for name, value in last.items())
    assert not any(torch.equal(first[name], value) for name, value in last.items())
    stored = (killed / "worker-a" / "step-12" / "rank-00000.safetensors").read_bytes()
    assert b'"model.' not in stored and b'"optimizer.' in stored


class Killed(Callback):
    """Ends the process's run in the middle of the third round, without a save."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt


def test_c5_a_worker_is_a_callback_named_in_a_run_file(tmp_path: Path) -> None:
    """The server's last weights are the same whether the worker was interrupted, or not, if it saves its dataloader.

    Without it, as on the page, the worker goes on too; its data begins anew.
    """
    found = []
    exact = [*WITHOUT_DATA, "dataloader"]
    for name, interrupted, components in (
        ("straight", False, exact), ("interrupted", True, exact), ("anew", True, WITHOUT_DATA)
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        server = Program(diloco.serve, folder, ["run"], 3, output=folder / "server.log")
        config = settings(
            folder,
            checkpoint={
                "components": components,
                "save": {"interval": 2},
                "stop": {"on": ["SIGTERM"]},
            },
            training={"steps": 6},
        )
        config = replace(config, callbacks=(WORKER,))
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                Trainer(config, callbacks=[Killed()]).run()
        assert Trainer(config).run().step == 6
        assert server.wait(60) == 0, server.text()
        found.append([load_file(folder / f"weights-{number}.safetensors") for number in (0, 3)])
        step = next(folder.rglob("step-6/MANIFEST.json"))
        assert sorted(Manifest.from_bytes(step.read_bytes(), name).components) == sorted(components)
    (first, straight), (_, interrupted_last), _ = found
    assert all(torch.equal(interrupted_last[name], value) for name, value in straight.items())
    assert not any(torch.equal(first[name], value) for name, value in straight.items())


def test_c5_a_worker_without_saves_is_told_what_its_rounds_are(tmp_path: Path) -> None:
    """Before the first step: the interval of the saves is the length of a round."""
    config = settings(tmp_path, checkpoint={"components": ["optimizer", "rng"], "save": None})
    with pytest.raises(ConfigError, match=r"checkpoint\.save: .* rounds .*; set checkpoint\.save\.interval"):
        Trainer(replace(config, callbacks=(WORKER,))).run()


def test_c5_a_worker_in_a_pipeline_is_refused(tmp_path: Path) -> None:
    """A rank has its stages alone, and the server would get no more than the first rank's."""
    config = settings(tmp_path, checkpoint={"components": ["optimizer", "rng"]})
    trainer: Any = SimpleNamespace(config=config, pipeline=object())
    with pytest.raises(ConfigError, match=r"parallel\.pipeline_parallel: .* the change of a whole model; set it to 1"):
        DiLoCoWorker().on_init_end(trainer)
