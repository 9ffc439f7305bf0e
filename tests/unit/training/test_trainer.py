"""The trainer's loop and its build steps, in this process and on two ranks."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.tiny_run import Recorder, losses, rows, settings
from titan_ckpt.config import ExportConfig
from titan_ckpt.errors import ConfigError, GradientError
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.saving.saver import Saver
from titan_ckpt.saving.step import DueSave
from titan_ckpt.training import build_steps, train_state
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.callbacks.console import MetricsFile, read_metrics
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.parallel.data_parallel import decay_groups
from titan_ckpt.training.trainer import Trainer


def test_d3_a_finished_run_trains_no_further(tmp_path: Path) -> None:
    """Running it again takes no step and changes nothing that was written."""
    Trainer(settings(tmp_path)).run()
    before = losses(tmp_path)
    recorder = Recorder()
    assert Trainer(settings(tmp_path), callbacks=[recorder]).run().step == 3
    assert recorder.events == ["init_end", "load 3"]
    assert losses(tmp_path) == before


def test_a_finished_run_makes_the_exports_that_are_missing(tmp_path: Path) -> None:
    """Running it again leaves an export that is there alone, and makes one that a crash had left out."""
    exports = [{"format": "hf"}, {"format": "dcp", "folder": "other"}]
    config = settings(tmp_path, checkpoint={"save": {"interval": 2}, "export": exports})
    Trainer(config).run()
    there = tmp_path / "run" / "exports" / "step-3" / "model.safetensors"
    written = there.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "run" / "other")
    Trainer(config).run()
    assert there.stat().st_mtime_ns == written
    assert (tmp_path / "run" / "other" / "step-3").is_dir()


def test_a_busy_writer_skips_any_step_but_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With if_busy = "skip" a run may leave steps out, and still ends with its last one saved."""
    monkeypatch.setattr(Saver, "busy", True)
    Trainer(settings(tmp_path, checkpoint={"save": {"interval": 1, "async_mode": "thread", "if_busy": "skip"}})).run()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-3"]


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    """Raising training.steps resumes, and the counters count on."""
    constant = {"kind": "constant", "warmup_ratio": 0.0}
    Trainer(settings(tmp_path, schedule=constant)).run()
    state = Trainer(settings(tmp_path, schedule=constant, training={"steps": 5})).run()
    assert (state.step, state.num_tokens) == (5, 5 * 4 * 16)
    spent = sum(row["seconds"] for row in rows(tmp_path))
    assert 0.3 * spent < state.seconds < spent, "all but the update of the newest step of each process"
    whole = tmp_path / "whole"
    whole.mkdir()
    Trainer(settings(whole, schedule=constant, training={"steps": 5})).run()
    assert losses(tmp_path) == losses(whole)


def test_the_time_of_a_run_has_the_wait_for_its_exchanges_in_it(tmp_path: Path) -> None:
    """On a device, that wait is nearly all of a step. The end of the newest step is not told yet."""

    class Waiting(Trainer):
        def clip_gradients(self, values: torch.Tensor) -> tuple[float, list[float]]:
            time.sleep(0.4)
            return super().clip_gradients(values)

    trainer = Waiting(settings(tmp_path, checkpoint={"save": None}))
    spent = trainer.run().seconds
    whole = sum(row["seconds"] for row in rows(tmp_path))
    assert 0.8 < spent < whole - 0.4, "two of three waits"


def test_frozen_parameters_stay_and_have_no_optimizer_state(tmp_path: Path) -> None:
    """A parameter that a pattern freezes keeps its initial values; the optimizer holds the rest."""
    trainer = Trainer(settings(tmp_path, model={"flavor": "debug-0.5m", "freeze": ["tok_embeddings.*", "*norm*"]}))
    initial = {}

    class Remember(Callback):
        def on_load(self, trainer: Trainer, result: LoadResult) -> None:
            initial.update({k: v.clone() for k, v in trainer.model.state_dict().items()})

    trainer.user_callbacks = (Remember(),)
    trainer.run()
    after = trainer.model.state_dict()
    same = {fqn for fqn in after if torch.equal(after[fqn], initial[fqn])}
    assert same == {fqn for fqn in after if fqn.startswith("tok_embeddings") or "norm" in fqn}
    assert len(trainer.optimizer.state) == len(after) - len(same)


def test_d5_vectors_are_not_decayed_and_every_parameter_comes_once(tmp_path: Path) -> None:
    """Every trained parameter is in one group, matrices with decay and norms without."""
    trainer = Trainer(settings(tmp_path, optimizer={"lr": 1e-3, "weight_decay": 0.3}))
    trainer.run()
    dims = {group["weight_decay"]: {p.dim() for p in group["params"]} for group in trainer.optimizer.param_groups}
    assert dims == {0.3: {2}, 0.0: {1}}
    grouped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(trainer.model.parameters()))


