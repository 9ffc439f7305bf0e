"""A run prints lines that fit a console of 60, 80 and 120 columns, and plain text into a pipe."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from tests.test_bad_input import write_config
from titan_ckpt import progress
from titan_ckpt.training.callbacks import console as console_callbacks
from titan_ckpt.training.launch import terminal
from titan_ckpt.training.launch.command import main

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def own_log() -> Iterator[None]:
    """Have a root logger without handlers, as a new process has it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def trained(columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[str], str]:
    """Train on a console of this width; return the exit code, the lines that stay, and everything that was shown."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=columns, color_system="standard", legacy_windows=False)
    for module in (progress, terminal, console_callbacks):
        monkeypatch.setattr(module, "CONSOLE", console)
    with own_log():
        code = main([str(write_config(folder, {})), *words])
    plain = ESCAPES.sub("", shown.getvalue())
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.split("\n")]
    return code, [line for line in lines if line and not line.startswith("training")], plain


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_run_on_a_console(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header, a line for each step that fits 80 columns, no logger names, no nan; a long line goes on below."""
    monkeypatch.chdir(tmp_path)
    code, lines, shown = trained(columns, tmp_path, monkeypatch, "--output_folder", "run")
    assert code == 0
    assert max(map(len, lines)) <= columns
    starts = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines if line[2:3] == ":"]
    assert starts[0] == "model   llama3 debug-0.5m, 501 k parameters, all trained"[: columns - 9].rpartition(" ")[
        0
    ] or (starts[0].startswith("model   llama3 debug-0.5m, 501 k parameters"))
    assert [line.split()[0] for line in starts if line.split()[0] in ("model", "data", "device", "run")] == [
        "model", "data", "device", "run"
    ]  # fmt: skip
    assert any(line.startswith("run     run, starts at step 1 of 4") for line in starts)
    assert all(line.startswith(" " * 9) for line in lines if line[2:3] != ":")
    steps = [line for line in starts if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    if columns >= 80:
        assert all(line.endswith("tok/s") for line in steps)
    assert "nan" not in shown
    assert "INFO" not in shown
    assert "titan_ckpt." not in shown
    assert "training" in shown, "a bar was shown"


def test_an_error_on_a_console_is_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults, cut between words."""
    words = ["--training.stepz", "1", "--model.flavor", "debug-3m", "--data.sequence_length", "many"]
    code, lines, _ = trained(60, tmp_path, monkeypatch, *words)
    assert code == 2
    assert max(map(len, lines)) <= 60
    assert "did you mean training.steps?" in " ".join(line.strip() for line in lines)


def test_rank_0_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks say only what is wrong, and who they are; foreign warnings without a remedy are said by none."""
    monkeypatch.setenv("RANK", "3")
    with own_log():
        terminal.configure_logging()
        log = logging.getLogger("titan_ckpt.x")
        log.info("hello")
        log.warning("careful")
        for name, text in terminal.FOREIGN.items():
            foreign = logging.getLogger(None if name == "root" else name)
            foreign.warning("before %s after", text)
            foreign.warning("something else of %s", name)
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[rank")]
    assert said[0] == "rank 3: careful"
    assert not any("before" in line for line in said)
    assert "rank 3: something else of torchao" in said


def test_a_fault_that_all_ranks_share_is_said_once_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad setting: the first rank of each host speaks, and all end with 2."""
    path = write_config(tmp_path, {"training": {"stepz": 1}})
    said = []
    for rank in ("0", "1"):
        monkeypatch.setitem(os.environ, "LOCAL_RANK", rank)
        assert main([str(path)]) == 2
        said.append(capsys.readouterr().err)
    assert "training.stepz" in said[0]
    assert said[1] == ""
