"""`titan-ckpt train`: exit codes, stopped.json, and code of one's own that the run file names."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from tests.test_bad_input import write_config
from tests.tiny_run import losses, rows
from titan_ckpt import KeyMap, converters
from titan_ckpt.components.run_state import RunState
from titan_ckpt.converters import ModelConverter
from titan_ckpt.errors import DataError, LoadMismatchError
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.saving import saver
from titan_ckpt.saving.step import CompletedStep
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.launch import command
from titan_ckpt.training.launch.command import main
from titan_ckpt.training.outcome import Outcome
from titan_ckpt.training.trainer import Trainer

HERE = "tests.unit.training.test_command"


class StopAtTwo(Callback):
    """Is told to stop while step 2 ends."""

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not trainer.guard._board._due:  # noticed by the end of this step, and not within the next one
                time.sleep(0.001)


def stopped(folder: Path) -> Any:
    path = folder / "run" / "stopped.json"
    return json.loads(path.read_text()) if path.exists() else None


STOPS = {"callbacks": [f"{HERE}:StopAtTwo"], "checkpoint": {"save": {"interval": 100}}}


def test_a_run_that_is_stopped_asks_to_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """75 and stopped.json; the next start removes the file and ends with 0; a third has nothing to do.

    The last step of a run is not a stop.
    """
    path = write_config(tmp_path, STOPS)
    assert main([str(path)]) == 75
    found = stopped(tmp_path)
    assert found == {"step": 2, "steps": 4, "saved_step": 2, "reason": "SIGTERM to rank 0"}
    assert main([str(path), "--callbacks", "[]"]) == 0
    assert stopped(tmp_path) is None
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert main([str(path), "--callbacks", "[]"]) == 0
    assert main([str(path), "--training.steps", "2", "--output_folder", str(tmp_path / "other")]) == 0


def test_a_bucket_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback: the store's answer says what to do."""

    def refuse(*_: Any) -> Any:
        raise StoreError(errno.ENOENT, "s3://b/run: rank 0 could not list it. Create the bucket", is_final=True)

    monkeypatch.setattr(command, "build_trainer", refuse)
    assert main([str(tmp_path / "run.toml")]) == 2
    assert capsys.readouterr().err == "StoreError: s3://b/run: rank 0 could not list it. Create the bucket\n"


