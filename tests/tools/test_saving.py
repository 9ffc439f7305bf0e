"""`titan-ckpt save` asks a running loop for a save; with --pin the step outlives every later one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from titan_ckpt import KeepConfig, RunGuard
from titan_ckpt.cli.main import main
from titan_ckpt.guard import outside_request


@pytest.mark.parametrize("async_mode", ["disabled", "thread"])
def test_a_pinned_save_is_never_taken_by_retention(
    tmp_path: Path, async_mode: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on saving every step and keeps one of them, and the step that was asked for."""
    answers: list[tuple[int, int]] = []

    def ask() -> None:
        name = outside_request.ask(tmp_path, pin=True)
        answer = outside_request.await_answer(tmp_path, name, 60.0)
        answers.append((0 if answer.error is None else 1, answer.step))

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asking = threading.Thread(target=ask)
    manager = world.manager(tmp_path, model, optimizer, async_mode=async_mode, keep=KeepConfig(latest=1))
    with manager, RunGuard(manager) as guard:
        manager.load()
        asking.start()
        step, until = 0, time.monotonic() + 60
        while not answers and time.monotonic() < until:
            step += 1
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            manager.save(step)
            guard.step_ended(step)
            time.sleep(0.02)
        for _ in range(3):
            step += 1
            manager.save(step)
    asking.join()
    ((code, saved),) = answers
    assert code == 0
    assert sorted(int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*")) == [saved, step]
    assert (tmp_path / f"checkpoints/step-{saved}/PINNED").is_file()
    assert main(["save", "--run", str(tmp_path), "--pin", "--timeout-seconds", "600"]) == 2
    assert "no run is in its training loop here: there is no save-taker.json" in capsys.readouterr().err
    outside_request.announce(tmp_path)
    assert main(["save", "--run", str(tmp_path), "--pin", "--timeout-seconds", "0.3"]) == 1
    assert "no answer" in capsys.readouterr().err
    taker = tmp_path / outside_request.TAKER
    taker.write_text(taker.read_text().replace('"started": "', '"started": "1'))
    assert main(["save", "--run", str(tmp_path), "--timeout-seconds", "600"]) == 2
    assert f"process {os.getpid()} on " in (said := capsys.readouterr().err)
    assert "has ended" in said
