"""Which classes of Lightning, and which of the user's own, may take part in a run that is to be resumed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.integrations.lightning_runs import Samples, model
from tests.integrations.phases import Phase, play
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.components.classes import class_name
from titan_ckpt.components.items.exchange_order import exchange_faults
from titan_ckpt.errors import ConfigError, SaveError, StateEncodingError
from titan_ckpt.integrations.lightning import attach, fabric_manager
from titan_ckpt.integrations.lightning.known import KNOWN, callback_faults, frozen_faults, plugin_faults

pytestmark = pytest.mark.filterwarnings("ignore")  # a Trainer in this process warns of its loaders and of torch


@pytest.mark.parametrize("name", [n for n, why in KNOWN.items() if n.startswith("lightning.pytorch.c") and why])
def test_a_callback_that_is_not_exact_is_refused_with_what_to_do(name: str) -> None:
    home, _, kind = name.rpartition(".")
    callback = object.__new__(getattr(importlib.import_module(home), kind))
    (line,) = callback_faults([callback], ())
    assert line.startswith(f"callback {name}: ") and ": " in line.removeprefix(f"callback {name}: ")
    assert line.endswith(f'checkpoint.allow = ["{name}"]')
    assert [*callback_faults([callback], (name,))] == []


TRAINED: Counter[str] = Counter()


def count_step() -> None:
    """Note a step where the watch of the module's own globals does not look."""
    TRAINED["steps"] += 1


"""Steps of this process."""


class Body:
    """Counts steps; needs the LightningModule of a package."""

    def __init__(self, callbacks: Callable[[], list[Any]] = list, metric: Any = None, trains_on: bool = False) -> None:
        super().__init__()
        self.network: Any
        self.network, self.bring, self.metric = model(), callbacks, metric
        self.trains_on = trains_on

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        count_step()
        loss: torch.Tensor = (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()
        self.log("loss", loss, on_epoch=True)  # type: ignore[attr-defined]  # of the package's LightningModule
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        if self.trains_on:
            self.trainer.should_stop = False  # type: ignore[attr-defined]  # as below

    def configure_callbacks(self) -> Any:
        return self.bring()


class Simple(Body, L.LightningModule):
    pass


def fit(
    folder: Path,
    *callbacks: Any,
    epochs: int = 1,
    allow: tuple[str, ...] = (),
    ckpt_path: Path | None = None,
    kind: type[Simple] = Simple,
    data: Any = None,
    **module: Any,
) -> int:
    """Train in a folder, two steps an epoch, and return the number of steps that this start has trained."""
    made, before = kind(**module), TRAINED["steps"]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[*callbacks], default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=1), allow=allow))
        trainer.fit(made, data or DataLoader(Samples(4), batch_size=2), ckpt_path=ckpt_path)
    except ConfigError:
        assert TRAINED["steps"] == before, "a run is refused before its first step"
        raise
    return TRAINED["steps"] - before


class Counting(L.Callback):
    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


class Giving(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Early(Giving):
    def on_fit_start(self, *_: Any) -> None:
        assert self.seen == 0


class Patient(of_lightning.EarlyStopping):
    """Gives the state of its base alone."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = 1


class Holding(L.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.network.titan = None

    def __init__(self, module: Any = None) -> None:
        self.module = module


def numbering() -> Any:
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1

    return count


NAME = f"{__name__}.Counting"


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (Counting(), r"Counting: its code sets self\.seen"),
        (Early(), "Early: its on_fit_start is called before its state is loaded"),
        (Patient("loss"), r"Patient: its code sets self\.seen"),
        (Holding(torch.nn.Linear(1, 1)), r"Holding: self\.module is a Linear"),
        (of_lightning.LambdaCallback(on_train_batch_end=numbering()), r"count: its code sets seen, which is outside"),
        (of_lightning.WeightAveraging(avg_fn=numbering()), r"WeightAveraging .*count: its code sets seen"),
    ],
)
def test_a_callback_of_the_users_own_whose_state_would_be_lost_is_refused(
    tmp_path: Path, callback: Any, reason: str
) -> None:
    """Before the first step, and with the way to allow it."""
    with pytest.raises(ConfigError, match=f"{reason}(?s:.*)checkpoint.allow"):
        fit(tmp_path, callback)


def test_a_callback_of_fabric_whose_state_would_be_lost_is_refused(tmp_path: Path) -> None:
    """One that is among the states runs."""
    counting, giving = Counting(), Giving()
    fabric = L.Fabric(accelerator="cpu", devices=1, callbacks=[counting, giving])
    network = fabric.setup_module(model())
    with pytest.raises(ConfigError, match=r"Counting: its code sets self\.seen") as error:
        fabric_manager(fabric, CheckpointConfig(), model=network, states={"seen": giving}, base_folder=tmp_path)
    assert "Giving" not in str(error.value)


def test_a_callback_that_is_allowed_runs_and_every_step_says_so(tmp_path: Path) -> None:
    assert fit(tmp_path, Counting(), Holding(), allow=(NAME,)) == 2
    manifest = json.loads((tmp_path / "checkpoints" / "step-2" / "MANIFEST.json").read_text())
    assert manifest["allowed"] == [NAME]


def test_state_that_no_callback_takes_is_an_error_and_other_callbacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step holds the states of callbacks: a run without one of them names it, and can allow that it is dropped."""
    fit(tmp_path, first := Giving(), Holding())
    assert first.seen == 2
    with pytest.raises(ConfigError, match=r"callback Giving: the step holds its state(?s:.*)allow = \[\"Giving\"\]"):
        fit(tmp_path, epochs=2)
    assert fit(tmp_path, second := Giving(), epochs=2) == 2
    assert second.seen == 4
    assert "added [], removed ['Holding']" in caplog.text
    assert fit(tmp_path, epochs=3, allow=("Giving",)) == 2


class OwnFinder(of_lightning.LearningRateFinder):
    """Finds a rate again and again."""


@pytest.mark.parametrize("kind", [of_lightning.LearningRateFinder, OwnFinder])
def test_a_callback_that_the_module_brings_is_looked_at_before_it_trains(tmp_path: Path, kind: type) -> None:
    """`configure_callbacks()` is called after `attach`."""
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: it tries .*before attach"):
        fit(tmp_path, callbacks=lambda: [kind()])


def test_a_checkpoint_of_lightnings_is_not_loaded_over_a_step(tmp_path: Path) -> None:
    """fit(ckpt_path=...) would give the loops and optimizers of one, and the weights of the other."""
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path)
    trainer.fit(Simple(), DataLoader(Samples(4), batch_size=2))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ConfigError, match=r"ckpt_path: Lightning would put the state of .*own\.ckpt over"):
        fit(tmp_path, ckpt_path=tmp_path / "own.ckpt")


