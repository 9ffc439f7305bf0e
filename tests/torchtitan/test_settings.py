"""Every setting of torchtitan's checkpoint config is honoured or refused by its name, before step 1."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

from tests.torchtitan.runs import config, distributed, same_tensors, steps_in, train
from titan_ckpt import CheckpointError, ExportConfig, InitialLoadConfig, StopConfig, StoreConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.torchtitan import TitanCheckpointer
from titan_ckpt.integrations.torchtitan.settings import SETTINGS, translated


def test_every_setting_of_torchtitan_has_a_meaning_here() -> None:
    """The table names exactly the settings of torchtitan's manager and our own, and the config has no others."""
    theirs = {field.name for field in dataclasses.fields(CheckpointManager.Config)}
    ours = {field.name for field in dataclasses.fields(TitanCheckpointer.Config)}
    own = {"additional_load_path", "allow", "include_base", "last_save_adapter", "last_save_in_dcp", "stop", "store"}
    assert set(SETTINGS) == theirs | own == ours


def _values(config: Any, path: str = "") -> dict[str, Any]:
    """Return each value of a config by its path."""
    if not dataclasses.is_dataclass(config):
        return {path.rstrip("."): config}
    named = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {key: one for name, value in named for key, one in _values(value, f"{path}{name}.").items()}


def test_settings_change_what_the_manager_is_told(tmp_path: Path) -> None:
    """Each value of a setting that torchtitan honours changes ours of that meaning, to that value, and no other."""
    path, s3 = str(tmp_path), "s3://bucket/run"
    of_hf = ExportConfig("hf", dtype="float32", folder=f"{s3}/exports")
    changes: dict[str, tuple[Any, dict[str, Any]]] = {
        "folder": (f"{s3}/other", {"folder": f"{s3}/other"}),
        "interval": (3, {"save.interval": 3}),
        "async_mode": ("async", {"save.async_mode": "thread"}),
        "keep_latest_k": (5, {"save.keep.latest": 5}),
        "load_only": (True, {"save": None}),
        "exclude_from_loading": (["optimizer"], {"resume.exclude": ("optimizer",)}),
        "enable_first_step_checkpoint": (True, {"save.first_step": True}),
        "last_save_model_only": (False, {"save.model_only_last": False}),
        "last_save_in_hf": (True, {"export": (of_hf,), "save.model_only_last": False}),
        "last_save_in_dcp": (True, {"export": (ExportConfig("torchtitan", folder=f"{s3}/dcp"),)}),
        "export_dtype": ("bfloat16", {"save.model_only_last": "bfloat16"}),
        "initial_load_path": (path, {"initial_load": (InitialLoadConfig(path, cast=True),)}),
        "additional_load_path": (path, {"initial_load": (InitialLoadConfig(path, cast=True),)}),
        "include_base": (True, {"save.include_base": True}),
        "store": (StoreConfig(retry_seconds=60.0), {"store.retry_seconds": 60.0}),
        "allow": (["a.B"], {"allow": ("a.B",)}),
        "stop": (StopConfig(after_hours=1.0), {"stop.after_hours": 1.0}),
    }
    in_bucket: dict[str, Any] = {"folder": f"{s3}/checkpoint"}  # where settings of a store make sense
    plain = _values(translated(TitanCheckpointer.Config(**in_bucket), None))
    for name, (value, expected) in changes.items():
        told = _values(translated(TitanCheckpointer.Config(**in_bucket | {name: value}), None))
        assert {key: one for key, one in told.items() if plain.get(key, ...) != one} == expected, name
    pinned = TitanCheckpointer.Config(async_mode="async_with_pinned_mem", keep_latest_k=0, last_save_in_hf=True)
    told = _values(translated(pinned, None))
    assert (told["save.async_mode"], told["save.keep"]) == ("process", None)
    assert translated(TitanCheckpointer.Config(load_only=True, last_save_in_hf=True), None).export == ()
    hf: dict[str, Any] = {"last_save_in_hf": True}
    from_hf = translated(TitanCheckpointer.Config(initial_load_in_hf=True), str(tmp_path))
    assert [(source.path, source.format) for source in from_hf.initial_load] == [(str(tmp_path), "hf")]
    whole = TitanCheckpointer.Config(initial_load_path=str(tmp_path), initial_load_model_only=False)
    assert translated(whole, None).initial_load[0].load == "training_state"
    formats = {
        form: [export.format for export in translated(TitanCheckpointer.Config(last_save_adapter=form, **hf)).export]
        for form in ("merged", "peft", "both")
    }
    assert formats == {"merged": ["hf"], "peft": ["peft"], "both": ["hf", "peft"]}
    last = translated(TitanCheckpointer.Config(last_save_in_dcp=True, **hf), None).export
    assert [export.folder for export in last] == ["exports", "dcp"]
    last = translated(TitanCheckpointer.Config(last_save_in_dcp=True, **hf, **in_bucket), None).export
    assert [export.folder for export in last] == ["s3://bucket/run/exports", "s3://bucket/run/dcp"]
    by_calls = {"enable", "load_step", "create_seed_checkpoint", "initial_load_in_hf", "initial_load_model_only"}
    by_content = {"initial_load_in_hf_quantized"}
    assert {*changes, *by_calls, *by_content, "last_save_adapter"} == set(SETTINGS)


