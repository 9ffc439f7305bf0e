"""`titan-ckpt init`: run files that are valid as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from titan_ckpt.cli.commands.training import TEMPLATES, Init
from titan_ckpt.cli.main import main
from titan_ckpt.training.run_file import read_run

KINDS: tuple[str, ...] = get_args(get_type_hints(Init)["kind"])


def test_every_kind_has_a_template() -> None:
    """And every template a kind."""
    assert {path.stem for path in TEMPLATES.iterdir()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_file_is_valid_as_it_is_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key exists and holds what it may; it saves, and exports for transformers."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind]) == 0
    config, _ = read_run("run.toml")
    assert config.checkpoint.save is not None
    assert {"hf", "hf_quantized"} & {export.format for export in config.checkpoint.export}


def test_the_answers_are_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data is quoted as TOML; the next command is named, and a missing answer. tests/tools has those with a model."""
    monkeypatch.chdir(tmp_path)
    Path('my "text" 😀.txt').write_text("text")
    assert main(["init", "lora", "--data", 'my "text" 😀.txt', "--file", "lora.toml"]) == 0
    config, converters = read_run("lora.toml")
    assert config.data.corpus == 'my "text" 😀.txt'
    assert [converter.kind for converter in converters] == ["lora"]
    assert main(["init", "pretrain"]) == 0
    assert main(["init", "ranks", "--file", "ranks.toml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "lora.toml is written. Next: set model.folder, then titan-ckpt train lora.toml",
        "run.toml is written. Next: titan-ckpt train run.toml",
        "ranks.toml is written. Next: torchrun --nproc-per-node auto -m titan_ckpt train ranks.toml",
    ]


def test_nothing_is_overwritten_or_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All faults in one message, exit code 2, and the file is as it was."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("mine")
    assert main(["init", "lora", "--model", "nowhere", "--data", "nothing.txt"]) == 2
    said = capsys.readouterr().err
    assert "3 problem(s)" in said
    assert "run.toml exists" in said
    assert "nowhere/config.json is not there" in said
    assert "nothing.txt is not there" in said
    assert Path("run.toml").read_text() == "mine"
    Path("nowhere").mkdir()
    Path("nowhere", "config.json").write_text("{}")
    assert main(["init", "pretrain", "--model", "nowhere", "--file", "x/run.toml"]) == 2
    assert "x is no folder" in capsys.readouterr().err
    assert main(["init", "pretrain", "--model", "nowhere", "--file", "other.toml"]) == 2
    said = capsys.readouterr().err
    assert "starts from random values" in said
    assert "leave it out, or train the model on with titan-ckpt init finetune, lora or qat" in said
