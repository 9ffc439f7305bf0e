"""Lightning's Trainer and Fabric with titan_ckpt: killed and resumed runs equal those that nothing interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.xla import XLAStrategy
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, Callback, EarlyStopping, LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning_fabric.wrappers import _FabricDataLoader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.integrations.lightning_runs import Regression, Samples, attached
from tests.integrations.playing import Run, assert_same_run, played
from titan_ckpt import CheckpointConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.lightning import attach, fabric_manager

RUNS = {
    "fabric within an epoch": Run("run_fabric", 1, 3, 17),
    "fabric after an epoch, 2 ranks": Run("run_fabric", 2, 7, 9),
    "fabric, a stream within an epoch, 2 ranks": Run("run_fabric_stream", 2, 3, 9),
    "fabric, mixed precision": Run("run_fabric_mixed", 1, 3, 17),
    "fabric, half precision": Run("run_fabric_half", 1, 3, 17),
    "fabric, double precision": Run("run_fabric_double", 1, 3, 17),
    "fabric, sharded, 2 ranks": Run("run_fabric_sharded", 2, 3, 9),
    "trainer": Run("run_trainer", 1, 3, 11),
    "two optimizers": Run("run_two_optimizers", 1, 5, 11),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_bit_for_bit_and_reads_nothing_twice(name: str, tmp_path: Path) -> None:
    """SIGKILL, and a new process: weights, schedule and validation are those of the whole run."""
    for found, expected in played("tests.integrations.lightning_runs", RUNS[name], tmp_path):
        assert_same_run(found, expected)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [(FSDPStrategy, "ModelParallelStrategy"), (DeepSpeedStrategy, "DeepSpeed's own"), (XLAStrategy, "CUDA")],
)
def test_a_strategy_without_named_shards_is_refused_by_name(kind: type, instead: str) -> None:
    """FSDP1, DeepSpeed and XLA are refused before anything runs, with what to use instead."""
    strategy: Any = type(kind.__name__, (kind,), {"precision": None})  # a subclass is refused like its base
    with pytest.raises(ConfigError, match=f"(?s){kind.__name__}: .*{instead}"):
        fabric_manager(
            SimpleNamespace(strategy=object.__new__(strategy), _callbacks=[]),
            CheckpointConfig(),
            model=torch.nn.Module(),
        )


def test_fabrics_manager_is_told_what_is_not_set_up(tmp_path: Path) -> None:
    """All at once, with the call that is missing."""
    model = torch.nn.Linear(1, 1)
    optimizer, fabric = torch.optim.AdamW(model.parameters()), SimpleNamespace(strategy=SingleDeviceStrategy())
    fabric._callbacks = []
    with pytest.raises(ConfigError, match=r"call model, optimizer = fabric\.setup\(model, optimizer\) first") as error:
        fabric_manager(fabric, CheckpointConfig(), model=model, optimizers=[optimizer], base_folder=tmp_path)
    assert [p.partition(" is not")[0] for p in error.value.problems] == ["model: Linear", "optimizers: AdamW"]


def test_a_trainer_is_told_all_that_does_not_fit_at_once() -> None:
    """Callbacks, Lightning's own checkpoints, and reloaded dataloaders are refused together."""
    trainer = SimpleNamespace(
        strategy=DDPStrategy(),
        precision_plugin=Precision(),
        callbacks=[
            BatchSizeFinder(),
            LambdaCallback(on_save_checkpoint=lambda *_: None),
            LambdaCallback(on_train_start=lambda *_: None),
            EarlyStopping("val_loss"),
        ],
        checkpoint_callbacks=[1],
        reload_dataloaders_every_n_epochs=1,
    )
    names = r"(?s)BatchSizeFinder: .*LambdaCallback: .*enable_checkpointing.*reload_dataloaders_every_n_epochs"
    with pytest.raises(ConfigError, match=names) as refused:
        attach(trainer, CheckpointConfig())
    assert "EarlyStopping" not in str(refused.value) and str(refused.value).count("callback ") == 2


class Resetting(Regression):
    """A module that gives a loaded checkpoint a new head."""

    def __init__(self) -> None:
        super().__init__(None, 1, Path())
        self.register_buffer("lowest", torch.tensor(float("nan")))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["seen"] == self.seen
        checkpoint["state_dict"]["network.2.bias"] = torch.ones(1)


