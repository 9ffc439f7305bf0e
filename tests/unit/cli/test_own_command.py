"""A new command is one file: a module in a folder of commands, such as this one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro
from rich.console import Console

from titan_ckpt.cli import commands
from titan_ckpt.cli.command import DIFFERENT, Shown, place
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError


@dataclass(frozen=True)
class Count(Shown):
    """Count the entries of a folder."""

    folder: tyro.conf.Positional[Path]

    def run(self, console: Console) -> int:
        if not place(self.folder).is_dir():
            raise ConfigError([f"{self.folder} is no folder"])
        number = len([*self.folder.iterdir()])
        self.say(console, f"{number} entries", number=number)
        return DIFFERENT if number else 0


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module of this name among the commands: it is this one."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "own.py").write_text(f"from {__name__} import Count\n")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path / "folder")])


def test_a_command_of_a_new_file_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its arguments, its help, its sentence, its JSON object, its exit code and its errors are those of any command."""
    (tmp_path / "file").touch()
    assert main(["count", str(tmp_path)]) == DIFFERENT
    assert capsys.readouterr().out == "2 entries\n"
    assert main(["count", str(tmp_path), "--json"]) == DIFFERENT
    assert json.loads(capsys.readouterr().out) == {"number": 2}
    assert main(["count", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"titan-ckpt: config: 1 problem(s) {tmp_path / 'file'} is no folder\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Count the entries of a folder." in capsys.readouterr().out