@pytest.mark.parametrize(
    ("outcome", "code", "under_torchrun"),
    [
        (Outcome(4, 4, 4), 0, 0),
        (Outcome(4, 4, 4, "SIGTERM to rank 0"), 0, 0),
        (Outcome(2, 4, 2, "SIGTERM to rank 0"), 75, 0),
        (Outcome(0, 4, None, "SIGTERM to rank 0"), 75, 0),
        (Outcome(2, 4, 1, "SIGTERM to rank 0"), 1, 1),
        (Outcome(2, 4, None, "SIGTERM to rank 0"), 1, 1),
    ],
)
def test_exit_codes(outcome: Outcome, code: int, under_torchrun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that no checkpoint holds are lost; torchrun would call 75 a failure."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert outcome.exit_code == code
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert outcome.exit_code == under_torchrun


def test_a_stop_that_cannot_be_saved_is_a_loss(tmp_path: Path) -> None:
    """Without [checkpoint.save] the exit code is 1, and the file says that no step is saved."""
    path = write_config(tmp_path, {**STOPS, "checkpoint": {"save": None}})
    assert main([str(path)]) == 1
    assert stopped(tmp_path)["saved_step"] is None


def test_a_stopped_run_goes_on_with_a_last_step_that_holds_the_model_alone(tmp_path: Path) -> None:
    """The stop saves a full step: only the step that is the run's last one is saved without optimizer."""
    path = write_config(tmp_path, {**STOPS, "checkpoint": {"save": {"interval": 100, "model_only_last": "bfloat16"}}})
    assert main([str(path)]) == 75
    assert main([str(path), "--callbacks", "[]"]) == 0
    kinds = [
        json.loads((tmp_path / f"run/checkpoints/step-{n}/MANIFEST.json").read_text())["components"] for n in (2, 4)
    ]
    assert "optimizer" in kinds[0]
    assert kinds[1] == ["model"]


# code of one's own


class Bigram(LanguageModel):
    """The next token from this one."""

    max_seq_len = None

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([nn.Linear(width, width)])
        self.output = nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(tokens)
        for layer in self.layers.children():
            out = layer(out)
        return torch.as_tensor(self.output(out))

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()

    def reset_buffers(self) -> None:
        """There are none."""

    def key_map(self) -> KeyMap:
        return KeyMap(identity=True)

    def hf_config(self) -> dict[str, Any]:
        return {}


class Counting(IterableDataset[dict[str, torch.Tensor]]):
    """Every rank counts from its own start."""

    def __init__(self, modulus: int, rank: int, sequence_length: int) -> None:
        self.modulus, self.length, self.at = modulus, sequence_length, rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            numbers = torch.arange(self.at, self.at + self.length + 1) % self.modulus
            self.at += 1
            yield {"tokens": numbers[:-1], "labels": numbers[1:]}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Broken(Counting):
    """Cannot be read in step 3."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from islice(super().__iter__(), 4)
        raise DataError(["no tokens"])


@pytest.mark.parametrize(
    ("why", "lost"), [({}, 0), ({"save": None}, 2), ({"stop": {"on": ["SIGTERM"]}}, 2), ("full", 1)]
)
def test_data_that_cannot_be_used_ends_a_run_with_2_and_the_log_says_what_is_lost(
    why: Any, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another start would end there again. The last step is saved, or that it is not is a line of its own."""
    if why == "full":  # after the save of step 1
        why = {"save": {"interval": 1}}
        save = Trainer.take_steps

        def full(trainer: Trainer) -> Any:
            for metrics in save(trainer):
                monkeypatch.setattr(CompletedStep, "save", lambda _: (_ for _ in ()).throw(OSError("disk is full")))
                monkeypatch.setattr(trainer.manager, "save", lambda *_, **__: None)
                yield metrics

        monkeypatch.setattr(Trainer, "take_steps", full)
    data = {"dataset": f"{HERE}:Broken", "settings": {"modulus": 11}}
    changes = {"data": data, "checkpoint": {"save": {"interval": 100}, **why}}
    assert main([str(write_config(tmp_path, changes)), "--training.batch_size", "2"]) == 2
    said = {0: [], 1: ["step 2, the last one, is not saved"], 2: ["the last 2 steps, up to step 2, are not saved"]}
    assert lost_steps(caplog) == said[lost]


def lost_steps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "titan_ckpt.training.trainer" and r.levelname == "ERROR"
    ]


