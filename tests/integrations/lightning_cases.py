"""Cases of Lightning's Trainer for the tests: each says its limits, callbacks and module, and where it is cut.

A run writes what happens in it to `events-RANK.txt`: the training's hooks with their counters, and the samples read.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.integrations.lightning_runs import attached, model, write
from tests.integrations.phases import leave_behind

EVENTS: list[list[Any]] = []


def note(event: list[Any]) -> None:
    """Write down what happened; a global of a callback's own methods would be state that no step holds."""
    EVENTS.append(event)


def leave_at(step: int, killed_at: int | None, interval: int, folder: Path) -> None:
    """Leave behind what a kill would leave, when every step up to this one is committed."""
    if step == killed_at:
        saved = folder / "checkpoints" / f"step-{step // interval * interval}"
        while not saved.is_dir():
            time.sleep(0.01)
        leave_behind(folder)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Vectors whose reading is an event."""

    def __init__(self, number: int, name: str) -> None:
        self.values = torch.randn(number, 5, generator=torch.Generator().manual_seed(1))
        self.name = name
        if name == "read":
            self.own = random.Random(1)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        note([self.name, index])
        drawn = self.own.random() if self.name == "read" else 0
        return self.values[index] + 0.1 * torch.rand(5) + 0.1 * drawn


class Jittered:
    """Makes batches with noise of a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) + 0.1 * self.random.random()


class Watch(L.Callback):
    """Notes every hook of the training, with the counters at that time."""

    def note(self, name: str, trainer: L.Trainer) -> None:
        note([name, trainer.current_epoch, trainer.global_step, trainer.fit_loop.total_batch_idx])


def _noting(name: str) -> Callable[..., None]:
    return lambda self, trainer, *_: self.note(name, trainer)


for _hook in (
    "train_epoch_start", "train_batch_start", "train_batch_end", "train_epoch_end", "validation_start",
    "validation_end", "train_end",
):  # fmt: skip
    setattr(Watch, f"on_{_hook}", _noting(_hook))


class Logging(L.LightningModule):
    """Follows the mean of the epoch, logs it in all ways, and holds metrics with sums of their own."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__()
        self.network, self.leaves = model(), leaves
        self.mean = torchmetrics.MeanMetric()
        self.cat = torchmetrics.CatMetric()
        self.both = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "root": torchmetrics.MeanSquaredError(squared=False)}
        )

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        leave_at(self.global_step, *self.leaves)
        predicted = self.network(batch[:, :4])
        loss: torch.Tensor = (predicted - batch[:, 4:]).square().mean()
        for reduced in ("mean", "sum", "max"):
            self.log(f"train_{reduced}", loss, on_epoch=True, on_step=True, reduce_fx=reduced, sync_dist=True)
        if index == 0:
            self.log("first", loss, on_epoch=True, on_step=False)
        self.mean.update(loss.detach())
        self.log("metric", self.mean, on_epoch=True, on_step=False)
        self.cat.update(loss.detach())
        self.both.update(predicted.detach(), batch[:, 4:])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("gathered", self.cat.compute().sum())
        self.log_dict(self.both.compute())
        self.cat.reset()
        self.both.reset()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", (self.network(batch[:, :4]) - batch[:, 4:]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_mean_epoch"}}


class Accumulating(Logging):
    """Two optimizers by hand: the second steps after every third batch, with the gradients of all three."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__(*leaves)
        self.networks, self.automatic_optimization = torch.nn.ModuleList([self.network, model()]), False

    def training_step(self, batch: torch.Tensor, index: int) -> None:  # type: ignore[override]
        leave_at(self.trainer.fit_loop.total_batch_idx, *self.leaves)
        optimizers: Any = self.optimizers()
        for network, optimizer in zip(self.networks, optimizers, strict=True):
            loss = (network(batch[:, :4]) - batch[:, 4:]).square().mean()
            self.log("train_mean", loss, on_epoch=True, on_step=True)
            self.manual_backward(loss)
            if network is self.network or index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        """Nothing is gathered."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(network.parameters(), lr=1e-2) for network in self.networks]


class Sharded(Accumulating):
    """The same, with networks and gradients that FSDP2 shards."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for network in self.networks:
            fully_shard(network, mesh=mesh["data_parallel"])


class Bringing(Logging):
    """Brings a callback of its own, which the Trainer learns of when fit() has begun."""

    def configure_callbacks(self) -> Any:
        return [of_lightning.GradientAccumulationScheduler({0: 1, 1: 2})]


