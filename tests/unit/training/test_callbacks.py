"""The callbacks of a run: what each leaves behind, and that none of them changes the run."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import importlib.util
import io
import json
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.tensor import DTensor

from tests.distributed.test_trainer_loss import UnevenLabels
from tests.tiny_run import AfterStep, Recorder, losses, post, rows, settings
from titan_ckpt.config import ResumeConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.errors import ConfigError, GradientError, SaveError
from titan_ckpt.guard.run_guard import StopRun
from titan_ckpt.models.qwen3_moe import Qwen3Moe, entropy
from titan_ckpt.testing import distributed
from titan_ckpt.training.callbacks import Callback, Callbacks, LogValue, StepMetrics, monitors
from titan_ckpt.training.callbacks.console import Logging, read_metrics
from titan_ckpt.training.callbacks.due import Evaluation
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.sequences import PackedDataset
from titan_ckpt.training.loss import num_predicted
from titan_ckpt.training.outcome import Outcome
from titan_ckpt.training.trainer import Trainer

EVERYTHING: dict[str, dict[str, Any]] = {
    "model": {"name": "qwen3_moe", "flavor": "debug-1m"},
    "training": {
        "steps": 4,
        "batch_size": 4,
        "device": "cpu",
        "log_interval": 3,
        "measure": ["memory", "load_balance"],
        "gc_interval": 2,
    },
    "checkpoint": {"save": {"interval": 2}, "export": {"format": "hf", "interval": 3}},
    "evaluation": {"interval": 2, "max_sequences": 6},
    "tensorboard": {},
    "wandb": {"project": "titan_ckpt-tests"},
    "profiling": {"interval": 3},
}


def everything(folder: Path, steps: int = 4) -> Any:
    """Return the settings of a run with all twelve callbacks."""
    tables = {**EVERYTHING, "training": EVERYTHING["training"] | {"steps": steps}}
    return settings(folder, data={"held_out": 0.1}, **tables)


class Watch(Callback):
    """Writes down what a user's callback gets."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, LogValue]]] = []
        self.evaluated: list[int] = []
        self.collects: list[bool] = []
        self.num_collections: list[int] = []
        self.steps: list[StepMetrics] = []

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self.before = gc.get_stats()[2]["collections"]

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        self.collects.append(gc.isenabled())
        self.num_collections.append(gc.get_stats()[2]["collections"] - self.before)

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        self.evaluated.append(step)

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        self.logged.append((step, dict(values)))


@pytest.fixture(scope="module", autouse=True)
def _wandb() -> Iterator[None]:
    """Let wandb be imported, which tests/conftest.py hides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "wandb")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer, Watch]:
    """Return the folder of a run with all twelve callbacks, that run's trainer, and what a user's callback saw."""
    folder, watch = tmp_path_factory.mktemp("whole"), Watch()
    trainer = Trainer(everything(folder), callbacks=[watch])
    trainer.run()
    return folder, trainer, watch


Whole = tuple[Path, Trainer, Watch]
NAMES = [
    "gradient_health", "load_balance", "memory", "evaluation", "logging", "tensorboard", "wandb", "progress",
    "checkpoint", "export", "profiler", "garbage_collection",
]  # fmt: skip


def test_d2_twelve_callbacks_have_names_and_a_fixed_order(whole: Whole) -> None:
    """Every name has a callback where its table is there; they are called in that order, the user's last."""
    _, trainer, watch = whole
    assert [f.name for f in fields(Callbacks)] == [*NAMES, "user"]
    assert [*trainer.callbacks] == [*(getattr(trainer.callbacks, name) for name in NAMES), watch]


def test_d2_what_no_table_asks_for_is_off(tmp_path: Path) -> None:
    """A run without tables has the five callbacks that every run has."""
    trainer = Trainer(settings(tmp_path))
    trainer.run()
    there = [name for name in NAMES if getattr(trainer.callbacks, name) is not None]
    assert there == ["gradient_health", "logging", "progress", "checkpoint", "export"]


def test_d2_an_event_may_be_called_by_the_names_of_its_arguments() -> None:
    seen: list[Any] = []

    class Sees(Callback):
        def on_external_load(self, trainer: Any, event: Any) -> None:
            seen.append(event)

    Callbacks(user=(Sees(),)).on_external_load(trainer=None, event="event")  # type: ignore[arg-type]
    assert seen == ["event"]