def test_an_unknown_strategy_is_refused_and_can_be_allowed() -> None:
    kind: Any = type("Fast", (Strategy,), {"__module__": "own"})
    kind.__abstractmethods__ = frozenset()
    strategy = object.__new__(kind)
    (line,) = plugin_faults(strategy, None, ())
    assert line.startswith("Fast: it was not proved") and line.endswith('checkpoint.allow = ["own.Fast"]')
    assert [*plugin_faults(strategy, None, ("own.Fast",))] == []


class Helped(torchmetrics.MeanMetric):
    """Keeps an object that no step can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = object()

    def reset(self) -> None:
        super().reset()
        self.helper = object()


def test_a_metric_that_sets_what_no_step_can_hold_is_refused(tmp_path: Path) -> None:
    """Numbers, lists and tensors that its code sets beside the states of add_state are saved."""
    with pytest.raises(StateEncodingError, match=r"metrics\.held\.metric\.beside\.helper: (?s:.*)object"):
        fit(tmp_path, metric=Helped())
    assert not [*tmp_path.glob("checkpoints/step-*")]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_ddp_does_not_average_is_not_unfrozen(is_frozen: bool) -> None:
    """DDP has registered the gradients of other parameters alone, so ranks would train different backbones."""
    module = torch.nn.Linear(1, 1).requires_grad_(not is_frozen)
    trainer = SimpleNamespace(model=wrapped(2), callbacks=[of_lightning.BackboneFinetuning(), Holding()])
    faults = [*frozen_faults(trainer, module)]
    assert ["BackboneFinetuning: DDP averages no gradients" in fault for fault in faults] == [True] * is_frozen


def wrapped(ranks: int, *hooks: Any) -> Any:
    """Return a wrapper of DDP over so many ranks, with nothing in it."""
    made: Any = object.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(made)
    made._comm_hooks, made.static_graph, made.find_unused_parameters = [*hooks], False, False
    made.process_group = SimpleNamespace(size=lambda: ranks)
    return made


@pytest.mark.parametrize(
    ("hook", "state", "is_refused"),
    [
        (default_hooks.bf16_compress_hook, None, False),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, False),
        (default_hooks.allreduce_hook, numbering(), True),
        (powerSGD_hook.powerSGD_hook, None, True),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), None, True),
        (numbering(), None, True),
    ],
)
def test_a_hook_of_ddp_that_may_keep_more_than_gradients_is_refused(hook: Any, state: Any, is_refused: bool) -> None:
    """PowerSGD's errors and the step counts of others are in no step."""
    ddp = wrapped(2, (hook, state))
    lines = [*exchange_faults([ddp], ())]
    assert ["DDP's communication hook" in line for line in lines] == [True] * is_refused
    assert [*exchange_faults([ddp], (class_name(hook),))] == []


def test_a_part_that_is_called_sparse_has_no_sparse_gradients() -> None:
    """DDP asks tables of embeddings alone, so other modules may call anything so."""
    ddp = wrapped(3)
    ddp.module = torch.nn.ModuleDict({"part": torch.nn.Linear(1, 1)})
    ddp.module["part"].sparse = torch.nn.Linear(1, 1)
    assert [*exchange_faults([ddp], ())] == []
    ddp.module["table"] = torch.nn.Embedding(2, 2, sparse=True)
    (line,) = exchange_faults([ddp], ())
    assert line.startswith("sparse gradients of module.table")