def test_steps_before_a_save_or_a_load_that_fails_are_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those up to the save before are there; a load that fails has made none."""
    path = write_config(tmp_path, {"checkpoint": {"save": {"interval": 1, "async_mode": "disabled"}}})
    write, apply = saver._write_all, RunState.apply

    def write_no_third(folder: Any, *arguments: Any) -> Any:
        if "step-3" in str(folder):
            raise OSError(errno.ENOSPC, "full")
        return write(folder, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "_write_all", write_no_third)
        assert main([str(path)]) == 1
    assert lost_steps(caplog) == ["step 3, the last one, is not saved"]
    caplog.clear()

    def fail(*arguments: Any) -> None:
        apply(*arguments)
        raise LoadMismatchError("what comes after it does not fit")

    monkeypatch.setattr(RunState, "apply", fail)
    assert main([str(path)]) == 2
    assert lost_steps(caplog) == []


def falling(optimizer: Any, steps: int, power: float) -> LambdaLR:
    """Fall to 0 at the end of the run."""
    return LambdaLR(optimizer, lambda step: (1 - step / steps) ** power)


@dataclass(frozen=True)
class FreezeConfig:
    layer: int
    kind: Literal["freeze"] = "freeze"


class Freeze(ModelConverter):
    """Freezes one layer."""

    stage: ClassVar = "adapt"
    config_class: ClassVar = FreezeConfig

    def convert(self, model: nn.Module) -> None:
        model.get_submodule(f"layers.{self.config.layer}").requires_grad_(False)


class Counted(Trainer):
    """Counts its steps."""

    made: ClassVar[list[int]] = []

    def train_step(self, batches: Any) -> Any:
        metrics: Any = super().train_step(batches)
        self.made.append(metrics.step)
        return metrics


OWN = {
    "trainer": f"{HERE}:Counted",
    "model": {"flavor": None, "name": f"{HERE}:Bigram", "settings": {"vocab_size": 16}},
    "data": {"tokenizer": None, "dataset": f"{HERE}:Counting", "settings": {"modulus": 10}},
    "optimizer": {"name": "torch.optim:SGD", "lr": 0.5, "settings": {"momentum": 0.9}},
    "schedule": {"kind": f"{HERE}:falling", "settings": {"power": 2.0}},
    "converters": [{"kind": f"{HERE}:Freeze", "layer": 0}],
}


def test_everything_of_ones_own_is_named_in_the_run_file(tmp_path: Path) -> None:
    """Trainer, model, data, optimizer, schedule and converter; a resume repeats an uninterrupted run bit for bit."""
    Counted.made.clear()
    path = write_config(tmp_path, OWN)
    assert main([str(path)]) == 0
    whole = losses(tmp_path)
    assert Counted.made == [1, 2, 3, 4]
    assert [row["lr"] for row in rows(tmp_path)] == [0.5 * (1 - n / 4) ** 2 for n in range(4)]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / "MANIFEST.json").read_text())
    assert [c["kind"] for c in manifest["converters"]] == ["freeze"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    assert main([str(path)]) == 0
    assert Counted.made == [1, 2, 3, 4, 3, 4]
    assert losses(tmp_path) == whole


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"kind": f"{HERE}:Nothing"}, "converters.0.kind: .* has no attribute 'Nothing'"),
        (
            {"kind": f"{HERE}:Counting"},
            "converters.0.kind: .* is no subclass of titan_ckpt.converters.ModelConverter; name a class",
        ),
        ({"kind": f"{HERE}:Freeze"}, "converters.0.layer: required"),
        ({"kind": f"{HERE}:Freeze", "layer": 0, "rank": 1}, "converters.0.rank: unknown key; known here: layer, kind"),
        ({"kind": "lorra"}, 'converters.0.kind: .*"lora".* found "lorra"; did you mean "lora"'),
    ],
)
def test_a_converter_that_cannot_be_found_or_made_is_one_line(
    table: dict[str, Any], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the table and the key; exit code 2."""
    assert main([str(write_config(tmp_path, {**OWN, "converters": [table]}))]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert re.search(fault, line), line


def test_an_installed_package_adds_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry-point group `titan_ckpt.converters` names a class; its settings are in the reference."""
    entry = EntryPoint("freeze", f"{HERE}:Freeze", converters.GROUP)
    monkeypatch.setattr(converters, "entry_points", lambda group: [entry])
    (made,) = converters.from_tables([{"kind": "freeze", "layer": 1}])
    assert made.config == FreezeConfig(1)
    assert converters.kinds()["freeze"] is FreezeConfig


def test_installed_packages_are_not_looked_through_for_a_kind_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look through them takes longer than to make a converter."""
    monkeypatch.setattr(converters, "entry_points", lambda group: pytest.fail("looked for other kinds"))
    (made,) = converters.from_tables([{"kind": "float8", "emulate": True}])
    assert isinstance(made, converters.Float8Converter)
