"""A resume takes changed settings of the optimizer from the run file; everything else goes on from the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import AfterStep, settings
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.trainer import Trainer

ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SGD = {"name": "torch.optim:SGD", "lr": 0.1, "settings": {"momentum": 0.9}}


class ChangesAfterTwo(Callback):
    """Does what the resume should do, in a run that is not interrupted."""

    def __init__(self, changed: dict[str, Any]) -> None:
        self.changed = changed

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if metrics.step != 2:
            return
        for i, group in enumerate(trainer.optimizer.param_groups):
            group |= {name: value for name, value in self.changed.items() if name not in ("lr", "weight_decay")}
            group["weight_decay"] = self.changed.get("weight_decay", group["weight_decay"]) if i == 0 else 0.0
            if "lr" in self.changed:
                scheduler = trainer.lr_scheduler
                scheduler.base_lrs[i] = group["initial_lr"] = self.changed["lr"]
                group["lr"] = self.changed["lr"] * scheduler.lr_lambdas[i](scheduler.last_epoch)


def trained(folder: Path, steps: int, optimizer: dict[str, Any], *callbacks: Callback) -> Trainer:
    """Train by a schedule of four steps, to step 2 or 4."""
    schedule = {"kind": "linear", "warmup_ratio": 0.0}
    trainer = Trainer(settings(folder, training={"steps": 4}, schedule=schedule, optimizer=optimizer))
    for callback in callbacks:
        trainer.add_callback(callback)
    if steps == 4:
        trainer.run()
        return trainer
    trainer.add_callback(AfterStep(2, stop))
    with pytest.raises(KeyError, match="stopped"):
        trainer.run()
    return trainer


def stop(_: Trainer) -> None:
    """End a run of four steps after its second, which is saved."""
    raise KeyError("stopped")


@pytest.mark.parametrize(
    ("before", "now", "in_groups"),
    [
        (ADAMW, {"lr": 1e-3}, {"lr": 1e-3}),
        (ADAMW, {"weight_decay": 0.5}, {"weight_decay": 0.5}),
        (ADAMW, {"lr": 0.1, "betas": [0.5, 0.6], "eps": 1e-3}, {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3}),
        (SGD, {"settings": {"momentum": 0.5}}, {"momentum": 0.5}),
        (SGD, {"settings": {"nesterov": True, "momentum": 0.9}, "lr": 0.3}, {"nesterov": True, "lr": 0.3}),
        (ADAMW, {}, {}),
    ],
)
def test_a_changed_setting_is_taken_as_if_the_run_had_changed_it_in_the_middle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, now: Any, in_groups: dict[str, Any]
) -> None:
    """Bit for bit that of a run that is not interrupted and changes its groups after step 2."""
    whole = trained(tmp_path / "whole", 4, before, ChangesAfterTwo(in_groups))
    trained(tmp_path / "killed", 2, before)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resumed = trained(tmp_path / "killed", 4, before | now)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
    assert "goes on with the checkpoint's" not in caplog.text
    for name in in_groups:
        assert f"optimizer: {name} = " in caplog.text
    again = trained(tmp_path / "killed", 4, before | now)
    assert again.state.step == 4


def test_settings_that_a_callback_has_changed_go_on(tmp_path: Path) -> None:
    """The run file says the same as before, so what is in the checkpoint counts."""
    whole = trained(tmp_path / "whole", 4, ADAMW, AfterStep(1, decay_more))
    trained(tmp_path / "killed", 2, ADAMW, AfterStep(1, decay_more))
    resumed = trained(tmp_path / "killed", 4, ADAMW)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def decay_more(trainer: Trainer) -> None:
    """Change what no schedule changes."""
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.7


def test_a_schedule_of_ones_own_refuses_another_rate(tmp_path: Path) -> None:
    """Nobody else can compute its rates; started afresh, it takes the new one."""
    own: dict[str, Any] = {"kind": "torch.optim.lr_scheduler:StepLR", "settings": {"step_size": 1}}
    Trainer(settings(tmp_path, training={"steps": 2}, schedule=own)).run()
    new = {"optimizer": {"lr": 1e-3}, "schedule": own, "training": {"steps": 3}}
    with pytest.raises(ConfigError, match=r"optimizer.lr is 0.001, and the checkpoint's schedule started from 0.003"):
        Trainer(settings(tmp_path, **new)).run()
    afresh = {"save": {"interval": 2}, "resume": {"exclude": ["lr_scheduler"]}}
    assert Trainer(settings(tmp_path, **new, checkpoint=afresh)).run().step == 3