def test_d2_logging_reports_at_the_interval_and_where_something_rare_was_measured(whole: Whole) -> None:
    """Rows of the first step, every third, the last, and of the evaluated ones; a user's callback gets the same."""
    folder, _, watch = whole
    found = rows(folder)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert [row["step"] for row in found if "eval/loss" in row] == watch.evaluated == [2, 4]
    of_the_file = ("unix_seconds", "total_tokens", "tokens_per_second")
    logged = [{name: value for name, value in row.items() if name not in of_the_file} for row in found]
    assert [(row["step"], row) for row in logged] == watch.logged
    assert [row["total_tokens"] for row in found] == [row["step"] * row["num_tokens"] for row in found]
    assert all(row["tokens_per_second"] == row["num_tokens"] / row["seconds"] for row in found)
    assert sorted(found, key=lambda row: row["unix_seconds"]) == found
    assert "memory/rss" not in found[1], "an evaluated step has no monitors by itself"


def test_d2_the_checkpoint_is_saved_with_what_was_measured(whole: Whole) -> None:
    """Retention may go by the held-out loss, which is in the step's manifest."""
    folder, _, _ = whole
    manifest = json.loads((folder / "run" / "checkpoints" / "step-2" / "MANIFEST.json").read_text())
    assert manifest["metrics"]["eval/loss"] == rows(folder)[1]["eval/loss"]


def test_d2_safetensors_exports_come_at_their_interval_and_at_the_end(whole: Whole, tmp_path: Path) -> None:
    """Steps 3 and 4 of four are there as Hugging Face folders, and differ."""
    exports = whole[0] / "run" / "exports"
    assert sorted(p.name for p in exports.iterdir()) == ["step-3", "step-4"]
    assert all((p / "model.safetensors").is_file() and (p / "config.json").is_file() for p in exports.iterdir())
    assert (exports / "step-3" / "model.safetensors").read_bytes() != (
        exports / "step-4" / "model.safetensors"
    ).read_bytes()


def test_d2_tensorboard_has_every_logged_number(whole: Whole) -> None:
    """The event file holds scalars under the names of metrics.jsonl, and an expert's load as a histogram."""
    events = EventAccumulator(str(whole[0] / "run" / "tensorboard"))
    events.Reload()
    found = rows(whole[0])
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("eval/loss")] == pytest.approx([r["eval/loss"] for r in found[1::2]])
    assert "moe/layers.1/load" in events.Tags()["histograms"]


def test_d2_wandb_has_a_run_that_can_be_synchronised(whole: Whole) -> None:
    """Offline W&B leaves its record with the logged names in it, and the id that a resumed run goes on with."""
    folder = whole[0] / "run"
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert (folder / "wandb-run-id").read_text() in record.name
    content = record.read_bytes()
    assert all(name in content for name in (b"eval/perplexity", b"moe/layers.1/load", b"titan_ckpt-tests"))


def test_d2_the_profiler_writes_a_trace_of_the_last_step_of_an_interval(whole: Whole) -> None:
    """One trace, of step 3 of every three, holds the optimizer and matrix products of that step."""
    (trace,) = (whole[0] / "run" / "profiles").iterdir()
    assert trace.name == "step-3-rank-0.json.gz"
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(name.startswith("Optimizer.step") for name in names)
    assert "aten::mm" in names


def test_d2_memory_is_monitored(whole: Whole) -> None:
    """A torch process takes more than 0.1 GiB, and never more than its peak."""
    row = rows(whole[0])[2]
    assert 0.1 < row["memory/rss"] <= row["memory/peak_rss"] < 64


