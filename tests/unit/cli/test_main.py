"""The command line on real checkpoints: tables, exit codes, messages."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from torch import nn

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.cli.main import main


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Two committed steps."""
    config = CheckpointConfig(save=SaveConfig(interval=1))
    with CheckpointManager(config, model_parts=[nn.Linear(2, 3)], base_folder=tmp_path) as manager:
        manager.save(1)
        manager.save(2)
    return tmp_path / "checkpoints"


def test_ls_lists_the_steps(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each committed step is a row."""
    assert main(["ls", str(steps)]) == 0
    out = capsys.readouterr().out
    assert "full" in out
    assert "rng" in out


def test_ls_says_what_a_policy_would_delete_and_deletes_nothing(
    steps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of two stays; a pin and having been resumed from keep the other; a bad policy is one message.

    Which run saved last is told by the steps, for the clock of its machine may have been put back.
    """

    def deletes(keep: str = "latest = 1") -> bool:
        assert main(["ls", str(steps), "--keep", keep]) == 0
        out = capsys.readouterr().out
        assert "keeps" in out
        return "deletes" in out

    assert deletes()
    assert not deletes("latest = 2")
    (steps / "step-1" / "PINNED").touch()
    assert not deletes()
    (steps / "step-1" / "PINNED").unlink()
    shutil.rmtree(steps / "step-2")
    config = CheckpointConfig(save=SaveConfig(interval=1))
    with CheckpointManager(config, model_parts=[nn.Linear(2, 3)], base_folder=steps.parent) as manager:
        manager.load()
        monkeypatch.setattr(time, "time", lambda: 1e9)
        manager.save(3)
        manager.wait()
        monkeypatch.undo()
    assert not deletes()
    for wrong in ("latest = 0", "latest =", "newest = 1", ""):
        assert main(["ls", str(steps), "--keep", wrong]) == 1
        assert "--keep" in capsys.readouterr().err
    assert {"step-1", "step-3"} <= {path.name for path in steps.iterdir()}


def test_inspect_lists_the_tensors(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, dtypes and shapes, whatever the format."""
    assert main(["inspect", str(steps / "step-2")]) == 0
    out = capsys.readouterr().out
    assert "model.weight" in out
    assert "[3, 2]" in out


def test_verify_passes_and_names_a_damaged_file(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole step verifies; one flipped bit is found and its file named."""
    assert main(["verify", str(steps / "step-2")]) == 0
    path = steps / "step-2" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(steps / "step-2")]) == 1
    assert "rank-00000.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_missing_folder_is_one_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and a message, no traceback."""
    assert main([command, str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
