"""CheckpointManager as a user meets it: save, resume, bad input. Real files, real optimizers."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import world
from tests.run_folder import Disk, RunFolder
from tests.world import Bare, Value, same, step_with_ones
from tests.world import manager as build
from titan_ckpt import ExportConfig, KeyMap, KeyRule, StateDictTransforms
from titan_ckpt.config import InitialLoadConfig, KeepConfig, ResumeConfig, SaveConfig
from titan_ckpt.errors import ConverterError, CorruptCheckpointError, LoadMismatchError
from titan_ckpt.formats.reading import engine
from titan_ckpt.geometry.chunks import LazyTensor, blocks_of, info_of
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.types import StateDict


class Run:
    """A tiny training run: model, AdamW in two groups, scheduler, data position, counters."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.data = Value()
        self.counters = Value()
        self.losses: list[float] = []

    def manager(self, folder: RunFolder | Path, /, **settings: Any) -> CheckpointManager:
        folder = RunFolder(folder) if isinstance(folder, Path) else folder
        settings.setdefault("save", SaveConfig(interval=2))
        return build(
            folder,
            self.model,
            self.optimizer,
            **settings,
            lr_schedulers=[self.scheduler],
            dataloader=self.data,
            states={"counters": self.counters},
        )

    def step(self) -> None:
        """One step on data that depends on every generator and on the data position."""
        self.data.value += 1
        noise = random.random() + float(np.random.rand()) + self.data.value  # noqa: NPY002
        x = torch.randn(3, 4) + noise
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.counters.value += 7
        self.losses.append(loss.item())

    def train(self, manager: CheckpointManager, last: int, stop: int | None = None) -> None:
        for step in range(manager.load().step + 1, (stop or last) + 1):
            self.step()
            manager.save(step, last_step=step == last)

    def state(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.data.value,
            "counters": self.counters.value,
            "rng": (random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()),
        }


def seeded(steps: int = 0) -> Run:
    """Return a run that has taken so many steps since all generators were seeded."""
    run = Run()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    for _ in range(steps):
        run.step()
    return run


@pytest.mark.parametrize("mode", ["disabled", "thread", "process"])
def test_a_resumed_run_equals_an_uninterrupted_one(run_folder: RunFolder, mode: Any) -> None:
    """Three steps, a new process's objects, three more: every bit as six in a row."""
    whole = seeded(6)
    first = seeded()
    with first.manager(run_folder / "halves", save=SaveConfig(interval=3, async_mode=mode)) as manager:
        first.train(manager, 6, stop=3)
    second = Run(seed=5)
    random.seed(5), np.random.seed(5)  # noqa: NPY002
    with second.manager(run_folder / "halves", save=SaveConfig(interval=3, async_mode=mode)) as manager:
        second.train(manager, 6)
    assert first.losses + second.losses == whole.losses
    assert same(second.state(), whole.state())


def test_a5_saves_follow_the_interval_and_the_last_step(run_folder: RunFolder) -> None:
    """Interval 2 and 5 steps: 2, 4 and the last one."""
    run = Run()
    with run.manager(run_folder) as manager:
        run.train(manager, 5)
    assert run_folder.steps() == [2, 4, 5]


def test_retention_keeps_what_it_says(run_folder: RunFolder) -> None:
    """Latest 2 and every 4 of the steps 2, 4, .., 10."""
    run = Run()
    with run.manager(run_folder, save=SaveConfig(interval=2, keep=KeepConfig(latest=2, every=4))) as manager:
        run.train(manager, 10)
    assert run_folder.steps() == [4, 8, 10]


def test_the_best_step_stays(run_folder: RunFolder) -> None:
    """With the losses 3, 1, nan and 2, step 2 is kept beside the newest."""
    run = Run()
    keep = KeepConfig(latest=1, best=1, metric="loss")
    with run.manager(run_folder, save=SaveConfig(interval=1, keep=keep)) as manager:
        manager.load()
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0], 1):
            run.step()
            manager.save(step, metrics={"loss": loss})
    assert run_folder.steps() == [2, 4]


