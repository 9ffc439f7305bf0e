"""Which of several ranks speaks, and what is said of libraries; what a terminal shows is in tests/test_terminal.py."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.test_bad_input import write_config
from titan_ckpt.training.launch import terminal
from titan_ckpt.training.launch.command import main


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
