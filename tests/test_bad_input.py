"""Bad input to `train.py`, by TOML: one error that names the setting, no step, no file, no traceback."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.chats import chat_tokenizer
from tests.forked import Program
from tests.tiny_run import losses, write_toml
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.launch.command import main


class Poison(Callback):
    """Makes the first gradient of step 3 infinite."""

    def on_substep_end(self, trainer: Any, index: int) -> None:
        if trainer.state.step == 2:
            trainer.trainable()[0].grad.view(-1)[0] = float("inf")


class NeedsAnArgument(Callback):
    """Cannot be made by its name."""

    def __init__(self, argument: int) -> None:
        self.argument = argument


class NoCallback:
    """Is none."""


def write_config(folder: Path, tables: dict[str, Any]) -> Path:
    """Write the TOML of a tiny run, changed table by table."""
    training = {"steps": 4, "batch_size": 2, **tables.get("training", {})}
    return write_toml(folder, **{**tables, "training": training, "optimizer": tables.get("optimizer")})


def folders(tmp_path: Path) -> None:
    """Make what the cases below point at."""
    for name in ("empty", "no_tokenizer", "gpt2", "other_llama"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "short.txt").write_text("hi")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "other.jsonl").write_text('{"body": "text"}\n')
    (tmp_path / "chats.jsonl").write_text('{"chat": [{"role": "user", "content": "x"}]}\n')
    chat_tokenizer(tmp_path / "tokens", None)
    (tmp_path / "no_tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}')
    save_file({"transformer.wte.weight": torch.zeros(8, 8)}, tmp_path / "gpt2" / "model.safetensors")
    (tmp_path / "other_llama" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "other_llama" / "model.safetensors")


def weights(path: str, **more: str) -> dict[str, Any]:
    return {"checkpoint": {"initial_load": [{"path": path, **more}]}}


HERE = "tests.test_bad_input"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"training": {"stepz": 1}}, r"training\.stepz: unknown key; did you mean training\.steps"),
    "wrong types": (
        {"training": {"steps": "many"}, "seed": -1},
        r"2 problem\(s\)\n.*seed: expected an integer, 0 or more, found -1\n.*training\.steps: .* found \"many\"",
    ),
    "converters: no table": ({"converters": "lora"}, r'1 problem\(s\)\n +converters\.0: .* a table, found "lora"'),
    "weights: not there": (weights("nowhere"), r"checkpoint\.initial_load: nowhere is not there"),
    "weights: a file": (weights("file"), r"file is no checkpoint: a single file must be a \.safetensors file"),
    "weights: an empty folder": (weights("empty"), "empty is no checkpoint: it holds nothing; expected MANIFEST"),
    "weights: no hf": (weights("empty", format="hf"), "empty: no model.safetensors"),
    "weights: no dcp": (weights("empty", format="dcp"), r"empty: holds no \.metadata"),
    "weights: no native": (weights("empty", format="native"), r"empty: holds no rank-00000"),
    "weights: no peft": (weights("empty", format="peft"), "no converter of this run owns adapter weights"),
    "weights: another architecture": (weights("gpt2"), r"29 missing: tok_embeddings\.weight"),
    "weights: another shape": (weights("other_llama"), r"describes another model.*\n  hidden_size: 8 there, 96 here"),
    "shape: twice": ({"model": {"folder": "file"}}, r"model\.flavor: expected either"),
    "shape: in a file": ({"model": {"name": "hf", "folder": "file", "flavor": None}}, r"file/config\.json is not"),
    "frozen: no match": ({"model": {"freeze": ["layer.*"]}}, r"model\.freeze\.0: 'layer\.\*' matches no parameter"),
    "frozen: all": ({"model": {"freeze": ["*"]}}, "leaves nothing to train"),
    "degrees: zero": ({"parallel": {"tensor_parallel": 0}}, r"tensor_parallel: expected a positive integer, found 0"),
    "schedule: warm-up": ({"schedule": {"warmup_ratio": 1.5}}, r"warmup_ratio: expected a number .* found 1\.5"),
    "schedule: more than all": (
        {"schedule": {"kind": "wsd", "warmup_ratio": 0.6, "decay": 0.5}},
        r"schedule\.decay: 0\.5 of the steps and warmup_ratio 0\.6 exceed 1",
    ),
    "data: in a file": ({"data": {"corpus": "file/x"}}, r"data\.corpus: file/x cannot be read: Not a directory"),
    "data: conversations as text": (
        {"data": {"corpus": "chats.jsonl"}}, r'chats\.jsonl:1: .*; for conversations, set data\.messages = "chat"'
    ),
    "data: chat without tokenizer": (
        {"data": {"corpus": "other.jsonl", "messages": "body", "tokenizer": None}},
        r"data\.tokenizer: conversations need",
    ),
    "data: chat in text": ({"data": {"messages": "m"}}, r"data\.messages: 'builtin' holds no conversations"),
    "data: both": ({"data": {"messages": "m", "field": "x", "corpus": "a"}}, r"data\.field: either text in 'x' or"),
    "data: held out of a stream": ({"data": {"streaming": True, "held_out": 0.1}}, r"data\.held_out: a stream has no"),
    "data: too long": ({"data": {"sequence_length": 2048}}, "2048 is longer than the model's 1024"),
    "tokenizer: too few": ({"data": {"tokenizer": 257}}, r"data\.tokenizer: expected 258 or more"),
    "tokenizer: too many": ({"data": {"tokenizer": 4096}}, "do not fit the model's vocabulary of 2048"),
    "tokenizer: none": ({"data": {"tokenizer": "no_tokenizer"}}, r"tokenizer\.json is no tokenizer: "),
    "evaluation: empty": ({"evaluation": {"interval": 1, "corpus": "empty.txt"}}, r"evaluation\.corpus: .*no text"),
    "evaluation: too short": (
        {"evaluation": {"interval": 1, "corpus": "short.txt"}}, r"evaluation\.corpus: its 4 tokens are no sequence"
    ),
    "keep: no evaluation": (
        {"checkpoint": {"save": {"interval": 1, "keep": {"best": 2, "metric": "eval/loss"}}}},
        r"keep\.metric: eval/loss is never measured; it needs the table \[evaluation\]; this run measures loss",
    ),
    "keep: a typo": (
        {"checkpoint": {"save": {"interval": 1, "keep": {"best": 2, "metric": "los"}}}}, r"metric: los is never m"
    ),
    "callbacks": (
        {"callbacks": [f"{HERE}:NoCallback", f"{HERE}:NeedsAnArgument"]},
        r"(?s)\.0: .*makes a NoCallback, expected a subclass of .*\.1: .*missing a required argument: 'argument'",
    ),
    "own code: no name": ({"callbacks": ["a_name"]}, r'callbacks\.0: expected a name such as "package\.module:Name"'),
    "own code: not there": (
        {
            "callbacks": ["nope.x:Y", f"{HERE}:Missing"],
            "model": {"flavor": None, "name": f"{HERE}:NoModelEither"},
            "data": {"dataset": "tests.nowhere:Data"},
            "optimizer": {"name": "torch.optim:SDG"},
            "schedule": {"kind": "torch.optim.lr_scheduler:Cosine"},
        },
        r"(?s)6 problem.*model\.name: .*no attr.*dataset: .*no module 'tests.*r\.name: .*'SDG'.*kind: .*s\.0: .*s\.1",
    ),
    "own trainer": ({"trainer": f"{HERE}:NoCallback"}, r"trainer: .* is no subclass of titan_ckpt.*; name one"),
    "own model": ({"model": {"flavor": None, "name": f"{HERE}:NoCallback"}}, r"model\.name: .*makes a NoCallback"),
    "own model: flavor": ({"model": {"name": f"{HERE}:NoCallback"}}, r"flavor: your own model takes its shape"),
    "own data": ({"data": {"dataset": f"{HERE}:NoCallback"}}, r"data\.dataset: .*expected an IterableDataset, or"),
    "own data: held out": (
        {"data": {"dataset": f"{HERE}:NoCallback", "held_out": 0.1}}, r"data\.held_out: .*set evaluation\.corpus"
    ),
    "own optimizer: settings": (
        {"optimizer": {"name": "torch.optim:SGD", "settings": {"momentun": 0.9}}},
        r"optimizer\.settings: 'torch\.optim:SGD': got an unexpected keyword argument 'momentun'; its parameters",
    ),
    "optimizer: one beta": ({"optimizer": {"betas": 0.9}}, r"betas: expected an array of 2 values, found 0\.9"),
    "own optimizer: betas": (
        {"optimizer": {"name": "torch.optim:SGD", "betas": [0.9, 0.9]}}, r"optimizer\.betas: a setting of adamw"
    ),
    "own optimizer: no decay": (
        {"optimizer": {"name": "torch.optim:Rprop"}}, r"optimizer\.weight_decay: 'torch\.optim:Rprop' has none; set it"
    ),
    "own schedule: ratio": (
        {"schedule": {"kind": "torch.optim.lr_scheduler:ConstantLR", "warmup_ratio": 0.1}},
        r"schedule\.warmup_ratio: your own schedule has no ratios",
    ),
    "settings of none": (
        {"optimizer": {"settings": {"momentum": 0.9}}}, r"optimizer\.settings: they are the keyword arg"
    ),
    "export: no adapter": ({"checkpoint": {"export": {"format": "peft"}}}, "no converter owns adapter weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message_before_any_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names file, setting and what was found; exit code 2, and nothing of the run is written."""
    monkeypatch.chdir(tmp_path)
    folders(tmp_path)
    tables, expected = CASES[name]
    path = write_config(tmp_path, tables)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert re.search(expected, said), said
    if said.startswith("ConfigError"):
        assert said.startswith(f"ConfigError: {path}: "), "the file is named, however late the fault is found"
    assert not (tmp_path / "run").exists()


