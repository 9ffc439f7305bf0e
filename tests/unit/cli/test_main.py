"""The command line itself: version, completion, what it imports, and retention by hand as a run would decide it.

The commands are tested on real folders of every format in tests/tools.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig, __version__
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


def test_prune_keeps_what_the_run_would_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the run resumed from stays; which run saved last is told by the steps, not by clocks."""
    config = CheckpointConfig(save=SaveConfig(interval=1))

    def deletes(keep: str = "latest = 1") -> list[int]:
        assert main(["prune", str(tmp_path), "--keep", keep, "--dry-run", "--json"]) == 0
        deleted: list[int] = json.loads(capsys.readouterr().out)["deleted"]
        return deleted

    with CheckpointManager(config, model_parts=[nn.Linear(2, 3)], base_folder=tmp_path) as manager:
        manager.save(1)
        manager.save(2)
    assert deletes() == [1]
    assert deletes("latest = 2") == []
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")
    with CheckpointManager(config, model_parts=[nn.Linear(2, 3)], base_folder=tmp_path) as manager:
        manager.load()
        monkeypatch.setattr(time, "time", lambda: 1e9)
        manager.save(3)
        manager.wait()
        monkeypatch.undo()
    assert deletes() == []


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "report", "plan"])
def test_a_missing_folder_is_one_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a message, no traceback."""
    assert main([command, str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert error.count("\n") == 1
