"""The command line itself: version, completion, what it imports, and retention by hand as a run would decide it.

The commands are tested on real folders of every format in tests/tools.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.world import manager as build
from titan_ckpt import __version__
from titan_ckpt.cli import tables
from titan_ckpt.cli.main import main

COMMANDS = ("ls", "inspect", "verify", "diff", "convert", "merge", "prune", "pin", "unpin", "save", "plan", "report")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for scripts and bug reports."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"titan-ckpt {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_script_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell that sources it offers the commands and their options."""
    with pytest.raises(SystemExit) as end:
        main(["--tyro-print-completion", shell])
    assert end.value.code in (0, None)
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "--max-shard-bytes" in script


def test_ls_pins_and_prune_do_not_wait_for_torch(tmp_path: Path) -> None:
    """They answer at once, because they read manifests alone."""
    code = (
        "import sys; from titan_ckpt.cli.main import main; "
        f"codes = [main(['ls', {str(tmp_path)!r}]), main(['pin', {str(tmp_path)!r}]), "
        f"main(['prune', {str(tmp_path)!r}, '--keep', 'latest = 1'])]; "
        "assert codes == [2, 2, 2], codes; assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["--help"], ["ls"], ["ls", "--json"]])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(tmp_path: Path, command: list[str]) -> None:
    """`titan-ckpt ls RUN | head -1` prints no traceback; the code is the one that SIGPIPE would give."""
    if command[0] == "ls":
        with build(tmp_path, nn.Linear(1, 1)) as m:
            m.save_seed()
    places = [str(tmp_path)] if command[0] == "ls" else []
    code = "import sys; from titan_ckpt.cli.main import main; sys.exit(main())"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        arguments = [sys.executable, "-c", code, *command[:1], *places, *command[1:]]
        done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", [["--help"], ["inspect", "FOLDER"], ["--tyro-print-completion", "bash"]])
def test_a_locale_without_a_character_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """With an ASCII terminal a name is escaped, and boxes and bullets are drawn with what there is."""
    save_file({"w\u00fc": torch.ones(1)}, tmp_path / "model.safetensors")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "__stdout__", shown)
    with contextlib.suppress(SystemExit):
        assert main([str(tmp_path) if word == "FOLDER" else word for word in command]) == 0
    shown.seek(0)
    text = shown.read()
    assert len(text) > 60
    assert ("w\\xfc" in text) is (command[0] == "inspect")
    assert "\\u2022" not in text or command[0].startswith("--tyro")


@pytest.mark.parametrize("command", [["--version"], ["inspect", "FOLDER"], ["inspect", "FOLDER", "--json"]])
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """A full disk under a redirected output is no traceback, and the line says which file it is, printed or in JSON."""
    save_file({"w" * 10_000: torch.ones(1)}, tmp_path / "model.safetensors")
    shown = io.StringIO()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", shown)
        assert main([str(tmp_path) if word == "FOLDER" else word for word in command]) == 2
        with contextlib.suppress(OSError):
            full.close()
    assert shown.getvalue() == "titan-ckpt: standard output: No space left on device\n"


def test_many_tensors_without_a_pattern_are_lines_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one line; rich would take half a minute to lay out a table of 50,000."""
    names = [f"w{i:05d}{'abcdefgh'[i % 8]}" for i in range(2_000)]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "_table", None)
    assert main(["inspect", "."]) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert "2000 tensors" in first and "model: 2000 tensors" in head
    assert [line.split() for line in lines] == [[name, "[1]", "4", "B"] for name in names]


def test_prune_keeps_what_the_run_would_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the run resumed from stays; which run saved last is told by the steps, not by clocks."""

    def deletes(keep: str = "latest = 1") -> list[int]:
        assert main(["prune", str(tmp_path), "--keep", keep, "--dry-run", "--json"]) == 0
        deleted: list[int] = json.loads(capsys.readouterr().out)["deleted"]
        return deleted

    with build(tmp_path, nn.Linear(2, 3)) as manager:
        manager.save(1)
        manager.save(2)
    assert deletes() == [1]
    assert deletes("latest = 2") == []
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")
    with build(tmp_path, nn.Linear(2, 3)) as manager:
        manager.load()
        monkeypatch.setattr(time, "time", lambda: 1e9)
        manager.save(3)
        manager.wait()
        monkeypatch.undo()
    assert deletes() == []


def test_steps_that_a_rollback_left_are_offered_and_deleted_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The run says how to delete them, ls and prune show them, --set-aside deletes all but a pinned one."""
    with build(tmp_path, nn.Linear(2, 3), async_mode="disabled") as manager:
        for step in range(1, 5):
            manager.save(step)
    assert main(["pin", str(tmp_path / "checkpoints/step-4")]) == 0
    with build(tmp_path, nn.Linear(2, 3), async_mode="disabled") as manager:
        manager.load(1)
        manager.save(2)
    assert "`titan-ckpt prune RUN --set-aside` does" in caplog.text
    run, policy = str(tmp_path), ("--keep", "latest = 1")

    def aside() -> list[str]:
        return sorted(p.name.partition(".")[0] for p in (tmp_path / "checkpoints").glob("step-*.abandoned-*"))

    capsys.readouterr()
    assert main(["ls", run]) == 0
    assert "set aside when its run went back" in " ".join(capsys.readouterr().out.split())
    assert main(["prune", run, *policy]) == 0
    assert "kept 3 folders that a rollback set aside" in capsys.readouterr().out
    assert main(["prune", run, "--set-aside", "--dry-run"]) == 1
    said = capsys.readouterr().out
    assert "would delete 2 folders that a rollback" in said and "holds what is not ours: PINNED" in said
    assert aside() == ["step-2", "step-3", "step-4"]
    assert main(["prune", run, "--set-aside"]) == 1
    said = capsys.readouterr().out
    assert "deleted 2 folders that a rollback" in said
    assert "holds what is not ours: PINNED" in said
    assert aside() == ["step-4"]
    next((tmp_path / "checkpoints").glob("*.abandoned-*/PINNED")).unlink()
    assert main(["prune", run, "--set-aside"]) == 0
    assert (aside(), sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))) == ([], ["step-1", "step-2"])
    assert main(["prune", run]) == 2
    assert "nothing says what to delete" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "report", "plan"])
def test_a_missing_folder_is_one_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a message, no traceback."""
    assert main([command, str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert error.count("\n") == 1