def test_folders_that_are_files_are_all_named_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error names all that blocks tokens, steps, exports, events and traces; then of the output folder."""
    tables = {
        "data": {"cache_folder": str(tmp_path / "file" / "cache")},
        "checkpoint": {"folder": "steps", "export": {"format": "hf", "folder": "file"}},
        "tensorboard": {"folder": "file"},
        "profiling": {"interval": 2},
    }
    path = write_config(tmp_path, tables)
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps").write_text("")
    (tmp_path / "run" / "file").write_text("")
    (tmp_path / "run" / "profiles").write_text("")
    assert main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "data.cache_folder", "checkpoint.folder", "checkpoint.export.0.folder", "tensorboard.folder", "profiling"
    ]  # fmt: skip
    assert all(" is a file" in line for line in lines)
    (tmp_path / "out").write_text("")
    path = write_config(tmp_path, {"output_folder": str(tmp_path / "out" / "run")})
    assert main([str(path)]) == 2
    assert re.search(r"output_folder: .*/out is a file, and .*/out/run is to be a folder", capsys.readouterr().err)


def test_what_is_in_the_way_of_a_runs_own_files_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders in their places and files that nobody may read are all named before the first step, and stay."""
    path = write_config(tmp_path, {})
    names = ["metrics.jsonl", "stopped.json", "telemetry.jsonl", "wandb-run-id", "save-answer.json", "save-taker.json"]
    for name in names:
        (tmp_path / "run" / name).mkdir(parents=True)
    assert main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split()[1] for line in lines] == [str(tmp_path / "run" / name) for name in names]
    fault = " is a folder, and the run writes a file of that name: move it away, or set another output_folder"
    assert all(line.startswith("  output_folder: ") and line.endswith(fault) for line in lines), lines
    (tmp_path / "run" / names[0]).rmdir()
    (tmp_path / "run" / names[0]).write_text('{"step": 1}\n')
    monkeypatch.setattr(os, "access", lambda place, mode: mode != os.R_OK)  # root may read everything
    assert main([str(path)]) == 2
    assert "metrics.jsonl cannot be read, and the run goes on with what it says: move it" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "run")) == sorted(names)