class BiasedShapes(nn.Module):
    """The biases of all experts of a layer, as gpt-oss has them, a norm over two dims, and a vector that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_bias = nn.Parameter(torch.zeros(4, 8))
        self.normal = nn.Parameter(torch.zeros(4, 8))
        self.after = nn.LayerNorm((2, 3))
        self.first_norm = nn.Linear(3, 2)
        self.temperature = nn.Parameter(torch.zeros(8))


def test_d5_norms_and_biases_are_not_decayed_however_many_dims_they_have() -> None:
    """They are known by the names of parameter, module and class; of others a matrix is decayed, a vector is not."""
    decayed, others = decay_groups([BiasedShapes()])
    assert [name for name, _ in decayed] == ["normal"]
    assert "temperature" in dict(others)
    assert [name for name, value in others if value.dim() > 1] == [
        "experts_bias", "after.weight", "after.bias", "first_norm.weight",
    ]  # fmt: skip


def test_d5_a_resume_follows_its_own_schedule_from_its_first_step(tmp_path: Path) -> None:
    """The checkpoint has the next rate of its own run, which is nothing here; a schedule afresh begins at its peak."""
    schedule = {"kind": "linear", "warmup_ratio": 0.0, "min_ratio": 0.0}
    Trainer(settings(tmp_path, training={"steps": 2}, schedule=schedule)).run()
    Trainer(settings(tmp_path, training={"steps": 4}, schedule=schedule)).run()
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx([3e-3, 1.5e-3, 1.5e-3, 0.75e-3])
    afresh = {"save": {"interval": 2}, "resume": {"exclude": ["lr_scheduler"]}}
    Trainer(settings(tmp_path, training={"steps": 6}, schedule=schedule, checkpoint=afresh)).run()
    assert [row["lr"] for row in rows(tmp_path)][4:] == pytest.approx([3e-3, 2.5e-3])


def test_autocast_computes_in_bfloat16_over_float32_weights(tmp_path: Path) -> None:
    """The logits are bfloat16, what is stored is float32, and the loss is close to float32's."""
    seen = []

    class Watch(Trainer):
        def compute_loss(self, batch: Batch) -> torch.Tensor:
            seen.append(self.model(batch["tokens"]).dtype)
            return super().compute_loss(batch)

    trainer = Watch(settings(tmp_path / "bf16", training={"compute_dtype": "bfloat16"}))
    trainer.run()
    Trainer(settings(tmp_path / "fp32")).run()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=5e-3)


def in_float16(folder: Path, steps: int, scale: float, **sections: Any) -> Trainer:
    training = {"compute_dtype": "float16", "steps": steps}
    trainer = Trainer(settings(folder, **{"training": training, **sections}))
    trainer.state.loss_scale = scale
    trainer.run()
    return trainer


