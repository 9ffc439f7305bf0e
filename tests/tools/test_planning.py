"""`titan-ckpt plan`: what a run would load, from its TOML file and the folders alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.cli.main import main


def test_a_plan_names_every_source_and_what_would_fail(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing there; base and adapter; a step over its base; a step that is not there; a broken one is passed over."""
    run = tmp_path / "run"
    toml = tmp_path / "run.toml"
    sources = "".join(f'[[checkpoint.initial_load]]\npath = "{root / name}"\n' for name in ("hf", "peft1"))
    base = f'output_folder = "{run}"\nmodel = {{ flavor = "debug-0.5m" }}\n[checkpoint.save]\ninterval = 2\n'

    def plan(*settings: str) -> tuple[int, dict[str, Any]]:
        code = main(["plan", str(toml), *settings, "--json"])
        return code, json.loads(capsys.readouterr().out)

    toml.write_text(base)
    code, found = plan()
    assert (code, found["step"], found["action"]) == (0, 0, "start from step 0 with initial values")
    toml.write_text(base + sources)
    code, found = plan()
    assert (code, found["action"]) == (0, "load initial weights")
    assert [(s["role"], s["format"], s["num_tensors"]) for s in found["sources"]] == [
        ("weights", "hf", 21),
        ("adapter", "peft", 8),
    ]
    shutil.copytree(root / "lora/checkpoints", run / "checkpoints")
    (run / "checkpoints/step-5").mkdir()
    code, found = plan()
    assert (code, found["step"], found["action"]) == (0, 1, "resume step 1 (adapter)")
    assert [(s["role"], s["format"]) for s in found["sources"]] == [("weights", "hf"), ("adapter", "native")]
    assert any("step-5 cannot be loaded" in line for line in found["notes"])
    assert any("none in the config, lora in the step" in line for line in found["notes"])
    code, found = plan("checkpoint.resume.step=7")
    assert (code, found["action"]) == (1, "the load would fail")
    assert "step 7 is not in" in found["problems"][0]
    assert main(["plan", str(toml), "checkpoint.resume.stepp=7"]) == 2
    assert "stepp" in capsys.readouterr().err


def test_a_plan_resumes_the_run_that_a_source_names(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With training_state: a step of another run, with its base if it is an adapter's; what is no step is a problem."""
    toml = tmp_path / "run.toml"
    start = f'output_folder = "{tmp_path / "run"}"\nmodel = {{ flavor = "debug-0.5m" }}\n'

    def plan(*paths: Path) -> tuple[int, dict[str, Any]]:
        sources = "".join(f'[[checkpoint.initial_load]]\npath = "{path}"\n' for path in paths)
        toml.write_text(start + sources + 'load = "training_state"\n')
        code = main(["plan", str(toml), "--json"])
        return code, json.loads(capsys.readouterr().out)

    step = root / "lora/checkpoints/step-1"
    code, found = plan(root / "hf", step)
    assert (code, found["step"], found["action"]) == (0, 1, "resume step 1 (adapter)")
    assert [(s["role"], s["format"]) for s in found["sources"]] == [("weights", "hf"), ("adapter", "native")]
    shutil.copytree(step, tmp_path / "other/step-1")
    (tmp_path / "other/step-1").rename(tmp_path / "other/renamed")
    for paths, problem in {
        (tmp_path / "other/renamed",): "is not named step-N",
        (root / "hf",): "holds no training state",
        (step,): "no base is configured",
    }.items():
        code, found = plan(*paths)
        assert (code, found["action"]) == (1, "the load would fail")
        assert problem in found["problems"][0]


def test_a_plan_names_the_extras_that_the_run_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that are not installed; a model folder that the run could not read is a problem too."""
    toml = tmp_path / "run.toml"
    start = f'output_folder = "{tmp_path / "run"}"\nmodel = {{ name = "hf", folder = "{tmp_path / "none"}" }}\n'
    toml.write_text(start + 'wandb = { project = "x" }\n[[converters]]\nkind = "qat"\nscheme = "int8_weight_only"\n')
    for package in ("datasets", "torchao", "transformers", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["plan", str(toml), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "none/config.json is not there; expected a Hugging Face folder" in problems.pop(0)
    assert [problem.partition("needs ")[2] for problem in problems] == [
        'datasets, torchao, not installed here: pip install "titan-ckpt[train]"',
        'transformers, not installed here: pip install "titan-ckpt[hf]"',
        'wandb, not installed here: pip install "titan-ckpt[wandb]"',
    ]


def test_a_named_pipe_is_read_as_far_as_somebody_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`titan-ckpt plan <(...)` gets what the other process writes; a pipe without a writer does not block."""
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    assert main(["plan", str(pipe)]) == 2
    assert "output_folder: required" in capsys.readouterr().err
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # keeps what is written, if the writer ends before it is read
    writing = os.open(pipe, os.O_RDWR)
    os.write(writing, f'output_folder = "{tmp_path}/run"\nmodel = {{ flavor = "debug-0.5m" }}\n'.encode())
    threading.Timer(0.3, os.close, [writing]).start()
    assert main(["plan", str(pipe)]) == 0
    os.close(held)
