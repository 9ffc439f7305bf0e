"""Runs of Lightning's Trainer whose settings, data, callbacks and module a seed has drawn."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as of_lightning
from torch.utils.data import DataLoader

from tests.integrations.draws import Record, digest, random_state
from tests.integrations.lightning_cases import (
    Accumulating,
    Annealed,
    Bringing,
    Constant,
    Logging,
    Metered,
    Normalized,
    Scheduled,
    Switching,
)
from tests.integrations.lightning_runs import attached
from tests.integrations.own_loop_draws import MAPS, SAMPLERS, Jittered, collated
from titan_ckpt import CheckpointConfig, SaveConfig

RECORDS: list[Record] = []


def note(step: int, **values: Any) -> None:
    RECORDS[0].add(step, **values)


class Recording(L.Callback):
    """Writes down each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        note(
            trainer.fit_loop.total_batch_idx,
            step=trainer.global_step,
            read=batch.flatten().tolist(),
            weights=digest(module.state_dict()),
            optimizer=digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
            drawn=random_state(),
            logged={name: float(value) for name, value in trainer.callback_metrics.items()},
        )


MODULES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Accumulating, Annealed, Bringing, Constant, Logging, Metered, Normalized, Scheduled, Switching)
}
CALLBACKS: dict[str, Callable[[], Any]] = {
    "EarlyStopping": lambda: of_lightning.EarlyStopping("val_loss", patience=2, min_delta=0.001),
    "GradientAccumulationScheduler": lambda: of_lightning.GradientAccumulationScheduler({0: 2, 1: 3, 2: 1}),
    "LearningRateMonitor": lambda: of_lightning.LearningRateMonitor("step"),
    "StochasticWeightAveraging": lambda: of_lightning.StochasticWeightAveraging(1e-3, 1, 2),
    "WeightAveraging": of_lightning.WeightAveraging,
    "EMAWeightAveraging": lambda: of_lightning.EMAWeightAveraging(decay=0.5),
}


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed."""
    draw = random.Random(3000 + number)

    def rarely(chance: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < chance else otherwise

    workers = rarely(0.2, 1, 2, otherwise=0)
    settings = {
        "max_epochs": rarely(0.6, 2, 3), "max_steps": rarely(0.4, 5, 9, 14),
        "min_epochs": rarely(0.1, 2), "min_steps": rarely(0.1, 4),
        "accumulate_grad_batches": rarely(0.4, 2, 3), "limit_train_batches": rarely(0.3, 2, 3, 0.7),
        "limit_val_batches": rarely(0.3, 0, 1, 0.5), "num_sanity_val_steps": rarely(0.5, 0, -1),
        "val_check_interval": rarely(0.4, 1, 2, 0.5), "check_val_every_n_epoch": rarely(0.3, 2, 3),
        "log_every_n_steps": rarely(0.5, 1, 2), "gradient_clip_val": rarely(0.3, 0.1),
        "gradient_clip_algorithm": rarely(0.1, "value"),
        "precision": rarely(0.3, "bf16-mixed", "bf16-true", "64-true"),
        "reload_dataloaders_every_n_epochs": rarely(0.1, 1),
        "overfit_batches": rarely(0.05, 2), "use_distributed_sampler": rarely(0.1, False),
        "deterministic": rarely(0.1, True),
        "inference_mode": rarely(0.2, False), "detect_anomaly": rarely(0.1, True), "barebones": rarely(0.03, True),
    }  # fmt: skip
    if settings["max_epochs"] is None and settings["max_steps"] is None:
        settings["max_epochs"] = 2
    return {
        "module": draw.choice([*MODULES, "Logging", "Logging"]),
        "callbacks": draw.sample([*CALLBACKS], draw.choice([0, 0, 1, 1, 2])),
        "data": draw.choice([*MAPS]),
        "samples": draw.randint(6, 15),
        "noise": rarely(0.6, "torch", "random", "numpy", "own"),
        "collate": rarely(0.5, "torch", "random", "numpy", "object"),
        "sampler": rarely(0.4, *SAMPLERS),
        "shuffle": draw.random() < 0.6,
        "batch_size": draw.randint(1, 3),
        "drop_last": draw.random() < 0.3,
        "generator": draw.random() < 0.3,
        "workers": workers,
        "persistent_workers": workers > 0 and draw.random() < 0.4,
        "validation shuffles": draw.random() < 0.3,
        "interval": draw.choice([1, 1, 2, 3]),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "kills": [(draw.randint(1, 7), draw.choice([0, draw.random() * 60])) for _ in range(draw.choice([1, 2]))],
    }


def widened(inner: Any, rows: Any) -> torch.Tensor:
    """Return five numbers for each row, as the modules take them."""
    found = inner(rows)
    return torch.cat([found, found * 2, found[:, :1] - 1], 1)


def run(folder: str, case: dict[str, Any], kill: tuple[int, float] | None) -> None:
    """Train; write each batch, or the error that ends the run."""
    rank, path = int(os.environ.get("RANK", "0")), Path(folder)
    RECORDS[:] = [Record(path, rank, kill)]
    try:
        train(path, case)
    except Exception as error:
        (path / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    (path / f"done-{rank}").touch()


def train(path: Path, case: dict[str, Any]) -> None:
    L.seed_everything(0, verbose=False)
    samples = case["samples"]
    collate: Any = partial(collated, case["collate"] if case["collate"] != "object" else None)
    collate = partial(widened, Jittered(collate) if case["collate"] == "object" else collate)
    generator = torch.Generator().manual_seed(3) if case["generator"] else None
    data = MAPS[case["data"]](samples, case["noise"])
    order: dict[str, Any] = {"shuffle": case["shuffle"], "generator": generator}
    if case["sampler"]:
        order = {"sampler": SAMPLERS[case["sampler"]](data, samples, generator)}
    loader: Any = DataLoader(
        data, case["batch_size"], collate_fn=collate, drop_last=case["drop_last"], num_workers=case["workers"],
        persistent_workers=case["persistent_workers"], **order,
    )  # fmt: skip
    validated: Any = DataLoader(
        MAPS["rows"](5, "random"),
        2,
        shuffle=case["validation shuffles"],
        collate_fn=partial(widened, partial(collated, None)),
    )
    callbacks = [CALLBACKS[name]() for name in case["callbacks"]]
    ranked = {"strategy": "ddp"} if "RANK" in os.environ else {}
    module = MODULES[case["module"]]()
    module.leaves = (None, 1, path)  # never
    config = CheckpointConfig(save=SaveConfig(interval=case["interval"]))
    trainer = attached(str(path), config, callbacks=[*callbacks, Recording()], **case["settings"], **ranked)
    trainer.fit(module, loader, validated)
    RECORDS[0].add(
        1 << 20,
        weights=digest(module.state_dict()),
        ended=[trainer.current_epoch, trainer.global_step],
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        drawn=random_state(),
    )