def test_lightning_and_fabric_look_at_the_hooks_of_ddp(tmp_path: Path) -> None:
    assert play("tests.integrations.lightning_runs", [Phase("run_compressed", str(tmp_path), 1)]) == [[0]]


@pytest.mark.parametrize("kind", ["BackboneFinetuning", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_callback_that_copies_or_freezes_weights_is_refused_beside_shards(tmp_path: Path, kind: str) -> None:
    """Lightning ends with an error from deep inside, or averages nothing."""
    settings = (1e-3,) if kind.startswith("Stochastic") else ()
    trainer = L.Trainer(
        accelerator="cpu", strategy=ModelParallelStrategy(1, 1), callbacks=[getattr(of_lightning, kind)(*settings)],
        default_root_dir=tmp_path, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"{kind}: ModelParallelStrategy replaces the parameters"):
        attach(trainer, CheckpointConfig())


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_resume_the_sums_of_an_epoch_and_know_their_callbacks(tmp_path: Path, package: str) -> None:
    """One table has the names of both, and a metric that was logged is made again by the package's own class."""
    of_package = importlib.import_module(package)
    means = []
    for folder, steps in (("whole", 4), ("resumed", 3), ("resumed", 4)):
        L.seed_everything(0, verbose=False)
        trainer = of_package.Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[of_package.callbacks.EarlyStopping("loss")], logger=False,
            default_root_dir=tmp_path / folder, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=1)))
        trainer.fit(type("Own", (Body, of_package.LightningModule), {})(), DataLoader(Samples(10), batch_size=2))
        means.append(float(trainer.callback_metrics["loss"]))
    assert means[0] == means[2] != means[1]


class Seeing(Simple):
    """Holds data that is set once, notes the time of a start, and keeps the losses of a batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.weights, self.losses = torch.ones(3), [1.0]

    def setup(self, stage: str) -> None:
        self.prepared = torch.ones(2)

    def on_train_start(self) -> None:
        self.start = time.time()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.losses.append(loss.item() * float(self.weights[0]))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.pop()


class Summing(Seeing):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Numbering(Simple):
    number = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.number += 1


class GivingIt(Numbering, Summing):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = [self.number, self.losses]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.number, self.losses = checkpoint["own"]


class NumberingData(L.LightningDataModule):
    read = 0

    def setup(self, stage: str) -> None:
        self.samples = Samples(4)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=2)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.read += 1
        return batch


@pytest.mark.parametrize(
    ("module", "data", "fault", "message"),
    [
        (Seeing, None, None, ""),
        (GivingIt, None, None, ""),
        (Numbering, None, ConfigError, r"module .*Numbering: its code sets self\.number(?s:.*)checkpoint\.allow"),
        (Summing, None, SaveError, r"step 1 is not saved: module .*Summing: self\.losses changed since"),
        (Simple, NumberingData, ConfigError, r"data module .*NumberingData: its code sets self\.read"),
    ],
)
def test_a_module_whose_attributes_change_gives_them_or_is_refused(
    module: type[Simple], data: Any, fault: Any, message: str, tmp_path: Path
) -> None:
    """One rule for callbacks, modules and data modules: by what their code sets, or at the save that sees a change."""
    settings = {"kind": module, "data": data and data()}
    if fault is None:
        assert [fit(tmp_path, epochs=epochs, **settings) for epochs in (1, 2)] == [2, 2]
        return
    with pytest.raises(fault, match=message) as refused:
        fit(tmp_path, **settings)
    assert not [*tmp_path.glob("checkpoints/step-*")]
    name = str(refused.value).rpartition('["')[2].partition('"]')[0]
    settings["data"] = data and data()
    assert fit(tmp_path, allow=(name,), **settings) == 2


def test_a_run_that_has_stopped_early_stays_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Started again, it trains no step, and says how to train on."""
    stops = [of_lightning.EarlyStopping("loss", stopping_threshold=1e9) for _ in range(3)]
    assert [fit(tmp_path, stop, epochs=9) for stop in stops[:2]] == [2, 0]
    assert "self.trainer.should_stop = False in on_fit_start" in caplog.text
    assert fit(tmp_path, stops[2], epochs=9, trains_on=True) == 2


def test_a_run_that_a_signal_has_stopped_goes_on(tmp_path: Path) -> None:
    """A stop by RunGuard is no decision of the training."""

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert fit(tmp_path, of_lightning.LambdaCallback(on_train_batch_end=stop), epochs=2) == 1
    assert fit(tmp_path, of_lightning.LambdaCallback(), epochs=2) == 3


def test_a_timer_counts_the_time_of_all_starts(tmp_path: Path) -> None:
    """A start whose time is over trains no step."""

    def wait(*_: Any) -> None:
        time.sleep(0.3)

    timers = [of_lightning.Timer({"seconds": 1}) for _ in range(2)]
    slow = of_lightning.LambdaCallback(on_train_batch_end=wait)
    assert 0 < fit(tmp_path, timers[0], slow, epochs=9) < 9
    assert fit(tmp_path, timers[1], slow, epochs=9) == 0
    assert timers[1].time_elapsed() > 1
