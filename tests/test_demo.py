"""The demo, shortened: what does not depend on long training holds, and a claim that does not hold is its exit code."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from docs.examples import demo
from tests.forked import Program
from titan_ckpt.training.launch import command


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def forked(run: demo.Run) -> Program:
    return Program(command.main, run.arguments, output=run.folder.with_suffix(".log"))


def test_a_short_demo_proves_everything_but_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 30 steps resume and exports compare well; the losses have not fallen as promised, so it exits with 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "CONSOLE", Console(file=(output := io.StringIO()), width=160))
    monkeypatch.setattr(demo.Run, "start", forked)  # the test below starts train.py as the demo does
    for name, value in {"PRETRAIN_STEPS": 30, "LORA_STEPS": 12, "SAVE_EVERY": 6, "KILL_AT": 8}.items():
        monkeypatch.setattr(demo, name, value)
    assert demo.main() == 1
    printed = output.getvalue()
    marks = re.findall(r"^ *([✓✗]) +(.+?)  ", printed, flags=re.MULTILINE)
    failed = [claim for mark, claim in marks if mark == "✗"]
    assert "loss falls" in failed, printed
    assert [claim for claim in failed if "loss" not in claim and "moves" not in claim] == [], printed
    assert len(marks) == 16
    assert f"{16 - len(failed)} of 16 comparisons hold" in printed


def test_a_run_that_fails_ends_the_demo_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and what the run said last is shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "CONSOLE", Console(file=(output := io.StringIO()), width=160))
    monkeypatch.setattr(demo, "PRETRAIN_STEPS", -1)
    assert demo.main() == 1
    assert "training.steps: expected an integer, 0 or more (steps), found -1" in output.getvalue()