def test_d2_the_load_of_every_expert_is_monitored(whole: Whole) -> None:
    """Shares of a layer's experts sum to one, and give its ratio and entropy; the dense layer has none."""
    row = rows(whole[0])[2]
    shares = torch.tensor(row["moe/layers.2/load"])
    assert "moe/layers.0/load" not in row
    assert float(shares.sum()) == pytest.approx(1)
    assert row["moe/layers.2/max_over_mean"] == pytest.approx(8 * float(shares.max()))
    assert row["moe/layers.2/entropy"] == pytest.approx(
        float(torch.special.entr(shares).sum() / torch.tensor(8.0).log())
    )
    layers = [row[f"moe/layers.{i}/max_over_mean"] for i in (1, 2, 3)]
    assert row["moe/max_over_mean"] == max(layers)
    assert isinstance(whole[1].model, Qwen3Moe)
    counted = [int(router.tokens.sum()) for router in whole[1].model.routers().values()]
    assert counted == [0, 0, 0], "counted anew after every log"


def test_d2_garbage_is_collected_on_schedule_only(whole: Whole) -> None:
    """Python's own collector is off while training, and on again after it; every second step ends with a collection."""
    assert whole[2].collects == [False] * 4
    assert whole[2].num_collections == [0, 1, 0, 1]
    assert gc.isenabled()


def test_d2_a_resumed_run_goes_on_in_the_same_trackers(whole: Whole) -> None:
    """W&B's id stays, TensorBoard's steps are those of one run; exports after step 2 are set aside and made again."""
    folder = whole[0]
    run_id = (folder / "run" / "wandb-run-id").read_text()
    config = everything(folder, steps=5)
    back = replace(config.checkpoint, resume=ResumeConfig(step=2))  # steps 3 and 4 are done again
    Trainer(replace(config, checkpoint=back)).run()
    assert (folder / "run" / "wandb-run-id").read_text() == run_id
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    names = sorted(path.name for path in (folder / "run" / "exports").iterdir())
    assert [name for name in names if "abandoned" not in name] == ["step-3", "step-5"]
    assert [name.partition(".")[0] for name in names if "abandoned" in name] == ["step-3", "step-4"]


def test_even_and_one_sided_loads_have_the_extreme_entropies() -> None:
    """Even is 1, one expert for all is 0."""
    for tokens, expected in (([5, 5, 5, 5], 1.0), ([20, 0, 0, 0], 0.0)):
        assert entropy(torch.tensor(tokens)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "table"), [("wandb", {"project": "p"}), ("tensorboard", {})])
def test_d2_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, table: dict[str, Any]
) -> None:
    """The error says which extra to install."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else real(module))
    with pytest.raises(ConfigError, match=rf"{name}: {name} is not installed; pip install 'titan-ckpt\[{name}\]'"):
        Trainer(settings(tmp_path, **{name: table})).run()


def test_d2_a_tracker_that_cannot_begin_is_said_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B without a key is one ConfigError, with the way out."""
    import wandb  # hidden while tests are collected

    def without_key(**asked: Any) -> None:
        assert (asked["project"], asked["id"]) == ("p", None)
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", without_key)
    with pytest.raises(ConfigError, match=r"wandb: No API key configured\. .* WANDB_MODE=offline"):
        Trainer(settings(tmp_path, wandb={"project": "p"})).run()
    assert losses(tmp_path) == []


LORA_WITH_DROPOUT = [{"kind": "lora", "rank": 2, "dropout": 0.5, "target_modules": ["wq", "w1"]}]


def position_and_generators(folder: Path, step: int, rank: int = 0) -> dict[str, Any]:
    """Return what a checkpoint holds of a rank besides tensors."""
    file = folder / "run" / "checkpoints" / f"step-{step}" / f"rank-{rank:05}.json"
    state: dict[str, Any] = json.loads(file.read_text())
    return state


class Again(Callback):
    """Demands that an evaluation does not depend on random numbers: dropout is off, and in one layer always."""

    def on_train_begin(self, trainer: Trainer) -> None:
        trainer.model.get_submodule("layers.0").eval()

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        assert isinstance(trainer.callbacks.evaluation, Evaluation)
        with torch.random.fork_rng():
            torch.manual_seed(step)
            assert trainer.callbacks.evaluation.evaluate(trainer) == values["eval/loss"]


class Drawing(Trainer):
    """Has a model that draws random numbers in evaluation too."""

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        return super().compute_loss(batch) + 0 * torch.rand(())