def test_folders_outside_of_an_output_folder_that_is_not_there_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps and exports that would lie below a file are bad input, exit code 2, before the run's own folder is made."""
    (tmp_path / "file").write_text("")
    steps, export = str(tmp_path / "file" / "steps"), {"format": "hf", "folder": str(tmp_path / "file")}
    tables = {"checkpoint": {"folder": steps, "export": export}}
    assert main([str(write_config(tmp_path, tables))]) == 2
    said = capsys.readouterr().err
    assert re.search(r"checkpoint\.folder: .*/file is a file, and .*/file/steps is to be a folder", said)
    assert re.search(r"checkpoint\.export\.0\.folder: .* is a file", said)
    assert not (tmp_path / "run").exists()
    (tmp_path / "out").write_text("")
    assert main([str(write_config(tmp_path, {**tables, "output_folder": str(tmp_path / "out")}))]) == 2
    said = capsys.readouterr().err
    assert all(f"{name}: " in said for name in ("output_folder", "checkpoint.folder", "checkpoint.export.0.folder"))


def test_a_gradient_that_is_not_finite_ends_the_process_with_one_message(tmp_path: Path) -> None:
    """A real process, and a callback that its TOML names: exit code 1, no traceback, the steps before are there."""
    path = write_config(tmp_path, {"callbacks": [f"{HERE}:Poison"]})
    process = Program(main, [str(path)], output=tmp_path / "log")
    assert process.wait(120) == 1, process.text()
    assert process.text().splitlines()[-1].startswith("GradientError: step 3: the gradient's norm is inf; the weights ")
    assert "Traceback" not in process.text()
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