@pytest.mark.filterwarnings("ignore")  # a Trainer in this process warns of its loaders and of torch
def test_weights_that_a_hook_changes_after_the_load_are_an_error(tmp_path: Path) -> None:
    """The weights of a step are loaded before the module sees them, so a change of the dict would be lost."""
    data, module = DataLoader(Samples(4), batch_size=2), Resetting()
    attached(str(tmp_path), 1, max_steps=1, limit_val_batches=0).fit(module, data)
    with pytest.raises(ConfigError, match=r'changes checkpoint\["state_dict"\] \(network\.2\.bias\)'):
        attached(str(tmp_path), 1, max_steps=2, limit_val_batches=0).fit(module, data)


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_trial_run_loads_and_saves_nothing(tmp_path: Path) -> None:
    """fast_dev_run, as Lightning itself leaves its callbacks of checkpoints out then."""
    data = DataLoader(Samples(4), batch_size=2)
    module = Regression(None, 1, Path())
    attached(str(tmp_path), 1, fast_dev_run=True).fit(module, data, data)
    assert module.trainer.global_step == 1
    assert [*tmp_path.iterdir()] == []


class Optimized(Regression):
    """Steps a number of optimizers by hand, each over a part of the network."""

    def __init__(self, number: int) -> None:
        super().__init__(None, 1, Path())
        self.number, self.automatic_optimization = number, False

    def training_step(self, batch: torch.Tensor, index: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        self.manual_backward(self.network(batch[:, :4]).sum())
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.network.get_submodule(name).parameters()) for name in "20"[: self.number]]


class Frozen(BaseFinetuning):
    """Unfreezes nothing, and notes the groups of every optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_run_that_stops_in_the_middle_of_an_accumulation_saves_its_last_step(tmp_path: Path) -> None:
    """Nothing uses the gradients of the batches that a callback has stopped it after."""

    class Stopping(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 2

    class Plain(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    trainer = attached(str(tmp_path), 3, accumulate_grad_batches=2, max_epochs=1, min_epochs=0, callbacks=[Stopping()])
    trainer.fit(Plain(None, 3, tmp_path), DataLoader(Samples(26), batch_size=2))
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-1"]


@pytest.mark.filterwarnings("ignore")  # as above
def test_an_epoch_that_is_limited_is_refused_if_no_step_says_where_the_next_one_begins(tmp_path: Path) -> None:
    """Torchdata's sampler begins it at its start, and with a state of the middle of this one it does not."""

    class Plain(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    data = Samples(26)
    loader = DataLoader(data, batch_size=2, sampler=StatefulDistributedSampler(data, 1, 0))
    with pytest.raises(ConfigError, match="StatefulDistributedSampler does not say where an epoch begins"):
        attached(str(tmp_path), 1, max_epochs=2, limit_train_batches=2).fit(Plain(None, 1, tmp_path), loader)


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_step_of_more_optimizers_than_the_run_has_is_refused(tmp_path: Path) -> None:
    """The groups that BaseFinetuning has noted are given to the optimizers that are there; the load names the rest."""
    data = DataLoader(Samples(4), batch_size=2)
    settings: dict[str, Any] = {"limit_val_batches": 0}
    attached(str(tmp_path), 1, max_steps=2, callbacks=[Frozen()], **settings).fit(Optimized(2), data)
    with pytest.raises(LoadMismatchError, match=r"2 trained there and not here: network\.0\.bias"):
        attached(str(tmp_path), 1, max_steps=4, callbacks=[Frozen()], **settings).fit(Optimized(1), data)


def test_batches_of_any_nesting_go_to_the_device_of_fabric(tmp_path: Path) -> None:
    """Every tensor within dicts and tuples is moved, as Fabric does; a second manager may take the same loader."""
    samples: Any = [{"x": torch.ones(2), "y": (torch.zeros(1), "name")}] * 4
    loader: Any = _FabricDataLoader(DataLoader(samples, 2), torch.device("meta"))
    fabric = SimpleNamespace(strategy=SingleDeviceStrategy(), _callbacks=[])
    for _ in range(2):
        model = torch.nn.ModuleDict(dict.fromkeys(("module", "_forward_module"), torch.nn.Linear(1, 1)))
        fabric_manager(fabric, CheckpointConfig(), model=model, dataloader=loader, base_folder=tmp_path).close()
        (first, *_) = loader
        assert (first["x"].device.type, first["y"][0].device.type) == ("meta", "meta")
        assert first["y"][1] == ("name", "name")
        assert loader.titan_ckpt.num_batches == 0, "the epoch has ended"
        assert len([loader.next_epoch() for _ in loader]) == 1, "the rest of the epoch is left out"