def test_d2_a_run_with_evaluation_is_the_run_without(tmp_path: Path) -> None:
    """Losses, weights, random generators, the position in the data and the mode of every module are the same."""
    runs = {}
    for name, tables in (("with", {"evaluation": {"interval": 1, "max_sequences": 7}}), ("without", {})):
        config = settings(tmp_path / name, data={"held_out": 0.2}, **tables)
        runs[name] = Drawing(config, from_tables(LORA_WITH_DROPOUT, "test"), [Again()])
        runs[name].run()
        assert not runs[name].model.get_submodule("layers.0").training
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    theirs = runs["without"].model.state_dict()
    assert all(torch.equal(value, theirs[fqn]) for fqn, value in runs["with"].model.state_dict().items())
    assert position_and_generators(tmp_path / "with", 3) == position_and_generators(tmp_path / "without", 3)


def evaluated(folder: Path, batch_size: int, interval: int) -> Any:
    """Return the settings of an evaluated run of uneven labels, seven sequences held out."""
    return settings(
        folder,
        data={"held_out": 0.2},
        training={"steps": 2, "batch_size": batch_size},
        evaluation={"interval": interval, "max_sequences": 7},
    )


class OneByOne(Callback):
    """Demands the mean over the tokens of seven sequences, each measured by itself: none to fill a batch."""

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        alone = [trainer.collate([trainer.held_out().sequence(number)]) for number in range(7)]
        loss = sum(float(trainer.measure_loss(batch)) for batch in alone) / sum(map(num_predicted, alone))
        assert values["eval/loss"] == pytest.approx(loss, abs=1e-5)


class Shards(Callback):
    """Demands that an evaluation leaves parameters as it found them: shards."""

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        assert all(isinstance(p, DTensor) for p in trainer.model.parameters())


@distributed(nproc=2)
def evaluate_on_two_ranks(tmp_path: Path) -> None:
    """Train twice on two ranks, evaluating every step or the last one only."""
    for interval in (1, 2):
        UnevenLabels(evaluated(tmp_path / f"two-{interval}", 2, interval), callbacks=[Shards()]).run()


def monitored(folder: Path, batch_size: int) -> Any:
    """Return the settings of one step of a mixture, four sequences in all."""
    return settings(
        folder,
        model={"name": "qwen3_moe", "flavor": "debug-1m"},
        training={"steps": 1, "batch_size": batch_size, "measure": ["memory", "load_balance"]},
    )


@distributed(nproc=2)
def monitor_on_two_ranks(tmp_path: Path) -> None:
    """Rank 0 takes 1 GiB, rank 1 takes 3."""
    rank = torch.distributed.get_rank()
    monitors.host_memory = lambda: {"rss": (1 + 2 * rank) * 2**30}
    Trainer(monitored(tmp_path / "two", 2)).run()


def test_d2_monitors_are_of_all_ranks(tmp_path: Path) -> None:
    """Experts are loaded by the tokens of both ranks, as in one process; memory is that of the rank that needs most."""
    monitor_on_two_ranks(tmp_path)
    Trainer(monitored(tmp_path / "one", 4)).run()
    (two,), (one,) = rows(tmp_path / "two"), rows(tmp_path / "one")
    assert two["memory/rss"] == 3.0
    for layer in (1, 2, 3):
        # 128 choices of experts: one of them may be a near tie
        assert two[f"moe/layers.{layer}/load"] == pytest.approx(one[f"moe/layers.{layer}/load"], abs=0.01)