def test_nothing_expires_by_a_metric_that_no_save_has_had(
    run_folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is misspelled is said once, when it matters; the first step with the metric lets others go."""
    run = Run()
    with run.manager(run_folder, save=SaveConfig(interval=1, keep=KeepConfig(best=1, metric="eval/loss"))) as manager:
        manager.load()
        for step in (1, 2, 3):
            run.step()
            manager.save(step, metrics={"eval_loss": 1.0})
        manager.wait()
        assert run_folder.steps() == [1, 2, 3]
        assert caplog.text.count("no save has had eval/loss so far") == 1
        assert "the metrics are eval_loss" in caplog.text
        run.step()
        manager.save(4, metrics={"eval/loss": 1.0})
    assert run_folder.steps() == [4]


def test_a5_a_run_without_a_save_table_writes_nothing(run_folder: RunFolder) -> None:
    """Load-only: it resumes, and leaves the folder as it was."""
    run = Run()
    with run.manager(run_folder) as manager:
        run.train(manager, 2)
    before = run_folder.everything()
    other = Run(seed=3)
    with other.manager(run_folder, save=None) as manager:
        assert manager.load().step == 2
        other.step()
        manager.save(3, last_step=True)
    assert run_folder.everything() == before


def test_a5_a_step_can_be_asked_for_and_rolled_back_to(run_folder: RunFolder) -> None:
    """load(2) of 2, 4 goes back to 2, training goes on, and the abandoned 4 is not resumed from."""
    run = Run()
    with run.manager(run_folder) as manager:
        run.train(manager, 4)
    again = Run(seed=3)
    with again.manager(run_folder, resume=ResumeConfig(step=2)) as manager:
        assert manager.load().step == 2
        again.step()
        again.step()
        manager.save(4, last_step=True)
    assert same(again.model.state_dict(), run.model.state_dict())
    assert run_folder.steps() == [2, 4]


def test_a_resume_fills_weights_and_optimizer_in_one_round(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read of the one waits for the last of the other, and a file is looked at once."""
    rounds: list[int] = []

    execute = engine.execute

    def noted(readers: Sequence[engine.SliceReader], **options: Any) -> int:
        rounds.append(len(readers))
        return execute(readers, **options)

    run = Run()
    with run.manager(run_folder, save=SaveConfig(interval=1, async_mode="disabled")) as manager:
        run.step()
        manager.save(1)
        weights = run.state()["model"]
        run.step()
        monkeypatch.setattr(engine, "execute", noted)
        assert manager.load(1).step == 1
    assert rounds == [1] and same(run.state()["model"], weights)


def test_f5_a_flipped_bit_falls_back_to_the_step_before(
    run_folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest step is damaged: the one before is taken, and the log says why."""
    run = Run()
    with run.manager(run_folder) as manager:
        run.train(manager, 4)
    run_folder.damage(4)
    assert world.load(Run().manager(run_folder)).step == 2
    assert "step 4" in caplog.text


def test_f5_nothing_readable_is_never_a_fresh_start(run_folder: RunFolder) -> None:
    """All steps are damaged: an error, not step 0."""
    run = Run()
    with run.manager(run_folder) as manager:
        run.train(manager, 4)
    for step in (2, 4):
        run_folder.damage(step)
    world.load_fails(Run().manager(run_folder), CorruptCheckpointError)


def test_a_model_that_does_not_fit_is_one_error_and_nothing_is_touched(run_folder: RunFolder) -> None:
    """The live model is as it was. tests/test_messages.py has every kind of misfit."""
    with (run := Run()).manager(run_folder) as manager:
        run.train(manager, 2)
    other = Run(width=9)
    before = other.state()
    message = r"0\.weight: expected float32\[9, 4\], found float32\[8, 4\]"
    world.load_fails(other.manager(run_folder), LoadMismatchError, message)
    assert same(other.state(), before)


def test_a4_a_native_step_is_a_source_of_weights(run_folder: RunFolder) -> None:
    """Another run starts from a step of this one: its weights, step 0, a fresh optimizer."""
    with (run := Run()).manager(run_folder / "a") as manager:
        run.train(manager, 2)
    other = Run(seed=9)
    source = (InitialLoadConfig(f"{(run_folder / 'a').checkpoints}/step-2"),)
    result = world.load(other.manager(run_folder / "b", initial_load=source))
    assert result.step == 0
    assert same(other.model.state_dict(), run.model.state_dict())
    assert not other.optimizer.state


def test_a5_an_excluded_model_takes_the_weights_of_the_initial_sources(run_folder: RunFolder, tmp_path: Path) -> None:
    """The moments are those of the step, the weights those of the source; without a source they stay as built."""
    base = Run(seed=5)
    with base.manager(tmp_path / "base") as manager:
        base.train(manager, 1)
    with (run := Run()).manager(run_folder) as manager:
        run.train(manager, 2)
    source = InitialLoadConfig(str(tmp_path / "base" / "checkpoints" / "step-1"))
    exclude = ResumeConfig(exclude=("model",))
    for sources, expected in (((source,), base), ((), Run(seed=9))):
        other = Run(seed=9)
        result = world.load(other.manager(run_folder, resume=exclude, initial_load=sources, save=None))
        assert result.step == 2 and bool(result.report.loaded) == bool(sources)
        assert same(other.model.state_dict(), expected.model.state_dict())
        assert same(other.optimizer.state_dict(), run.optimizer.state_dict())


class Named(Bare):
    """A converter that owns nothing and is called something."""

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self) -> list[dict[str, Any]]:
        return [{"kind": self.name}]


def test_f10_another_set_of_converters_is_named(run_folder: RunFolder) -> None:
    """A step saved with one converter is not resumed with another, nor one saved with none with one."""
    world.save(build(run_folder, nn.Linear(2, 2), model_converters=Named("float8")))
    world.load_fails(build(run_folder, nn.Linear(2, 2)), ConverterError, r"float8.*this run has none")
    world.save(build(run_folder / "plain", nn.Linear(2, 2)))
    named = build(run_folder / "plain", nn.Linear(2, 2), model_converters=Named("float8"))
    world.load_fails(named, ConverterError, "float8")


def test_a_failed_background_save_is_raised_once(run_folder: RunFolder) -> None:
    """An error in the writing thread shows at the next save, once; saving goes on after it."""
    run, disk = Run(), Disk()
    config = SaveConfig(interval=1, async_mode="thread")
    with disk.inserted(), run.manager(run_folder, save=config) as manager:
        manager.load()
        run.step()
        manager.save(1)
        manager.wait()
        disk.error = errno.EDQUOT
        run.step()
        manager.save(2)
        run.step()
        with pytest.raises(OSError, match="Disk quota exceeded"):
            manager.save(3)
        disk.error = 0
        assert manager.save(3), "it is not taken for saved because a save of it was started"
        manager.wait()
    assert run_folder.steps() == [1, 3]


def test_a1_names_and_dtypes_in_files_are_those_of_the_transforms(tmp_path: Path) -> None:
    """The manager and the storage have none of their own: an export is named by the table, a step by the model."""
    model = nn.Linear(4, 4)
    table = KeyMap((KeyRule.of("weight", "model.w"), KeyRule.of("bias", "model.b")))
    transforms = StateDictTransforms(table, {"model_type": "mine", "architectures": ["Mine"]})
    export = ExportConfig("hf", dtype="bfloat16")
    with build(tmp_path, model, sd_transforms=transforms, export=(export,)) as manager:
        manager.load()
        manager.save(1, last_step=True)
    exported = world.tensors(tmp_path / "exports/step-1")
    assert {key: value.dtype for key, value in exported.items()} == dict.fromkeys(
        ("model.w", "model.b"), torch.bfloat16
    )
    assert torch.equal(exported["model.w"], model.weight.bfloat16())
    fresh = nn.Linear(4, 4)
    world.load(build(tmp_path, fresh))
    assert torch.equal(fresh.weight, model.weight)


class Twice(Bare):
    """A converter that owns `lora`, and exports twice the base without it."""

    def key_filter(self, fqn: str) -> bool:
        return fqn == "lora"

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        return {k: 2 * v for k, v in state_dict.items() if k != "lora"} if last_step else dict(state_dict)


def with_lora() -> nn.Linear:
    model = nn.Linear(4, 4)
    model.register_parameter("lora", nn.Parameter(torch.rand(4)))
    return model


def test_a2_steps_hold_everything_exports_what_converters_make_and_sources_fill_the_base(tmp_path: Path) -> None:
    """A step and a resume are `full`, an export is `export`, and a Hugging Face folder is read into `base`."""
    table = KeyMap((KeyRule.of("weight", "model.w"), KeyRule.of("bias", "model.b")))
    given: dict[str, Any] = {
        "sd_transforms": StateDictTransforms(table, {"model_type": "mine", "architectures": ["Mine"]}),
        "model_converters": Twice(),
    }
    model, resumed, other = with_lora(), with_lora(), with_lora()
    with build(tmp_path, model, export=(ExportConfig("hf", interval=1),), **given) as manager:
        manager.load()
        manager.save(1)
        manager.wait()  # in the background
        manager.save(2, last_step=True)
    for step in (1, 2):
        exported = world.tensors(tmp_path / f"exports/step-{step}")
        assert same(exported, {"model.w": 2 * model.weight, "model.b": 2 * model.bias})
    world.load(build(tmp_path, resumed, **given))
    assert same(resumed.state_dict(), model.state_dict())
    own = other.state_dict()["lora"].clone()
    result = world.load(build(tmp_path / "other", other, initial_load=[tmp_path / "exports/step-1"], **given))
    assert (*result.report.loaded, *result.report.initialized) == ("weight", "bias", "lora")
    assert same(other.state_dict(), {"weight": 2 * model.weight, "bias": 2 * model.bias, "lora": own})


class ComputedLate(Twice):
    """A converter whose exported values cannot be staged: they are computed when they are written."""

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        made = super().state_dict_transform(state_dict, last_step)
        if not last_step:
            return made
        return {fqn: LazyTensor(info_of(value), partial(blocks_of, value)) for fqn, value in made.items()}


def test_an_export_that_cannot_be_staged_is_told_as_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is made while training waits, the manager knows it as its newest, and a full disk is one warning."""
    caplog.set_level(logging.INFO)
    export, model, disk = ExportConfig("dcp", interval=1), with_lora(), Disk()
    given: dict[str, Any] = {"save": SaveConfig(interval=1, on_failure="warn"), "model_converters": ComputedLate()}
    with build(tmp_path, model, export=(export,), **given) as manager:
        manager.load()
        manager.save(1)
        assert manager.exported == {export: tmp_path / "exports/step-1"}
        manager.save(2, export=False)
        manager.wait()
        with disk.inserted():
            disk.error = errno.ENOSPC
            manager.export(2)
        assert manager.exported == {export: tmp_path / "exports/step-1"}
    assert "is made now: its values cannot be staged" in caplog.text and "step 2 is not exported" in caplog.text


def test_f12_an_optimizer_step_waits_for_staging(run_folder: RunFolder) -> None:
    """A plain loop that never calls maybe_wait_for_staging saves the weights of the step it asked for."""
    model, fresh = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with build(run_folder, model, optimizer) as manager:
        for step in range(1, 4):
            step_with_ones(optimizer)
            wanted = model.weight.detach().clone()
            manager.save(step)
        step_with_ones(optimizer)
    world.load(build(run_folder, fresh, torch.optim.SGD(fresh.parameters(), lr=1.0)))
    assert torch.equal(fresh.weight, wanted)
