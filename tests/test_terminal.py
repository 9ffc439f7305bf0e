"""train, the demo and titan-ckpt on a real terminal of 60, 80 and 120 columns: text that fits, in whole words."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from docs.examples import demo, demo_checks
from tests.forked import fork
from tests.test_bad_input import write_config
from tests.world import manager as build
from titan_ckpt.cli.main import main

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WIDTHS = (60, 80, 120)


def on_a_terminal(columns: int, folder: Path, act: Callable[[], object]) -> list[str]:
    """Run in a forked process whose streams are a terminal of this width; return the lines that stay, without colours.

    A line that was drawn over, such as a bar, counts as it was last.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def attached() -> None:
        os.close(master)
        os.login_tty(slave)
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        logging.getLogger().handlers.clear()  # pytest's
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))
        act()

    pid = fork(attached)
    os.close(slave)
    shown: list[bytes] = []
    reader = threading.Thread(target=_read, args=(master, shown))
    reader.start()
    _, status = os.waitpid(pid, 0)
    reader.join()
    os.close(master)
    text = ESCAPES.sub("", b"".join(shown).decode())
    assert status == 0, text
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]


def _read(fd: int, into: list[bytes]) -> None:
    while True:
        try:
            into.append(os.read(fd, 1 << 16))
        except OSError:  # the last process has closed the other end
            return


def called(*words: str) -> int:
    """Call titan-ckpt; --help ends the process."""
    try:
        return main([*words])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with names that are longer than a narrow terminal."""
    folder = tmp_path_factory.mktemp("terminal")
    model = nn.ModuleDict({"a_module_with_a_rather_long_name": nn.ModuleDict({"another_one_inside": nn.Linear(4, 3)})})
    with build(folder / "run", model, async_mode="disabled") as manager:
        manager.save(1, metrics={"loss": 2.5})
        with torch.no_grad():
            model.get_parameter("a_module_with_a_rather_long_name.another_one_inside.weight").add_(1)
        manager.save(2, metrics={"loss": 2.25})
    write_config(folder, {})
    return folder


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_tools_on_a_terminal(columns: int, run: Path) -> None:
    """Every table and every help text fits; a name that does not fit goes on below, and nothing of it is lost."""
    commands = [
        ["ls", "run"],
        ["inspect", "run/checkpoints/step-2", "--all"],
        ["inspect", "run/checkpoints/step-2", "a_module_with_a_rather_long_name.another_one_inside.weight"],
        ["diff", "run/checkpoints/step-1", "run/checkpoints/step-2"],
        ["plan", "run.toml"],
        ["--help"],
        *([command, "--help"] for command in ("convert", "diff", "prune", "save")),
    ]
    lines = on_a_terminal(columns, run, lambda: [called(*words) for words in commands])
    whole = re.compile(r"run/|run\.toml|model\.a_module")  # names and paths that stay in one piece, to be copied
    assert [line for line in lines if len(line) > columns and not whole.search(line)] == []
    text = "\n".join(lines)
    assert "2.2500" in text
    assert "Write the model weights of a checkpoint, or its adapter" in " ".join(text.replace("│", " ").split())
    squeezed = re.sub(r"[\s│└├─]", "", text)
    assert squeezed.count("a_module_with_a_rather_long_name") >= 3


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_training_on_a_terminal(columns: int, tmp_path: Path) -> None:
    """A start and a resume: the header says which; no logger names, no level, no nan; continued lines are indented."""
    write_config(tmp_path, {"output_folder": "run", "training": {"steps": 2, "batch_size": 2, "device": "cpu"}})
    runs = [["train", "run.toml"], ["train", "run.toml", "--training.steps", "3"]]
    lines = on_a_terminal(columns, tmp_path, lambda: [called(*words) for words in runs])
    assert [line for line in lines if len(line) > columns] == []
    text = "\n".join(lines)
    assert "run, starts at step 1 of 2" in text
    assert "goes on after step 2" in " ".join(text.split())
    assert not re.search(r"INFO|titan_ckpt\.|\bnan\b|Warning", text)
    said = [line for line in lines if line and not line.startswith("training")]
    assert all(re.match(r"\d\d:\d\d:\d\d |\s{9}", line) for line in said), said
    starts = [line[9:] for line in said if line[2:3] == ":"]
    assert starts[0].startswith("model   llama3 debug-0.5m, 501 k parameters")
    header = ["model", "data", "steps", "device", "run"]
    assert [line.split()[0] for line in starts if line.split()[0] in header] == 2 * header
    steps = [line for line in starts if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2", "3/3"]
    assert columns < 80 or all(line.endswith("tok/s") for line in steps)


def test_an_error_on_a_terminal_is_the_last_word(tmp_path: Path) -> None:
    """All faults, cut between words."""
    write_config(tmp_path, {})
    words = ["--training.stepz", "1", "--model.flavor", "debug-3m", "--data.sequence_length", "many"]

    def act() -> None:
        assert called("train", "run.toml", *words) == 2

    lines = on_a_terminal(60, tmp_path, act)
    assert max(map(len, lines)) <= 60
    assert "did you mean training.steps?" in " ".join(line.strip() for line in lines)


@dataclass(frozen=True)
class Told(demo.Run):
    """A run whose course is known."""

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["true"])

    def course(self) -> list[tuple[int, float]]:
        return [(step, 7.5 - step / 100) for step in range(1, self.num_steps + 1)]


class ToldStory(demo_checks.Story):
    """A story without folders."""

    resumed_from = 120


@pytest.mark.parametrize("columns", WIDTHS)
def test_what_the_demo_prints_on_a_terminal(columns: int, tmp_path: Path) -> None:
    """Bars with their titles and losses, the table of claims, the losses beside each other, the closing sentence."""
    whole = Told("uninterrupted", "pretrain_hf_export", demo.PRETRAIN_STEPS, {})
    story = ToldStory(whole, whole, whole, whole, whole.course()[: demo.KILL_AT], "")
    claims = [
        demo_checks.Claim("resume from step 120: losses bit for bit", "120 of 120 steps equal", holds=True),
        demo_checks.Claim("merged export in transformers", "largest difference 1.9e-06", holds=False),
    ]

    def act() -> None:
        demo.CONSOLE = console = Console()
        with demo.Stage() as stage:
            stage.train(demo.Attempt(f"pretrain, SIGKILL at step {demo.KILL_AT}", whole))
        console.rule("[bold]Killed and resumed", align="left")
        console.print(demo_checks.claims_table(claims))
        console.print(demo_checks.losses_table(story))

    lines = on_a_terminal(columns, tmp_path, act)
    assert [line for line in lines if len(line) > columns] == []
    words = " ".join(" ".join(lines).split())
    assert "Killed and resumed" in words
    assert "✓ resume" in words
    assert f"pretrain, SIGKILL at step {demo.KILL_AT}" in words or columns < 80
    assert "loss 5.100" in words