def test_d2_evaluation_weights_every_token_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks and one find the same held-out loss; evaluating more often changes no later loss and no save."""
    evaluate_on_two_ranks(tmp_path)
    UnevenLabels(evaluated(tmp_path / "one", 4, 1), callbacks=[OneByOne()]).run()
    one, two = ([row["eval/loss"] for row in rows(tmp_path / name)] for name in ("one", "two-1"))
    assert one == pytest.approx(two, abs=2e-5)
    assert losses(tmp_path / "two-1") == losses(tmp_path / "two-2")
    for rank in (0, 1):
        files = [
            tmp_path / name / "run" / "checkpoints" / "step-2" / f"rank-{rank:05}.safetensors"
            for name in ("two-1", "two-2")
        ]
        assert files[0].read_bytes() == files[1].read_bytes()


class Poisoned(Trainer):
    """Has a loss that is not a number in step 4."""

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        return super().compute_loss(batch) * (float("nan") if self.state.step == 3 else 1.0)


def test_d2_gradient_health_keeps_the_last_good_state(tmp_path: Path) -> None:
    """A NaN in step 4 leaves a checkpoint of step 3 that goes on as if nothing had been; no line speaks of step 4."""
    dropout = from_tables(LORA_WITH_DROPOUT, "test")
    poisoned = Poisoned(settings(tmp_path / "run", training={"steps": 6}), dropout)
    with pytest.raises(FloatingPointError, match=r"step 4: .* is nan; the weights are those of step 3"):
        poisoned.run()
    assert all(p.isfinite().all() for p in poisoned.model.parameters())
    assert len(losses(tmp_path / "run")) == 3
    steps = sorted(p.name for p in (tmp_path / "run" / "run" / "checkpoints").glob("step-*"))
    assert steps == ["step-2", "step-3"]
    Trainer(settings(tmp_path / "run", training={"steps": 6}), from_tables(LORA_WITH_DROPOUT, "test")).run()
    Trainer(settings(tmp_path / "whole", training={"steps": 6}), from_tables(LORA_WITH_DROPOUT, "test")).run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("logged", "saved", "measured", "found", "left"),
    [
        (4, 3, [1, 4], "step 4: .* is nan; the weights are those of step 3", ["step-3"]),
        (4, 9, [1], "step 4: .* is nan; it was finite in step 1, the last that was checked, and nothing is saved", []),
        (3, 9, [1, 3], "step 6: .* is nan; it was finite in step 3, .* nothing is saved", []),
        (9, 3, [1], "step 6: .* is nan; it was finite in step 3, .* nothing is saved", ["step-3"]),
        (9, 2, [1], "step 4: .* is nan; it was finite in step 2, .* nothing is saved", ["step-2"]),
    ],
)
def test_d9_a_broken_gradient_is_found_at_the_next_log_or_save(
    tmp_path: Path, logged: int, saved: int, measured: list[int], found: str, left: list[str]
) -> None:
    """No save has weights that a gradient of step 4, which is not a number, may have reached."""
    training = {"steps": 12, "log_interval": logged, "check_gradients": "log"}
    with pytest.raises(GradientError, match=found):
        Poisoned(settings(tmp_path, training=training, checkpoint={"save": {"interval": saved}})).run()
    assert [row["step"] for row in rows(tmp_path)] == [step for step in measured if step != 4]
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.glob("step-*")] == left
    assert all(Manifest.from_bytes((folder / name / MANIFEST_NAME).read_bytes()).metrics["loss"] < 9 for name in left)


def test_d9_no_export_has_weights_that_a_broken_gradient_has_reached(tmp_path: Path) -> None:
    """A step that is exported is measured, saved or not."""
    training = {"steps": 12, "log_interval": 9, "check_gradients": "log"}
    tables = {"save": {"interval": 9}, "export": {"format": "dcp", "interval": 3}}
    with pytest.raises(GradientError, match=r"step 6: .* is nan; it was finite in step 3, .* nothing is saved"):
        Poisoned(settings(tmp_path, training=training, checkpoint=tables)).run()
    assert [folder.name for folder in (tmp_path / "run" / "exports").glob("step-*")] == ["step-3"]


@pytest.mark.parametrize("kind", ["stop", "save"])
def test_d9_a_save_out_of_turn_looks_at_the_weights(
    tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two logs too, a stop or a request saves no broken weights, and so expires no good ones."""
    training = {"steps": 12, "log_interval": 9, "check_gradients": "log"}
    saves = {"save": {"interval": 3, "keep": {"latest": 1}}}
    run = Poisoned(
        settings(tmp_path, training=training, checkpoint=saves), callbacks=[AfterStep(5, partial(post, kind=kind))]
    )
    ends: Any = contextlib.nullcontext() if kind == "stop" else pytest.raises(GradientError, match="step 6: ")
    with ends:
        run.run()
    assert "is not finite after step 5" in caplog.text
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-3"]