def test_d5_float16_scales_the_loss_and_a_resume_has_its_scale(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that overflow are left out, and the scale grows again: 3 and 5 steps are 8 steps, bit for bit."""
    monkeypatch.setattr(train_state, "_GROWTH_STEPS", 3)
    whole = in_float16(tmp_path / "whole", 8, 2.0**24)
    left_out = [message for message in caplog.messages if "overflow in float16" in message]
    assert len(left_out) >= 2 and any("loss" in row for row in rows(tmp_path / "whole"))
    in_float16(tmp_path / "cut", 3, 2.0**24)
    cut = in_float16(tmp_path / "cut", 8, 2.0**9)  # what the checkpoint has counts
    assert (cut.state.loss_scale, cut.state.finite_steps) == (whole.state.loss_scale, whole.state.finite_steps)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, cut.model.state_dict()[name]), name


class Broken(Trainer):
    """Has gradients that are not finite from the third step on."""

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return super().compute_loss(batch) * (math.nan if self.state.step >= 2 else 1.0)


def test_d5_steps_that_are_left_out_are_saved_when_a_gradient_stops_the_run(tmp_path: Path) -> None:
    """The weights are good: two steps were left out, until no scale was left to halve, and none has changed them."""
    trainer = Broken(settings(tmp_path, training={"compute_dtype": "float16", "steps": 9}, checkpoint=SELDOM))
    trainer.state.loss_scale = 4.0
    with pytest.raises(GradientError, match=r"step 5: .* nan; the weights are those of step 4"):
        trainer.run()
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-4"]


SELDOM = {"save": {"interval": 100}}


def test_d5_float16_comes_close_to_float32(tmp_path: Path) -> None:
    """The scale is not seen in the loss, nor in the norm of the gradients."""
    in_float16(tmp_path / "half", 3, 2.0**10)
    Trainer(settings(tmp_path / "full")).run()
    for half, full in zip(rows(tmp_path / "half"), rows(tmp_path / "full"), strict=True):
        assert half["loss"] == pytest.approx(full["loss"], rel=1e-3)
        assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-2)


def test_c3_a_trainers_method_delivers_the_weights_at_the_start_and_at_a_resume(tmp_path: Path) -> None:
    """Components leave the model out; a trainer without the method says so before anything is written."""
    components = ["optimizer", "lr_scheduler", "dataloader", "rng", "states"]

    class Worker(Trainer):
        delivered: tuple[int, ...] = ()

        def external_weights(self, event: ExternalLoad) -> None:
            self.delivered += (event.step,)
            event.fill({name: torch.full(value.shape, 0.25) for name, value in event.tensors.items()})

        def load(self) -> None:
            super().load()
            assert all(torch.all(p == 0.25) for p in self.model.parameters())

    table = {"components": components, "save": {"interval": 1}}
    with pytest.raises(ConfigError, match='"model" is left out'):
        Trainer(settings(tmp_path, checkpoint=table)).run()
    assert not (tmp_path / "run").exists()
    for steps in (1, 2):
        trainer = Worker(settings(tmp_path, training={"steps": steps}, checkpoint=table))
        assert trainer.run().step == steps and trainer.delivered == (steps - 1,)
        assert not all(torch.all(p == 0.25) for p in trainer.model.parameters()), "trained"
    stored = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "rank-00000.safetensors")
    assert stored and not any(name.startswith("model.") for name in stored)


def test_c5_a_stable_run_is_annealed_from_where_it_is_resumed(tmp_path: Path) -> None:
    """The rate falls in the next steps, also if these are interrupted, while the stable run has kept its own."""
    stable = {"kind": "wsd", "warmup_ratio": 0.0, "decay": 0.0, "min_ratio": 0.0}
    Trainer(settings(tmp_path, training={"steps": 4}, schedule=stable)).run()
    length = {"decay": f"{3 * 4 * 16 - 1} tokens"}
    annealed = settings(tmp_path, training={"steps": 8}, schedule={**stable, "start_decay": "now", **length})

    class Interrupted(Callback):
        def on_step_begin(self, trainer: Trainer, step: int) -> None:
            if step == 7:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        Trainer(annealed, callbacks=[Interrupted()]).run()
    assert Trainer(annealed).run().step == 8
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx([3e-3] * 5 + [2e-3, 1e-3, 0])


class Server(Callback):
    """Delivers the same weights at every load."""

    steps: ClassVar[list[int]] = []

    def on_external_load(self, trainer: Trainer, event: ExternalLoad) -> None:
        self.steps.append(event.step)
        event.fill({name: torch.full(value.shape, 0.25) for name, value in event.tensors.items()})


def test_c5_a_callback_named_in_a_run_file_delivers_the_weights(tmp_path: Path) -> None:
    """At the start and at a resume; and a handler that is too many or missing is told before anything is built."""
    external = {"components": ["optimizer", "lr_scheduler", "dataloader", "rng", "states"], "save": {"interval": 1}}
    name = f"{__name__}:Server"
    for steps in (1, 2):
        config = replace(settings(tmp_path, training={"steps": steps}, checkpoint=external), callbacks=(name,))
        assert Trainer(config).run().step == steps
    assert Server.steps == [0, 1]

    class Unbuilt(Trainer):
        def build_model(self) -> LanguageModel:
            raise AssertionError("built")

    with pytest.raises(ConfigError, match=r'"model" is left out.*on_external_load'):
        Unbuilt(replace(config, callbacks=())).run()
    with pytest.raises(ConfigError, match=r"Server\.on_external_load delivers weights, and"):
        Unbuilt(settings(tmp_path), callbacks=[Server()]).run()


def test_a9_the_act_of_saving_may_be_extended_and_its_gate_asked(tmp_path: Path) -> None:
    """A subclass's act is called for the interval, the last step and no other; so is the event before a save."""
    acts: list[tuple[str, int, bool]] = []

    class Manager(CheckpointManager):
        def save_step(self, due: DueSave) -> bool:
            acts.append(("save", due.step, due.last))
            return super().save_step(due)

        def export_step(self, exports: Sequence[ExportConfig], step: int, last_step: bool) -> None:
            acts.append(("export", step, last_step))
            super().export_step(exports, step, last_step)

    class Begin(Callback):
        def on_save_begin(self, trainer: Trainer, step: int) -> None:
            assert trainer.manager.is_save_due(step, last_step=step == 5)
            acts.append(("begin", step, False))

        def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
            assert not trainer.manager.is_save_due(metrics.step), "it is saved, or was not due"

    def build(*args: Any, **kwargs: Any) -> CheckpointManager:
        return Manager(*args, **kwargs)

    with mock.patch.object(build_steps, "CheckpointManager", build):
        checkpoint = {"save": {"interval": 2}, "export": [{"format": "hf", "interval": 4}]}
        Trainer(settings(tmp_path, training={"steps": 5}, checkpoint=checkpoint), callbacks=[Begin()]).run()
    saves = [act for n, last in ((2, False), (4, False), (5, True)) for act in (("begin", n, False), ("save", n, last))]
    saves.insert(4, ("export", 4, False))
    assert acts == [*saves, ("export", 5, True)]


def test_a_resume_removes_the_metrics_of_steps_it_does_again(tmp_path: Path) -> None:
    """Rows after the resumed step go, and so does a line that a kill cut short."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 1.0 / i}) + "\n" for i in range(1, 6)) + '{"step": 6, "lo')
    MetricsFile(path).truncate_after(3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    MetricsFile(path).append({"step": 4})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
