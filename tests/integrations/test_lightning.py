"""Lightning's Trainer and Fabric with titan_ckpt: killed and resumed runs equal those that nothing interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback
from lightning_fabric.wrappers import _FabricDataLoader
from torch.utils.data import DataLoader

from tests.integrations.playing import Run, assert_same_run, both_results, play_all
from titan_ckpt import CheckpointConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.lightning import attach, fabric_manager
from titan_ckpt.integrations.lightning.progress import Progress
from titan_ckpt.integrations.lightning.trainer import TitanCheckpoint

RUNS = {
    "fabric within an epoch": Run("run_fabric", 1, 3, 17),
    "fabric after an epoch, 2 ranks": Run("run_fabric", 2, 7, 9),
    "trainer within an epoch": Run("run_trainer", 1, 3, 11),
    "trainer after an epoch, 2 ranks": Run("run_trainer", 2, 4, 6),
    "trainer by steps, within an epoch": Run("run_trainer_by_steps", 1, 3, 11),
    "trainer by steps, after an epoch": Run("run_trainer_by_steps", 1, 7, 9),
    "two optimizers": Run("run_two_optimizers", 1, 5, 11),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lightning")
    play_all("tests.integrations.lightning_runs", RUNS, root)
    return root


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_bit_for_bit_and_reads_nothing_twice(played: Path, name: str) -> None:
    """SIGKILL, and a new process: weights, schedule and validation are those of the whole run."""
    for found, expected in both_results(played, name, RUNS[name]):
        assert_same_run(found, expected)


def strategy(name: str, base: type = object) -> Any:
    return type(name, (base,), {})()


@pytest.mark.parametrize(
    ("name", "instead"),
    [("FSDPStrategy", "ModelParallelStrategy"), ("DeepSpeedStrategy", "DeepSpeed's own"), ("XLAStrategy", "CUDA")],
)
def test_a_strategy_without_named_shards_is_refused_by_name(name: str, instead: str) -> None:
    """FSDP1, DeepSpeed and XLA are refused before anything runs, with what to use instead."""
    with pytest.raises(ConfigError, match=f"(?s){name}: .*{instead}"):
        fabric_manager(SimpleNamespace(strategy=strategy(name)), CheckpointConfig(), model=None)


def test_a_trainer_is_told_all_that_does_not_fit_at_once() -> None:
    """A callback that changes Lightning's own checkpoints, those, and reloaded dataloaders are refused together."""
    trainer = SimpleNamespace(
        strategy=strategy("DDPStrategy"),
        callbacks=[
            EMAWeightAveraging(),
            LambdaCallback(on_save_checkpoint=lambda *_: None),
            LambdaCallback(on_train_start=lambda *_: None),
            EarlyStopping("val_loss"),
        ],
        checkpoint_callbacks=[1],
        reload_dataloaders_every_n_epochs=1,
    )
    names = r"(?s)EMAWeightAveraging: .*LambdaCallback: .*enable_checkpointing.*reload_dataloaders_every_n_epochs"
    with pytest.raises(ConfigError, match=names) as refused:
        attach(trainer, CheckpointConfig())
    assert "EarlyStopping" not in str(refused.value) and str(refused.value).count("LambdaCallback") == 1


def test_a_callback_that_the_module_brings_is_looked_at_when_the_training_begins() -> None:
    """`configure_callbacks()` is called after `attach`."""
    trainer = SimpleNamespace(callbacks=[EMAWeightAveraging()], fit_loop=None)
    with pytest.raises(ConfigError, match="EMAWeightAveraging: it changes Lightning's own checkpoint"):
        TitanCheckpoint(CheckpointConfig()).on_fit_start(trainer, None)


class Resetting(LightningModule):
    """A module that gives a loaded checkpoint a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)
        self.register_buffer("lowest", torch.tensor(float("nan")))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["own"] == 1
        checkpoint["state_dict"]["head.bias"] = torch.ones(1) + self.head.bias


def test_weights_that_a_hook_changes_after_the_load_are_an_error() -> None:
    """The weights of a step are loaded before the module sees them, so a change of the dict would be lost."""
    module = Resetting()
    loops = SimpleNamespace(load_state_dict=lambda _: None, epoch_progress=SimpleNamespace(total=Numbers(1, 2)))
    trainer = SimpleNamespace(
        fit_loop=loops, lightning_module=module, callbacks=[], datamodule=None, callback_metrics={}, current_epoch=0,
        global_step=1, optimizers=[], lr_scheduler_configs=[],
    )  # fmt: skip
    stored = {"loops": {}, "callbacks": {}, "module": {"own": 1}, "data": {}, "metrics": {}}
    with pytest.raises(ConfigError, match=r'changes checkpoint\["state_dict"\] \(head\.bias\)'):
        Progress(trainer).load_state_dict(stored)


class Numbers(NamedTuple):
    """Epochs of Lightning's loop."""

    completed: int
    ready: int


def test_batches_of_any_nesting_go_to_the_device_of_fabric(tmp_path: Path) -> None:
    """Every tensor within dicts and tuples is moved, as Fabric does; a second manager may take the same loader."""
    samples: Any = [{"x": torch.ones(2), "y": (torch.zeros(1), "name")}] * 4
    loader: Any = _FabricDataLoader(DataLoader(samples, 2), torch.device("meta"))
    fabric = SimpleNamespace(strategy=SimpleNamespace(precision=None))
    for _ in range(2):
        model = SimpleNamespace(module=torch.nn.Linear(1, 1))
        fabric_manager(fabric, CheckpointConfig(), model=model, dataloader=loader, base_folder=tmp_path).close()
        (first, *_) = loader
        assert (first["x"].device.type, first["y"][0].device.type) == ("meta", "meta")
        assert first["y"][1] == ("name", "name")
        assert loader.titan_ckpt.num_batches == 0, "the epoch has ended"