def test_d9_a_step_between_two_logs_has_no_loss_and_is_else_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, rows and counters are those of a run that checks each step; a row that a callback wants has no nan.

    The time of a measured step is the mean since the one before, because the device may do the work of all then.
    """

    class Measuring(Callback):
        def on_substep_end(self, trainer: Trainer, index: int) -> None:
            if trainer.state.step == 2:
                trainer.measurements["own/value"] = 1.0
                time.sleep(0.2 if check == "log" else 0.0)

    caplog.set_level(logging.INFO, logger="titan_ckpt")
    training = {"steps": 5, "log_interval": 4}
    found = {}
    for check in ("step", "log"):
        tables: dict[str, dict[str, Any]] = {
            "training": training | {"check_gradients": check},
            "evaluation": {"interval": 2, "max_sequences": 2},
        }
        watch = Watch()
        found[check] = Trainer(
            settings(tmp_path / check, data={"held_out": 0.1}, checkpoint={"save": None}, **tables),
            callbacks=[Measuring(), watch],
        )
        found[check].run()
        steps = [metrics.step for metrics in watch.steps if math.isnan(metrics.loss) and math.isnan(metrics.grad_norm)]
        assert steps == ([] if check == "step" else [3])
    names = ("step", "loss", "grad_norm", "lr", "num_tokens", "total_tokens", "eval/loss", "own/value")
    every, logged = ([{name: row.get(name) for name in names} for row in rows(tmp_path / check)] for check in found)
    assert [row["step"] for row in every] == [1, 2, 3, 4, 5]
    assert logged[2] == every[2] | {"loss": None, "grad_norm": None}
    assert logged[:2] + logged[3:] == every[:2] + every[3:]
    assert all(map(torch.equal, found["step"].model.parameters(), found["log"].model.parameters()))
    assert found["log"].state.seconds > 0.5 * sum(row["seconds"] for row in rows(tmp_path / "log"))
    assert rows(tmp_path / "log")[3]["seconds"] > 0.1
    assert any(text.startswith("step 3/5  lr") and "own/value 1" in text for text in caplog.messages)


class Late(Callback):
    """Measures in its own on_step_end, which follows the log and the save of the step."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        trainer.measurements["own/late"] = metrics.step / 8
        if metrics.step == 3:
            post(trainer)
            trainer.guard.check()


def test_what_a_callback_measures_in_on_step_end_is_logged_with_that_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the one row of the step, whether it was reported before or not, also in a step in which it is stopped."""
    caplog.set_level(logging.INFO, logger="titan_ckpt")
    watch = Watch()
    training = {"steps": 5, "log_interval": 3}
    run = Trainer(settings(tmp_path, training=training, tensorboard={}), callbacks=[Late(), watch])
    run.run()
    assert [(row["step"], row["own/late"]) for row in rows(tmp_path)] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert all(row["loss"] > 0 and row["total_tokens"] for row in rows(tmp_path))
    assert [*run.log_history] == rows(tmp_path)
    assert [(step, "loss" in values) for step, values in watch.logged] == [
        (1, True), (1, False), (2, True), (3, True), (3, False),
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("own/late", "loss"):
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
    assert [text for text in caplog.messages if text.endswith("own/late 0.375")] == ["step 3/5  own/late 0.375"]


def test_d2_every_event_comes_in_the_order_of_a_run(tmp_path: Path) -> None:
    """A user's callback gets all of them: what others report, save or measure in a step before its own step end.

    Eight sequences are an epoch of two steps; a resumed run is in the epoch it had left.
    """
    corpus = tmp_path / "short.txt"
    corpus.write_text("a b c d e f g h " * 8)
    tables: dict[str, dict[str, Any]] = {
        "data": {"corpus": str(corpus), "cache_folder": str(tmp_path / "cache"), "tokenizer": 258},
        "evaluation": {"interval": 2, "corpus": str(corpus)},
    }
    events = []
    for steps in (2, 4):
        recorder = Recorder()
        training = {"steps": steps, "batch_size": 2, "accumulation": 2}
        trainer = Trainer(settings(tmp_path, training=training, **tables), callbacks=[recorder])
        trainer.run()
        events.append(recorder.events)
    assert isinstance(trainer.dataset, PackedDataset)
    assert trainer.dataset.num_sequences == 8

    def step(number: int, *within: str) -> list[str]:
        micro_batches = ["substep_begin 0", "substep_end 0", "substep_begin 1", "substep_end 1"]
        events = [*within[:1], "log", *within[1:], "step_end"] if within else ["log", "step_end"]
        return [f"step_begin {number}", *micro_batches, *(f"{event} {number}" for event in ["pre_optimizer", *events])]

    two_steps = [
        ["train_begin", f"epoch_begin {epoch}", *step(2 * epoch + 1),
         *step(2 * epoch + 2, "evaluate", "save_begin", "save"),
         f"epoch_end {epoch}", f"epoch_begin {epoch + 1}", "train_end"]
        for epoch in (0, 1)
    ]  # fmt: skip
    assert events == [["init_end", f"load {done}", *two_steps[done // 2]] for done in (0, 2)]
    every = {name[3:] for name in vars(Callback) if name.startswith("on_")}
    assert {event.split()[0] for event in events[0]} == every - {"external_load", "committed", "exported"}, (
        "this run has its weights itself"
    )
    assert recorder.published == ["committed 4"]


class Published(Callback):
    """Looks at what it is told is committed and exported, and then fails."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []
        self.exported: list[tuple[int, bool]] = []

    def on_committed(self, trainer: Trainer, step: int, folder: str, digest: str) -> None:
        manifest = (Path(folder) / MANIFEST_NAME).read_bytes()
        self.saved.append((step, xxhash.xxh3_128_hexdigest(manifest) == digest))
        raise ValueError(f"notice of {step}")

    def on_exported(self, trainer: Trainer, step: int, folder: str) -> None:
        self.exported.append((step, (Path(folder) / "config.json").is_file()))
        raise ValueError(f"export of {step}")


