"""Runs of Lightning's Trainer whose arguments, data, module and callbacks a seed has drawn."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as of_lightning
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.integrations.draws import Record, digest, random_state
from tests.integrations.lightning_runs import attached
from tests.integrations.own_loop_draws import MAPS, Jittered, collated
from titan_ckpt import CheckpointConfig, SaveConfig

RECORDS: list[Record] = []


def note(step: int, **values: Any) -> None:
    RECORDS[0].add(step, **values)


class Recording(L.Callback):
    """Writes down each batch that an optimizer has stepped in."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        note(
            trainer.fit_loop.total_batch_idx,
            steps=trainer.global_step,
            epoch=trainer.current_epoch,
            read=batch.flatten().tolist(),
            weights=digest(pl_module.state_dict()),
            optimizers=digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
            rates=[group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            logged={name: float(value) for name, value in trainer.callback_metrics.items()},
            drawn=random_state(),
        )


class Module(L.LightningModule):
    """A network that logs, validates and is stepped as the case says."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(4) if case["batch norm"] else nn.Dropout(0.2)
        self.network = nn.Sequential(nn.Linear(2, 4), middle, nn.ReLU(), nn.Linear(4, 1))
        self.case = case
        self.automatic_optimization = not case["by hand"]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(batch if len(batch) > 1 else torch.cat([batch, batch])).square().mean()
        return found

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.case["sync_dist"])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("seen", self.loss(batch) + 0 * torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop}
        optimizer = kinds[self.case["optimizer"]](self.parameters(), lr=1e-2)
        schedule = self.case["schedule"]
        if not schedule:
            return optimizer
        if schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "loss", "interval": "epoch"}]
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": rate, "interval": schedule, "frequency": self.case["frequency"]}]


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed."""
    draw = random.Random(3000 + number)

    def rarely(chance: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < chance else otherwise

    workers = rarely(0.25, 1, 2, otherwise=0)
    by_hand = draw.random() < 0.15
    settings = {
        **({"max_epochs": draw.choice([2, 3])} if draw.random() < 0.6 else {"max_steps": draw.randint(5, 12)}),
        "min_epochs": rarely(0.2, 1, 2),
        "accumulate_grad_batches": None if by_hand else rarely(0.4, 2, 3),
        "limit_train_batches": rarely(0.3, 2, 3, 0.7),
        "limit_val_batches": rarely(0.2, 1, 0.5, 0),
        "val_check_interval": rarely(0.3, 1, 2, 0.5),
        "check_val_every_n_epoch": rarely(0.3, 2),
        "num_sanity_val_steps": rarely(0.3, 0, 1),
        "gradient_clip_val": None if by_hand else rarely(0.3, 0.5),
        "precision": rarely(0.2, "bf16-mixed", "64-true"),
        "log_every_n_steps": rarely(0.3, 1, 2),
        "use_distributed_sampler": rarely(0.2, False),
        "overfit_batches": rarely(0.1, 2),
        "deterministic": rarely(0.2, True),
        "detect_anomaly": rarely(0.1, True),
        "inference_mode": rarely(0.2, False),
        "sync_batchnorm": rarely(0.1, True),
        "barebones": None,
    }
    return {
        "data": draw.choice([*MAPS]),
        "samples": draw.randint(7, 18),
        "noise": rarely(0.6, "torch", "random", "numpy", "own"),
        "collate": rarely(0.5, "torch", "random", "object"),
        "sampler": rarely(0.3, "random", "weighted"),
        "shuffle": draw.random() < 0.7,
        "generator": draw.random() < 0.3,
        "batch_size": draw.randint(1, 3),
        "drop_last": draw.random() < 0.3,
        "workers": workers,
        "persistent_workers": workers > 0 and draw.random() < 0.4,
        "validates": draw.random() < 0.7,
        "validation shuffles": draw.random() < 0.3,
        "validation workers": rarely(0.15, 1, otherwise=0),
        "batch norm": draw.random() < 0.4,
        "by hand": by_hand,
        "sync_dist": draw.random() < 0.5,
        "optimizer": draw.choice(["AdamW", "SGD", "RMSprop"]),
        "schedule": rarely(0.7, "step", "epoch", "plateau") if not by_hand else None,
        "frequency": draw.choice([1, 1, 2]),
        "callbacks": [
            name
            for name in ("EarlyStopping", "StochasticWeightAveraging", "WeightAveraging", "Accumulation", "Timer")
            if draw.random() < 0.15 and not (name == "Accumulation" and settings["accumulate_grad_batches"])
        ],
        "settings": {name: value for name, value in settings.items() if value is not None},
        "interval": draw.choice([1, 1, 2, 3]),
        "kills": [(draw.randint(1, 6), draw.choice([0, draw.random() * 60])) for _ in range(draw.choice([1, 2]))],
    }


def loader_of(case: dict[str, Any]) -> Any:
    data = MAPS[case["data"]](case["samples"], case["noise"])
    generator = torch.Generator().manual_seed(3) if case["generator"] else None
    plain: Any = Collated(case["collate"] if case["collate"] != "object" else None)
    given: dict[str, Any] = {
        "collate_fn": Jittered(plain) if case["collate"] == "object" else plain,
        "num_workers": case["workers"],
        "persistent_workers": case["persistent_workers"],
        "drop_last": case["drop_last"],
        "generator": generator,
    }
    samplers: dict[str, Any] = {
        "random": lambda: RandomSampler(data, generator=generator),
        "weighted": lambda: WeightedRandomSampler(
            [1 + number % 3 for number in range(case["samples"])], case["samples"], generator=generator
        ),
    }
    order: Any = {"sampler": samplers[case["sampler"]]()} if case["sampler"] else {"shuffle": case["shuffle"]}
    return DataLoader(data, case["batch_size"], **order, **given)


class Collated:
    """Makes batches of two numbers for each row."""

    def __init__(self, noise: str | None) -> None:
        self.noise = noise

    def __call__(self, rows: Any) -> torch.Tensor:
        return collated(self.noise, rows)


def callbacks_of(case: dict[str, Any]) -> list[Any]:
    make: dict[str, Any] = {
        "EarlyStopping": lambda: of_lightning.EarlyStopping("loss", patience=2, mode="max"),
        "StochasticWeightAveraging": lambda: of_lightning.StochasticWeightAveraging(1e-3, swa_epoch_start=1),
        "WeightAveraging": of_lightning.WeightAveraging,
        "Accumulation": lambda: of_lightning.GradientAccumulationScheduler({0: 2, 1: 1}),
        "Timer": lambda: of_lightning.Timer({"hours": 1}),
    }
    return [make[name]() for name in case["callbacks"]]


def run(folder: str, case: dict[str, Any], kill: tuple[int, float] | None) -> None:
    """Train; write each step, or the error that ends the run."""
    rank, path = int(os.environ.get("RANK", "0")), Path(folder)
    RECORDS[:] = [Record(path, rank, kill)]
    try:
        L.seed_everything(0, verbose=False)
        validation = DataLoader(
            MAPS["rows"](5, "random"), 2, shuffle=case["validation shuffles"], collate_fn=Collated(None),
            num_workers=case["validation workers"],
        )  # fmt: skip
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        trainer = attached(
            folder,
            CheckpointConfig(save=SaveConfig(interval=case["interval"], timeout_seconds=60.0)),
            callbacks=[*callbacks_of(case), Recording()],
            **({"strategy": "ddp"} if several else {}),
            **case["settings"],
        )
        trainer.fit(Module(case), loader_of(case), validation if case["validates"] else None)
        weights = digest(trainer.lightning_module.state_dict())
        RECORDS[0].add(1 << 20, weights=weights, epoch=trainer.current_epoch, drawn=random_state())
    except Exception as error:
        (path / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    (path / f"done-{rank}").touch()
