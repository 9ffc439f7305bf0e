"""A run that only loads, beside a run that saves and keeps one step: every load takes a whole step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from tests.forked import Program
from tests.run_folder import RunFolder
from tests.world import manager as build
from titan_ckpt import KeepConfig, ResumeConfig, SaveConfig
from titan_ckpt.directory import names
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointNotFoundError
from titan_ckpt.testing import distributed


def save_without_a_pause(folder: RunFolder) -> None:
    """Save step after step, keep the newest, and say so when there are two."""
    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    save = SaveConfig(interval=1, async_mode="disabled", keep=KeepConfig(latest=1))
    with build(folder, model, save=save) as manager:
        for step in range(1, 1_000_000):
            for parameter in model.parameters():
                nn.init.constant_(parameter, step)
            manager.save(step)
            if step == 2:
                print("ready", flush=True)


@contextmanager
def writing(folder: RunFolder) -> Iterator[Program]:
    """Run a process that saves without a pause, for the time of the block."""
    folder.base.mkdir(exist_ok=True)
    writer = Program(save_without_a_pause, folder, output=folder.base / "writer.txt")
    try:
        writer.wait_until(lambda: "ready" in writer.text())
        yield writer
    finally:
        writer.kill()
        writer.wait()


def load(folder: RunFolder | Path, step: int | None = None) -> int:
    """Load as a run without [checkpoint.save]; return the step, whose number every weight must have."""
    folder = RunFolder(folder) if isinstance(folder, Path) else folder
    model = nn.Linear(64, 64)
    loaded = world.load(build(folder, model, save=None, resume=ResumeConfig(step=step))).step
    assert {value for p in model.parameters() for value in p.detach().unique().tolist()} == {float(loaded)}
    return loaded


def test_loads_beside_a_writer_that_keeps_one_step(run_folder: RunFolder) -> None:
    """No load fails, none starts from step 0, and none goes back; the writer lives and has gone on meanwhile."""
    with writing(run_folder) as writer:
        steps = [load(run_folder) for _ in range(3 if run_folder.url else 50)]
        while steps[-1] == steps[0] and writer.poll() is None:  # the writer has not been given its turn yet
            steps.append(load(run_folder))
        assert writer.poll() is None
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1]


def test_two_ranks_load_the_same_step_beside_a_writer(tmp_path: Path) -> None:
    """All ranks agree to go on to the newer step, also if the older one vanishes between their looks at it."""
    with writing(RunFolder(tmp_path)):
        _load_on_two_ranks(tmp_path)


@distributed(nproc=2)
def _load_on_two_ranks(folder: Path) -> None:
    line = Coordinator.current(60)
    for _ in range(15):
        steps = line.gather("loaded", load(folder))
        assert steps[0] == steps[1] != 0


def save(folder: Path, step: int) -> None:
    with build(folder, nn.Linear(64, 64)) as manager:
        manager.load()
        manager.save(step)


def test_a_step_asked_for_by_number_that_vanishes_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never becomes another step, and the error names it: no bare FileNotFoundError."""
    save(tmp_path, 1)
    read = posix.read_whole

    def vanish(path: Path, max_bytes: int) -> bytes:
        if path.name == "state.json":
            path.parent.rename(tmp_path / "gone")
        return read(path, max_bytes)

    monkeypatch.setattr(posix, "read_whole", vanish)
    with pytest.raises(CheckpointNotFoundError, match=r"step-1: was deleted while it was loaded"):
        load(tmp_path, step=1)


def test_a_step_that_vanishes_from_a_listing_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed again, because the step that made it obsolete was not in the first list."""
    save(tmp_path, 1)
    root = tmp_path / "checkpoints"
    inspect = names.inspect

    def replaced(path: Path, step: int, **waits: Any) -> names.CommittedStep:
        monkeypatch.undo()
        path.rename(tmp_path / "gone")
        save(tmp_path, 2)
        return inspect(path, step, **waits)

    monkeypatch.setattr(names, "inspect", replaced)
    assert CheckpointDirectory(root, Coordinator.current()).steps() == [2]