class Switching(Logging):
    """Freezes, draws random numbers, and changes the optimizer and a mode, in the hooks of a begin."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__(*leaves)
        self.network.get_submodule("0").requires_grad_(False)

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1
        torch.rand(1)

    def on_train_epoch_start(self) -> None:
        torch.rand(3)
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] *= 2
        if self.current_epoch == 1:
            self.network.get_submodule("0").requires_grad_(True)
            self.network.get_submodule("1").eval()
        if self.current_epoch == 2:
            dropout: Any = self.network.get_submodule("1").train()
            dropout.p = 0.5


class Restarting(L.Callback):
    """Gives its state, and sets it anew when the training begins."""

    seen = 0

    def on_train_start(self, *_: Any) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen += 1
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * self.seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Scheduled(Logging):
    """Steps one schedule after every second batch and one after every epoch; skips batches and rests of epochs."""

    def on_train_batch_start(self, batch: torch.Tensor, index: int) -> int | None:
        return -1 if index == 4 and self.current_epoch % 2 else None

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if index == 1 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        by_epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return [optimizer], [
            {"scheduler": by_steps, "interval": "step", "frequency": 2},
            {"scheduler": by_epochs, "interval": "epoch"},
            {"scheduler": plateau, "interval": "step", "frequency": 3, "monitor": "train_mean_step"},
        ]


class Normalized(Logging):
    """Has buffers, of which one is not persistent; a step counts the sum of its batch."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__(*leaves)
        self.network = torch.nn.Sequential(self.network, torch.nn.BatchNorm1d(1))
        self.register_buffer("passing", torch.ones(1), persistent=False)


class Metered(Logging):
    """Holds metrics that grow, and metrics that set attributes; a start resets one, as many a template does."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__(*leaves)
        self.best, self.lowest = torchmetrics.MaxMetric(), torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.running = torchmetrics.aggregation.RunningMean(window=4)
        self.tracked = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        self.all = torchmetrics.MetricTracker(self.both.clone(), maximize=[False, False])

    def on_train_start(self) -> None:
        self.best.reset()
        self.tracked.increment()

    def on_train_epoch_start(self) -> None:
        self.tracked.increment()
        self.all.increment()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        for metric in (self.best, self.lowest, self.running, self.tracked):
            metric.update(loss.detach())
        self.all.update(self.network(batch[:, :4]).detach(), batch[:, 4:])
        self.log("running", self.running.compute())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        of_all: Any = self.all.best_metric()
        self.log_dict({**self.lowest.compute(), **of_all, "best": self.best.compute(), "steps": self.all.n_steps})
        for number, value in enumerate(self.tracked.compute_all()[1:]):
            self.log(f"tracked_{number}", value)
        self.lowest.reset()


class Annealed(Normalized):
    """Has the schedule that StochasticWeightAveraging would make."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.swa_utils.SWALR(optimizer, 1e-3, anneal_epochs=2)]


class Constant(Logging):
    """Has no schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Averaging(of_lightning.WeightAveraging):
    """Averages after every second step and every epoch, from the third step on."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None or (step_idx is not None and step_idx > 1 and step_idx % 2 == 1)


class Unfreezing(Logging):
    """Has a backbone, which is frozen at first, and maybe a schedule of each group."""

    def __init__(self, *leaves: Any) -> None:
        super().__init__(*leaves)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        self.network = torch.nn.Sequential(self.backbone, self.network)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Stepwise(of_lightning.BaseFinetuning):
    """Unfreezes one layer after another, with the statistics that it has frozen."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch < 3:
            self.unfreeze_and_add_param_group(pl_module.backbone[2 - epoch], optimizer, lr=1e-3 * (epoch + 1))


@dataclass
class Case:
    """A run of the Trainer, which is resumed from what a kill after `killed_at` steps leaves."""

    killed_at: int
    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    module: type[Logging] = Logging
    interval: int = 1
    ranks: int = 1
    batches: int = 6
    """In an epoch of each rank."""
    logs: bool = False
    keeps_workers: bool = False
    """Whether workers that are kept read the data."""
    draws_validation: bool = False
    """Whether validations read data in an order, and with noise, of generators of its own."""


class Parser:
    """Stands for LightningCLI's parser, which writes its configuration."""

    def save(self, config: Any, path: str, **_: Any) -> None:
        Path(path).write_text("{}")


class Writer(of_lightning.BasePredictionWriter):
    """Writes predictions, of which a training has none."""


def _backbone() -> Any:
    return of_lightning.BackboneFinetuning(2, lambda epoch: 1.5)


