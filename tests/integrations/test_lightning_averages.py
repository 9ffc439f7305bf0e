"""Weights that Lightning's callbacks average: what a step and the exports of the last one hold of them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.utils.data import DataLoader

from tests.integrations.lightning_runs import Samples, attached, model
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, InitialLoadConfig, SaveConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # a Trainer in this process warns of its loaders and of torch


class Trained(L.LightningModule):
    """A network that validates; `fails_at`: the validation batch that raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.network, self.fails_at = model(), fails_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if self.trainer.fit_loop.total_batch_idx == self.fails_at:
            raise RuntimeError("the validation fails")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Normalized(Trained):
    """A network for which StochasticWeightAveraging adds an epoch, if the epochs are limited."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(fails_at)
        self.network = torch.nn.Sequential(self.network, torch.nn.BatchNorm1d(1))


class ByEpochs(WeightAveraging):
    """Averages after every step and once more when an epoch has ended."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return True


def fit(
    folder: Path,
    config: CheckpointConfig | int,
    callback: Any = WeightAveraging,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Train in a folder, six steps an epoch, and return the weights of the module when fit() has ended."""
    L.seed_everything(seed, verbose=False)
    module = settings.pop("module", Trained)(settings.pop("fails_at", None))
    trainer = attached(str(folder), config, callbacks=[callback()], num_sanity_val_steps=0, **settings)
    validated = DataLoader(Samples(2), batch_size=2)
    trainer.fit(module, DataLoader(Samples(12), batch_size=2, shuffle=True), validated)
    return {name: value.clone() for name, value in module.state_dict().items()}


def loaded(folder: Path) -> dict[str, Any]:
    """Return the weights of a step or an export."""
    module = Trained()
    config = CheckpointConfig(folder="none", initial_load=(InitialLoadConfig(str(folder)),))
    with CheckpointManager(config, model_parts=[module], base_folder=folder) as manager:
        manager.load()
    return module.state_dict()


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


EXPORTED = CheckpointConfig(save=SaveConfig(interval=100), export=(ExportConfig("dcp"),))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (ByEpochs, {"max_steps": 10}),
        (ByEpochs, {"max_epochs": 2}),
        (partial(StochasticWeightAveraging, 1e-3, 1), {"max_epochs": 2}),
    ],
)
def test_the_last_export_is_what_the_module_holds_when_fit_has_ended(
    tmp_path: Path, kind: Any, limit: dict[str, Any]
) -> None:
    """The average, also when a run that is done is started again; its last step goes on with the trained weights."""
    ended = fit(tmp_path, EXPORTED, kind, **limit)
    (export,) = (tmp_path / "exports").iterdir()
    assert is_same(loaded(export), ended)
    (step,) = (tmp_path / "checkpoints").glob("step-*")
    assert not is_same(loaded(step), ended)
    shutil.rmtree(export)
    assert is_same(fit(tmp_path, EXPORTED, kind, seed=1, **limit), ended)
    assert is_same(loaded(export), ended)
    longer: dict[str, Any] = {name: 2 * value for name, value in limit.items()}
    assert is_same(fit(tmp_path, EXPORTED, kind, **longer), fit(tmp_path / "whole", EXPORTED, kind, **longer))


def test_a_done_run_of_a_normalized_network_ends_with_the_average_again(tmp_path: Path) -> None:
    """A limit of steps leaves the epoch out in which the average would be trained on."""
    runs = [
        fit(tmp_path, 100, partial(StochasticWeightAveraging, 1e-3, 1), module=Normalized, max_steps=10) for _ in "12"
    ]
    assert is_same(*runs)


def test_a_last_step_of_weights_alone_is_the_average(tmp_path: Path) -> None:
    """Nobody could compute it from such a step."""
    ended = fit(tmp_path, CheckpointConfig(save=SaveConfig(interval=100, model_only_last=True)), max_steps=4)
    assert is_same(loaded(tmp_path / "checkpoints" / "step-4"), ended)


def test_a_run_that_fails_in_a_validation_is_saved_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    """The module has those of the average at that time."""
    accumulated: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 2}
    with pytest.raises(RuntimeError, match="the validation fails"):
        fit(tmp_path, 100, fails_at=8, **accumulated)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-4"]
    assert is_same(fit(tmp_path, 100, **accumulated), fit(tmp_path / "whole", 100, **accumulated))


class Later(WeightAveraging):
    """Has no average of its own yet."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return False


def test_an_average_begins_with_the_weights_that_were_loaded(tmp_path: Path) -> None:
    """It copies the module before the load, and would end with values that no run has trained."""
    fit(tmp_path / "first", EXPORTED, max_steps=4)
    (export,) = (tmp_path / "first" / "exports").iterdir()
    started = CheckpointConfig(save=SaveConfig(interval=100), initial_load=(InitialLoadConfig(str(export)),))
    assert is_same(fit(tmp_path / "second", started, Later, seed=1, max_steps=4), loaded(export))
