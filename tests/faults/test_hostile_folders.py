"""Folders that somebody made to harm: `titan-ckpt inspect` answers in bounded time, with a table or with one line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titan_ckpt.cli.main import main

MODULE = "base_model.model." + "a" * 40 + "!"


def adapter(folder: Path, pattern: str) -> Path:
    """Write a PEFT adapter whose config gives the ranks of modules by this expression."""
    folder.mkdir()
    save_file(
        {f"{MODULE}.lora_A.weight": torch.ones(2, 3), f"{MODULE}.lora_B.weight": torch.ones(3, 2)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {pattern: 8}, "alpha_pattern": {pattern: 8}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", "((a*)*)*b", "a{1,999}" * 30 + "b"])
def test_a_regular_expression_of_a_folder_does_not_hang(tmp_path: Path, pattern: str) -> None:
    """An expression on which `re` backtracks for ever matches nothing here, and the folder is listed."""
    started = time.monotonic()
    assert main(["inspect", str(adapter(tmp_path / "adapter", pattern))]) == 0
    assert time.monotonic() - started < 5


def test_a_regular_expression_that_needs_backtracking_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file, the setting, the expression and the cause."""
    folder = adapter(tmp_path / "adapter", r"(a+)\1")
    assert main(["inspect", str(folder)]) == 1
    assert capsys.readouterr().err == (
        f"titan-ckpt: {folder}/adapter_config.json: rank_pattern has '(a+)\\\\1', which is no regular expression that "
        "can be used: it holds a backreference, which is not matched in bounded time; alpha_pattern has '(a+)\\\\1', "
        "which is no regular expression that can be used: it holds a backreference, which is not matched in bounded "
        "time. Save the adapter again, or take another\n"
    )


@pytest.mark.parametrize("name", ["[/x]", "[red]x", "[link=file:///etc]x[/link]", ":smile:", "\x1b[2Jx"])
def test_the_name_of_a_tensor_is_shown_and_not_interpreted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Markup and control characters in a name end no command, and change no terminal."""
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert name.replace("\x1b", "\\x1b") in shown