CALLBACKS: dict[str, Callable[[], Any]] = {
    "DeviceStatsMonitor": of_lightning.DeviceStatsMonitor,
    "EarlyStopping": lambda: of_lightning.EarlyStopping("train_mean_epoch", patience=1, min_delta=0.05),
    "GradientAccumulationScheduler": lambda: of_lightning.GradientAccumulationScheduler({0: 2, 1: 3, 2: 1}),
    "LambdaCallback": lambda: of_lightning.LambdaCallback(on_train_batch_end=lambda *_: None),
    "LearningRateMonitor": lambda: of_lightning.LearningRateMonitor("step"),
    "ModelSummary": of_lightning.ModelSummary,
    "BasePredictionWriter": Writer,
    "ProgressBar": of_lightning.ProgressBar,
    "RichProgressBar": of_lightning.RichProgressBar,
    "TQDMProgressBar": of_lightning.TQDMProgressBar,
    "RichModelSummary": of_lightning.RichModelSummary,
    "ThroughputMonitor": lambda: of_lightning.ThroughputMonitor(batch_size_fn=len, window_size=5),
    "Timer": lambda: of_lightning.Timer(duration=timedelta(hours=1)),
    "BackboneFinetuning": _backbone,
    "BaseFinetuning": Stepwise,
    "StochasticWeightAveraging": lambda: of_lightning.StochasticWeightAveraging(1e-3, 2, 3),
    "WeightAveraging": of_lightning.WeightAveraging,
    "EMAWeightAveraging": lambda: of_lightning.EMAWeightAveraging(decay=0.5, update_starting_at_epoch=1),
    "SaveConfigCallback": lambda: SaveConfigCallback(Parser(), {}, overwrite=True),  # type: ignore[arg-type]
}
"""One of every callback of Lightning's that is listed as exact."""


def _swa(**settings: Any) -> Callable[[], list[Any]]:
    return lambda: [of_lightning.StochasticWeightAveraging(1e-3, 2, 3, **settings)]


def _one(make: Callable[[], Any]) -> list[Any]:
    return [make()]