def test_d2_a_callback_is_told_what_is_committed_and_exported_and_its_errors_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the files are there, never before; a save that fails has no event; each error is in the log."""
    real = CheckpointDirectory.commit

    def commit(self: CheckpointDirectory, attempt: Any, manifest: Any) -> None:
        if manifest.step == 2:
            raise SaveError("no space") from OSError(errno.ENOSPC, "full")
        real(self, attempt, manifest)

    monkeypatch.setattr(CheckpointDirectory, "commit", commit)
    save = {"interval": 1, "on_failure": "warn"}
    tables: Any = {"checkpoint": {"save": save, "export": {"format": "hf", "interval": 1}}, "training": {"steps": 3}}
    told = Published()
    Trainer(settings(tmp_path, **tables), callbacks=[told]).run()
    assert (told.saved, sorted(told.exported)) == ([(1, True), (3, True)], [(1, True), (3, True)])
    assert all(f"{what} of {step}" in caplog.text for what, step in [("notice", 1), ("notice", 3), ("export", 3)])


@pytest.mark.parametrize("mode", ["disabled", "thread", "process"])
@pytest.mark.parametrize("stop", [StopRun("stop"), SystemExit(3)])
def test_d2_a_callback_that_would_stop_the_run_on_rank_0_alone_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, stop: BaseException
) -> None:
    """It would in the thread that writes, where no other rank hears of it; the step is committed, and all are told."""
    told, after = Stopping(stop), Recorder()
    save = {"interval": 1, "async_mode": mode}
    tables: Any = {"checkpoint": {"save": save, "export": {"format": "hf", "interval": 1}}, "training": {"steps": 2}}
    trainer = Trainer(settings(tmp_path, **tables), callbacks=[told, after])
    assert trainer.run().step == 2 and trainer.exit_code == 0
    assert sorted(after.published) == [f"{what} {step}" for what in ("committed", "exported") for step in (1, 2)]
    assert len([record for record in caplog.records if "has failed; the run goes on" in record.message]) == 4


class Stopping(Callback):
    """Raises what ends a run elsewhere."""

    def __init__(self, stop: BaseException) -> None:
        self.stop = stop

    def on_committed(self, trainer: Trainer, step: int, folder: str, digest: str) -> None:
        raise self.stop

    def on_exported(self, trainer: Trainer, step: int, folder: str) -> None:
        raise self.stop


def test_d2_an_evaluation_is_on_the_console(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line of an evaluated step has the held-out loss; the last step is evaluated whatever the interval."""
    data = {"sequence_length": 16, "cache_folder": str(tmp_path / "cache"), "tokenizer": 300}
    config = settings(
        tmp_path, data=data | {"held_out": 0.1}, evaluation={"interval": 2, "max_sequences": 2}, training={"steps": 3}
    )
    with caplog.at_level(logging.INFO):
        Trainer(config).run()
    lines = [r.message for r in caplog.records if "tok/s" in r.message]
    assert ["eval/loss" in line for line in lines] == [False, True, True]