def _built(made: TitanCheckpointer.Config, folder: str = "", **more: Any) -> TitanCheckpointer:
    objects: dict[str, Any] = {"dataloader": None, "model_parts": [torch.nn.Linear(2, 2)], "optimizers": []}
    objects |= {"lr_schedulers": None, "states": {}, "sd_adapter": None}
    return TitanCheckpointer(made, base_folder=folder, **objects | more)


class _Fault:
    enabled = True


@pytest.mark.parametrize(
    ("settings", "more", "complaint"),
    [
        ({"folder": "hdfs://host/run"}, {}, "checkpoint.folder: hdfs://host/run: expected a path on a mounted file"),
        ({}, {"folder": "s3://bucket/run"}, "checkpoint.folder: the run's dump_folder, s3://bucket/run, is remote"),
        (
            {"folder": "s3://b/run", "last_save_in_dcp": True},
            {},
            "checkpoint.folder: s3://b/run: the last step's folder",
        ),
        ({"initial_load_path": "hf://a/b"}, {}, "checkpoint.initial_load_path: hf://a/b: expected a path on a mounted"),
        ({"initial_load_path": "/nowhere/at/all"}, {}, "checkpoint.initial_load_path: /nowhere/at/all is no folder"),
        ({"exclude_from_loading": ["optimiser"]}, {}, "exclude_from_loading: the run has no 'optimiser'; it has"),
        ({"initial_load_in_hf": True}, {}, "initial_load_in_hf: no initial_load_path and no hf_assets_path"),
        ({"load_step": -2}, {}, "load_step: -2 is no step"),
        ({"create_seed_checkpoint": True, "load_only": True}, {}, "create_seed_checkpoint: load_only permits no save"),
        ({"export_dtype": "int3"}, {}, "export_dtype: 'int3'; expected one of float16, float32, bfloat16"),
        ({"last_save_in_hf": True}, {}, "last_save_in_hf: the model spec has no state_dict_adapter"),
        ({}, {"ft_manager": _Fault()}, "fault_tolerance.enable: TitanCheckpointer does not work with torchft"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(settings: dict[str, Any], more: dict[str, Any], complaint: str) -> None:
    """One error names torchtitan's own setting and what to do."""
    with pytest.raises(ConfigError, match=complaint):
        _built(TitanCheckpointer.Config(enable=True, **settings), **more)


def test_faults_are_listed_together_and_unknown_settings_too(tmp_path: Path) -> None:
    """A subclass with settings of its own, such as torchft's, is not half understood."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class More(TitanCheckpointer.Config):
        enable_ft_dataloader_checkpoints: bool = True

    with pytest.raises(ConfigError) as error:
        _built(More(enable=True, folder="hdfs://a/b"))
    assert "enable_ft_dataloader_checkpoints" in str(error.value)
    assert len(error.value.problems) == 2


def test_a_disabled_checkpointer_does_nothing(tmp_path: Path) -> None:
    """Every public method answers, and no folder is made."""
    off = _built(TitanCheckpointer.Config(enable=False, folder="s3://nothing"), str(tmp_path))
    assert isinstance(off, BaseCheckpointManager)
    assert (off.load(), off.save(1, last_step=True)) == (False, False)
    off.maybe_wait_for_staging()
    off.maybe_wait_for_saving()
    off.close()
    assert os.listdir(tmp_path) == []


class _Counter:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class _Small:
    """A run of a single layer, with the objects that the Trainer hands over."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (n + 1))
        self.state = _Counter()
        made = TitanCheckpointer.Config(**{"enable": True, "interval": 1, "last_save_model_only": False} | settings)
        objects: dict[str, Any] = {"model_parts": [model], "optimizers": [self.optimizer]}
        objects |= {"lr_schedulers": self.schedule, "states": {"train_state": self.state}}
        self.checkpointer = _built(made, str(folder), **objects)

    def train(self, steps: int) -> None:
        for step in range(self.state.step + 1, steps + 1):
            self.state.step = step
            sum(param.sum() for param in self.optimizer.param_groups[0]["params"]).backward()
            self.optimizer.step()
            self.schedule.step()
            self.checkpointer.save(step, last_step=step == steps)
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()

    def loaded(self, step: int = -1) -> tuple[int, int, int]:
        """Load, and return the run's step, its schedule's, and the number of parameters with moments."""
        assert self.checkpointer.load(step)
        self.checkpointer.close()
        return self.state.step, self.schedule.last_epoch, len(self.optimizer.state)


def test_retention_and_the_steps_that_are_saved(tmp_path: Path) -> None:
    """0 keeps every step; 2 keep the newest two of the first, interval and last steps; torchtitan refuses 1."""
    _Small(tmp_path / "all", keep_latest_k=0).train(12)
    assert steps_in(tmp_path / "all") == [*range(1, 13)]
    _Small(tmp_path / "two", keep_latest_k=2, interval=3, enable_first_step_checkpoint=True).train(2)
    assert steps_in(tmp_path / "two") == [1, 2]
    more = _Small(tmp_path / "two", keep_latest_k=2, interval=3)
    more.checkpointer.load()
    more.train(8)
    assert steps_in(tmp_path / "two")[-2:] == [6, 8]
    with pytest.raises(ValueError, match="at least 2 checkpoint replicas"):
        _Small(tmp_path, keep_latest_k=1)


@pytest.mark.parametrize("source", ["step", "dcp"])
def test_each_state_can_be_left_out_of_a_load(tmp_path: Path, source: str) -> None:
    """From a step of its own folder, and from a DCP folder by its path: what is named keeps the run's own values."""
    _Small(tmp_path / "run", last_save_in_dcp=True).train(2)
    settings: dict[str, Any] = {"load_only": True}
    if source == "dcp":
        settings |= {"initial_load_path": str(tmp_path / "run/dcp/step-2"), "initial_load_model_only": False}
    expected = {"optimizer": (2, 2, 0), "lr_scheduler": (2, 0, 2), "train_state": (0, 2, 2), "dataloader": (2, 2, 2)}
    folder = tmp_path / ("run" if source == "step" else "other")
    assert {name: _Small(folder, exclude_from_loading=[name], **settings).loaded() for name in expected} == expected
    assert _Small(folder, exclude_from_loading=[*expected], **settings).loaded() == (0, 0, 0)


def test_a_run_whose_steps_would_be_older_than_what_it_resumed_is_refused(tmp_path: Path) -> None:
    """Without its counter a run would fail at its first save; it is told before step 1, and may begin elsewhere."""
    _Small(tmp_path / "run", last_save_in_dcp=True).train(3)
    left_out: dict[str, Any] = {"exclude_from_loading": ["train_state"]}
    refused = _Small(tmp_path / "run", interval=2, **left_out).checkpointer
    with pytest.raises(ConfigError, match="its save of step 2 would be older than step 3, which is in its folder"):
        refused.load()
    refused.close()
    path = {"initial_load_path": str(tmp_path / "run/checkpoint/step-3"), "initial_load_model_only": False}
    elsewhere = _Small(tmp_path / "elsewhere", **left_out, **path)
    assert elsewhere.checkpointer.load()
    elsewhere.train(2)
    assert steps_in(tmp_path / "elsewhere") == [1, 2]
    relative = _Small(Path(os.path.relpath(tmp_path / "run")), interval=2, **left_out).checkpointer
    with pytest.raises(ConfigError, match="its save of step 2 would be older than step 3, which is in its folder"):
        relative.load()
    relative.close()
    newer = _Small(tmp_path / "run", interval=4, **left_out)
    assert newer.checkpointer.load()
    newer.train(4)
    assert steps_in(tmp_path / "run")[-1] == 4


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    """Without a folder too; and no folder is made."""
    with pytest.raises(FileNotFoundError, match="step 3 is not there; committed steps: none"):
        _Small(tmp_path / "none").checkpointer.load(3)
    assert not (tmp_path / "none").exists()
    _Small(tmp_path / "run").train(2)
    with pytest.raises(FileNotFoundError, match="step 0 is not there; committed steps: 1, 2"):
        _Small(tmp_path / "run").checkpointer.load(0)
    assert _Small(tmp_path / "run").loaded(1) == (1, 1, 2)


@distributed(1)
def _lifecycle(assets: Path, folder: Path) -> None:
    def seed(trainer: Any) -> None:
        trainer.checkpointer.save(curr_step=0, last_step=True)

    first = train(config(assets, folder / "seed", layers=2, steps=0, create_seed_checkpoint=True), then=seed)
    assert steps_in(folder / "seed") == [0]
    shutil.copytree(folder / "seed", folder / "run")
    other = config(assets, folder / "run", layers=2, steps=0)
    other.debug.seed = 5
    answers: list[bool] = []
    started = train(other, then=lambda trainer: answers.append(trainer.checkpointer.load()))
    same_tensors(started.model, first.model)
    assert answers == [True]

    settings: dict[str, Any] = {"last_save_model_only": True, "export_dtype": "bfloat16", "async_mode": "async"}
    saved: list[bool] = []

    def wait(trainer: Any) -> None:
        trainer.checkpointer.maybe_wait_for_saving()
        saved.append(trainer.checkpointer.save_future is None)

    run = train(config(assets, folder / "run", layers=2, steps=3, keep_latest_k=2, **settings), then=wait)
    assert saved == [True]
    assert steps_in(folder / "run") == [0, 2, 3]
    path: dict[str, Any] = {"initial_load_path": str(folder / "run/checkpoint/step-3")}
    again = train(config(assets, folder / "again", layers=2, steps=0, load_only=True, **path))
    same_tensors(again.model, {name: value.bfloat16().float() for name, value in run.model.items()})
    assert not (folder / "again").exists()
    with pytest.raises(CheckpointError, match="step 3 holds model weights only"):
        train(config(assets, folder / "run", layers=2, steps=4, load_step=3))
    with pytest.raises(CheckpointError, match="step 7 is not there; committed steps: 0, 2, 3"):
        train(config(assets, folder / "run", layers=2, steps=4, load_step=7))
    left_out: dict[str, Any] = {"load_only": True, "exclude_from_loading": ["train_state"]}
    kept = train(config(assets, folder / "run", layers=2, steps=2, **left_out))
    assert kept.step == 2
    assert len(kept.losses) == 2  # its own counter was left out of the load, so it trained two steps again


def test_seeds_last_steps_and_exclusions(assets: Path, tmp_path: Path) -> None:
    """A seed starts another run; the last step holds the model alone in its dtype; an excluded state stays as it is."""
    _lifecycle(assets, tmp_path)