CASES = {
    "an epoch's end, by epochs": Case(6, {"max_epochs": 3}),
    "an epoch's end, by steps": Case(6, {"max_steps": 14}),
    "an epoch's end, by steps that end an epoch": Case(12, {"max_steps": 18}),
    "an epoch's end, by both, steps first": Case(6, {"max_steps": 14, "max_epochs": 5}),
    "an epoch's end, by both, epochs first": Case(6, {"max_steps": 50, "max_epochs": 3}),
    "within, by epochs": Case(8, {"max_epochs": 3}),
    "within, by steps": Case(8, {"max_steps": 15}),
    "within, by both": Case(8, {"max_steps": 14, "max_epochs": 3}),
    "after the first batch of an epoch": Case(7, {"max_epochs": 2}),
    "before the last batch of an epoch": Case(5, {"max_steps": 9}),
    "accumulation within, by steps": Case(4, {"max_steps": 8, "accumulate_grad_batches": 2}),
    "accumulation at an epoch's end": Case(3, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    "accumulation that an epoch's end cuts": Case(2, {"max_steps": 7, "accumulate_grad_batches": 4}),
    "accumulation, validation within": Case(
        4, {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3}
    ),
    "validation after every 2 batches, at one": Case(8, {"max_epochs": 3, "val_check_interval": 2}),
    "validation after every 2 batches, between": Case(9, {"max_steps": 16, "val_check_interval": 2}),
    "validation after half an epoch, at it": Case(9, {"max_epochs": 3, "val_check_interval": 0.5}),
    "validation after half an epoch, at its end": Case(6, {"max_steps": 14, "val_check_interval": 0.5}),
    "validation by batches over epochs, at one": Case(
        8, {"max_epochs": 4, "val_check_interval": 4, "check_val_every_n_epoch": None}
    ),
    "validation by batches over epochs, at an epoch's end": Case(
        6, {"max_steps": 15, "val_check_interval": 4, "check_val_every_n_epoch": None}
    ),
    "validation every second epoch, after one": Case(12, {"max_epochs": 4, "check_val_every_n_epoch": 2}),
    "validation every second epoch, without": Case(6, {"max_steps": 20, "check_val_every_n_epoch": 2}),
    "workers that are kept, at an epoch's end": Case(6, {"max_epochs": 4}, keeps_workers=True),
    "workers that are kept, within": Case(8, {"max_epochs": 3}, keeps_workers=True),
    "validation in an order of its own": Case(
        6, {"max_epochs": 4, "limit_val_batches": 1, "val_check_interval": 4, "check_val_every_n_epoch": None},
        draws_validation=True,
    ),
    "limited batches, within": Case(5, {"max_epochs": 3, "limit_train_batches": 4}),
    "limited batches, at an epoch's end": Case(4, {"max_steps": 11, "limit_train_batches": 4}),
    "a limited share of the batches": Case(3, {"max_epochs": 3, "limit_train_batches": 0.5}),
    "at least 4 epochs, and an early stop": Case(
        8, {"max_epochs": 6, "min_epochs": 4},
        lambda: [of_lightning.EarlyStopping("train_mean_epoch", patience=1, min_delta=1.0)],
    ),
    "at least 20 steps, and an early stop": Case(
        13, {"max_epochs": 6, "min_steps": 20},
        lambda: [of_lightning.EarlyStopping("train_mean_epoch", patience=1, min_delta=1.0)],
    ),
    "an early stop within an epoch": Case(
        5, {"max_epochs": 6, "val_check_interval": 2},
        lambda: [of_lightning.EarlyStopping("val_loss", patience=2, min_delta=1.0)],
    ),
    "2 ranks, an epoch's end": Case(6, {"max_steps": 14}, ranks=2),
    "2 ranks, within": Case(8, {"max_epochs": 3, "val_check_interval": 2}, ranks=2, interval=3),
    "2 ranks, statistics of each": Case(8, {"max_epochs": 3, "val_check_interval": 2}, module=Normalized, ranks=2),
    "2 ranks, statistics that are not broadcast": Case(
        6, {"max_epochs": 3, "strategy": DDPStrategy(broadcast_buffers=False)}, module=Normalized, ranks=2
    ),
    "accumulated by hand": Case(8, {"max_epochs": 2}, module=Accumulating),
    "accumulated by hand, over an epoch's end": Case(  # a validation would clear the gradients
        7, {"max_epochs": 3, "check_val_every_n_epoch": 2}, module=Accumulating, batches=7
    ),
    "accumulated by hand, 2 ranks": Case(
        8, {"max_epochs": 2, "strategy": "ddp_find_unused_parameters_true"}, module=Accumulating, ranks=2
    ),
    "a callback of the module": Case(8, {"max_epochs": 3}, module=Bringing),
    "hooks of a begin, within": Case(8, {"max_epochs": 3}, lambda: [Restarting()], module=Switching),
    "hooks of a begin, at an epoch's end": Case(6, {"max_epochs": 3}, lambda: [Restarting()], module=Switching),
    "hooks of a begin, one epoch on": Case(14, {"max_epochs": 3}, lambda: [Restarting()], module=Switching),
    "schedules and skipped batches, within": Case(8, {"max_epochs": 4}, module=Scheduled),
    "schedules and skipped batches, at a shortened epoch's end": Case(10, {"max_epochs": 4}, module=Scheduled),
    "schedules and skipped batches, by steps": Case(6, {"max_steps": 17}, module=Scheduled),
    "clipped, accumulated, with a limit of time": Case(
        5, {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_time": {"hours": 1}}
    ),
    "overfitted batches": Case(5, {"max_epochs": 5, "overfit_batches": 3}),
    "2 ranks, sharded": Case(8, {"max_epochs": 3, "strategy": ModelParallelStrategy(2, 1)}, module=Sharded, ranks=2),
    "schedules of callbacks, at an epoch's end": Case(
        3, {"max_epochs": 4}, lambda: [CALLBACKS[name]() for name in ("EarlyStopping", "GradientAccumulationScheduler")]
    ),
    "averages, within": Case(8, {"max_epochs": 3, "val_check_interval": 2}, lambda: [Averaging()], Normalized),
    "averages, before the first": Case(1, {"max_epochs": 2}, lambda: [Averaging()], Normalized),
    "averages, ended within an epoch": Case(6, {"max_steps": 14}, lambda: [Averaging()], Normalized),
    "averages, accumulated": Case(
        4, {"max_epochs": 4, "accumulate_grad_batches": 2, "val_check_interval": 3}, lambda: [Averaging()], Normalized
    ),
    "averages, with an annealed rate": Case(8, {"max_epochs": 4}, lambda: [Averaging()], Annealed),
    "averages, 2 ranks": Case(
        8, {"max_epochs": 3}, lambda: [of_lightning.EMAWeightAveraging(decay=0.5)], Normalized, ranks=2
    ),
    "an unfrozen backbone, before": Case(8, {"max_epochs": 4}, lambda: [_backbone()], Unfreezing),
    "an unfrozen backbone, within": Case(14, {"max_epochs": 4}, lambda: [_backbone()], Unfreezing),
    "an unfrozen backbone, at an epoch's end": Case(18, {"max_epochs": 5}, lambda: [_backbone()], Unfreezing),
    "layers unfrozen in turn, within": Case(8, {"max_epochs": 4}, lambda: [Stepwise()], Unfreezing),
    "layers unfrozen in turn, at an epoch's end": Case(12, {"max_epochs": 4}, lambda: [Stepwise()], Unfreezing),
    "metrics that grow, within": Case(8, {"max_epochs": 3}, module=Metered),
    "metrics that grow, at an epoch's end": Case(12, {"max_epochs": 3}, module=Metered),
    "metrics that grow, 2 ranks": Case(8, {"max_epochs": 3}, module=Metered, ranks=2),
    "a stochastic average, before": Case(5, {"max_epochs": 4}, _swa()),
    "a stochastic average, within": Case(14, {"max_epochs": 5}, _swa()),
    "a stochastic average, within, linear": Case(14, {"max_epochs": 5}, _swa(annealing_strategy="linear")),
    "a stochastic average, at an epoch's end": Case(12, {"max_epochs": 5}, _swa()),
    "a stochastic average, normalized": Case(14, {"max_epochs": 4}, _swa(), Normalized),
    "a stochastic average, normalized, at the end": Case(24, {"max_epochs": 4}, _swa(), Normalized),
    "a stochastic average, without a schedule": Case(14, {"max_epochs": 4}, _swa(), Constant),
    "a stochastic average, 2 ranks": Case(14, {"max_epochs": 4}, _swa(), Normalized, ranks=2),
    "half precision": Case(8, {"max_epochs": 3, "precision": "bf16-true"}),
    "double precision": Case(8, {"max_epochs": 3, "precision": "64-true"}),
    "mixed precision": Case(8, {"max_epochs": 3, "precision": "bf16-mixed"}),
} | {
    f"with {name}": Case(
        4, {"max_epochs": 4}, partial(_one, make), Unfreezing if "Finetuning" in name else Logging, logs=True
    )
    for name, make in CALLBACKS.items()
}  # fmt: skip


def run(folder: str, interval: int, killed_at: int | None) -> None:
    """Train the case that the folder above is named after."""
    case, path = CASES[Path(folder).parent.name], Path(folder)
    EVENTS.clear()
    L.seed_everything(0, verbose=False)
    module = case.module(killed_at, interval, path)
    callbacks = [Watch(), *case.callbacks()]
    logger = CSVLogger(folder, version=0) if case.logs else False
    shown = {"enable_progress_bar": None, "enable_model_summary": None} if case.logs else {}
    trainer = attached(
        folder, interval, callbacks=callbacks, logger=logger, log_every_n_steps=1, **shown, **case.settings
    )
    read, validated = Samples(2 * case.batches * case.ranks, "read"), Samples(4, "validate")
    loaders: list[Any] = [DataLoader(read, batch_size=2, shuffle=True), DataLoader(validated, batch_size=2)]
    if case.keeps_workers:  # what they draw is their own
        still: list[Any] = [[*samples.values] for samples in (read, validated)]
        kept: Any = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
        loaders = [DataLoader(values, batch_size=2, **kept) for values in still]
    if case.draws_validation:
        drawn: Any = {"shuffle": True, "generator": torch.Generator().manual_seed(4)}
        loaders[1] = DataLoader(Samples(4, "read"), batch_size=2, collate_fn=Jittered(), **drawn)
    trainer.fit(module, *loaders)
    rank = os.environ.get("RANK", 0)
    (path / f"events-{rank}.txt").write_text("\n".join(map(json.dumps, EVENTS)))
    callbacks_of: Any = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it where mypy does not look
    logs = [
        [optimizer.state_dict() for optimizer in trainer.optimizers],
        [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        trainer.fit_loop.state_dict(),
        trainer.accumulate_grad_batches,
        [trainer.current_epoch, *(parameter.requires_grad for parameter in module.parameters())],
        {c.state_key: c.state_dict() for c in callbacks_of if type(c) is not of_lightning.Timer},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        {name: float(value) for name, value in trainer.logged_metrics.items() if "/" not in name},  # no times
    ]
    written = [json.dumps(log, default=lambda value: value.tolist(), sort_keys=True) for log in logs]
    write(path, module, written, 0)