@pytest.mark.parametrize("terminal", [True, False])
def test_d2_a_progress_bar_is_on_a_terminal_only(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the last step there; a file or a pipe gets none of it."""
    console = Console(file=(output := io.StringIO()), force_terminal=terminal, width=100)
    monkeypatch.setattr("titan_ckpt.training.callbacks.console.CONSOLE", console)
    Trainer(settings(tmp_path)).run()
    assert ("3/3" in output.getvalue() and "training" in output.getvalue()) is terminal
    assert terminal or output.getvalue() == ""


class StoppedInEvaluation(Trainer):
    """Gets a signal while it measures step 2, and goes on until it is noticed."""

    def measure_loss(self, batch: Batch) -> torch.Tensor:
        if self.state.step == 2 and self.guard.stopped is None and not self.guard._posted:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.guard._board._due:
                time.sleep(0.01)
        return super().measure_loss(batch)


def test_a_step_that_is_saved_because_its_evaluation_was_stopped_has_its_line(tmp_path: Path) -> None:
    """The step that a resume goes on from is in metrics.jsonl, without the loss that was not measured."""
    tables: dict[str, Any] = {
        "data": {"held_out": 0.1}, "evaluation": {"interval": 1, "max_sequences": 4},
        "checkpoint": {"save": {"interval": 100}}, "training": {"steps": 4, "batch_size": 2, "device": "cpu"},
    }  # fmt: skip
    StoppedInEvaluation(settings(tmp_path, **tables)).run()
    assert [("step" in row, "eval/loss" in row) for row in rows(tmp_path)] == [(True, True), (True, False)]
    Trainer(settings(tmp_path, **tables)).run()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_rows_that_a_full_disk_refuses_are_written_before_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that was half written is taken back, the log warns once, and no row is lost once the disk takes them."""
    path = tmp_path / "metrics.jsonl"
    report = Logging(path)
    assert report._write({"step": 1})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # the kernel takes five bytes more
    try:
        refused = [report._write({"step": step}) for step in (2, 3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused == [False, False]
    assert path.read_bytes() == before
    assert report._write({"step": 4})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert caplog.text.count("rows wait until the disk takes them") == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        refused = [report._write({"step": 4, "late": 0.5}, again=True)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused == [False]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3], "it waits, whole"
    assert report._write({"step": 5})
    assert [*read_metrics(path)][3:] == [{"step": 4, "late": 0.5}, {"step": 5}]


def stop(_: Trainer) -> None:
    raise StopRun


@pytest.mark.parametrize("name", ["adamw", "schedulefree:AdamWScheduleFree", "schedulefree:SGDScheduleFree"])
def test_a_callback_that_raises_stop_run_ends_the_run_with_its_step_saved(tmp_path: Path, name: str) -> None:
    """As a signal does: the step is saved, the reason is known, and the same command goes on, bit for bit.

    The trainer sets the mode in which a schedule-free optimizer steps.
    """
    tables: dict[str, Any] = {"optimizer": {"name": name}, "checkpoint": {"save": {"interval": 100}}}
    trainer = Trainer(settings(tmp_path / "a", **tables))
    trainer.add_callback(AfterStep(2, stop))
    trainer.run()
    assert trainer.outcome == Outcome(2, 3, 2, "the run's own code has raised StopRun")
    for folder in (tmp_path / "a", tmp_path / "b"):
        Trainer(settings(folder, **tables)).run()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    one, other = (load_file(tmp_path / f"{n}/run/checkpoints/step-3/rank-00000.safetensors") for n in "ab")
    assert all(torch.equal(value, other[name]) for name, value in one.items())
