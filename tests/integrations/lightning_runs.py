"""Runs of Lightning Fabric and of Lightning's Trainer for the tests, as their documentation writes them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.integrations.phases import die_at
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.lightning import attach, fabric_manager


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors that count how often one is read, with noise of the process's random state."""

    def __init__(self, number: int) -> None:
        self.values = torch.randn(number, 5, generator=torch.Generator().manual_seed(1))
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        return self.values[index] + 0.1 * torch.rand(5)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))


def shuffled(data: Samples) -> DataLoader[torch.Tensor]:
    return DataLoader(data, batch_size=2, shuffle=True)


def streamed(data: Samples) -> DataLoader[torch.Tensor]:
    """Return a rank's share of the samples as a stream of datasets."""
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    rows = Dataset.from_dict({"at": [*range(len(data))]}).to_iterable_dataset(num_shards=2)
    read = split_dataset_by_node(rows, rank, ranks).map(lambda row: {"vector": data[row["at"]]})
    stacked: Any = lambda rows: torch.stack([row["vector"] for row in rows])  # noqa: E731 - a collate function
    return DataLoader(read, batch_size=2, collate_fn=stacked)


def run_fabric(
    folder: str, interval: int, killed_at: int | None, loader_of: Callable[[Samples], Any] = shuffled, **settings: Any
) -> None:
    """Train with a loop of Fabric."""
    data = Samples(26)
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), **settings)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    network = fabric.setup_module(bare := model())  # before its optimizer, as ModelParallelStrategy demands
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(network.parameters(), lr=1e-2))
    loader: Any = fabric.setup_dataloaders(loader_of(data))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=20)
    config = CheckpointConfig(save=SaveConfig(interval=interval))
    with fabric_manager(
        fabric,
        config,
        model=network,
        optimizers=[optimizer],
        lr_schedulers=[scheduler],
        dataloader=loader,
        base_folder=folder,
    ) as manager:
        step, steps = manager.load().step, 2 * math.ceil(13 / fabric.world_size)
        while step < steps:
            for batch in loader:
                die_at(step, killed_at, interval, Path(folder))
                loss = (network(batch[:, :4]) - batch[:, 4:]).square().mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                manager.save(step, last_step=step == steps)
    write(Path(folder), bare, [scheduler.get_last_lr()], data.num_read)


def run_fabric_stream(folder: str, interval: int, killed_at: int | None) -> None:
    """Do the same over a stream."""
    run_fabric(folder, interval, killed_at, streamed)


def run_fabric_mixed(folder: str, interval: int, killed_at: int | None) -> None:
    """Do the same in mixed precision."""
    run_fabric(folder, interval, killed_at, precision="bf16-mixed")


def run_fabric_half(folder: str, interval: int, killed_at: int | None) -> None:
    """Do the same with weights in bfloat16."""
    run_fabric(folder, interval, killed_at, precision="bf16-true")


def run_fabric_double(folder: str, interval: int, killed_at: int | None) -> None:
    """Do the same with weights in float64."""
    run_fabric(folder, interval, killed_at, precision="64-true")


def run_fabric_sharded(folder: str, interval: int, killed_at: int | None) -> None:
    """Do the same with weights that FSDP2 shards."""

    def shard(module: Any, mesh: Any) -> Any:
        return fully_shard(module, mesh=mesh["data_parallel"])

    run_fabric(folder, interval, killed_at, strategy=ModelParallelStrategy(shard, 2, 1))


class Regression(L.LightningModule):
    """A network whose learning rate follows the validation."""

    def __init__(self, *death: Any) -> None:
        super().__init__()
        self.network, self.death = model(), death
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        die_at(self.global_step, *self.death)
        loss: torch.Tensor = (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        loss = (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()
        self.seen.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = [*self.seen]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class TwoOptimizers(L.LightningModule):
    """Two networks that step by hand: one in all batches but the last, one in every second; its hooks read weights."""

    def __init__(self, *death: Any) -> None:
        super().__init__()
        self.network = torch.nn.ModuleList([model(), model()])
        self.death, self.num_batches, self.automatic_optimization = death, 0, False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        die_at(self.num_batches, *self.death)
        self.num_batches += 1
        for number, optimizer in enumerate(self.optimizers()):
            if index < 12 and index % 2 >= number:
                loss = (self.network[number](batch[:, :4]) - batch[:, 4:]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(network.parameters(), lr=1e-2) for network in self.network]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        steps = [int(state["state"][0]["step"]) for state in checkpoint["optimizer_states"] if state["state"]]
        checkpoint["own"] = {"weights": sorted(checkpoint["state_dict"]), "batches": self.num_batches, "steps": steps}
        del checkpoint["state_dict"]  # leaves nothing out of a step of titan_ckpt

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["own"]["weights"] == sorted(checkpoint["state_dict"])
        self.num_batches = checkpoint["own"]["batches"]


def run_trainer(folder: str, interval: int, killed_at: int | None) -> None:
    """Train with Lightning's Trainer, which validates twice in an epoch, accumulates gradients, and ends within one."""
    L.seed_everything(0, verbose=False)
    data, module = Samples(26), Regression(killed_at, interval, Path(folder))
    trainer = attached(folder, interval, accumulate_grad_batches=2, val_check_interval=3, max_steps=18)
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), DataLoader(Samples(4), batch_size=2))
    (plateau,) = (config.scheduler for config in trainer.lr_scheduler_configs)
    write(Path(folder), module.network, [module.seen, plateau.state_dict(), trainer.current_epoch], data.num_read)


def run_two_optimizers(folder: str, interval: int, killed_at: int | None) -> None:
    """Train two networks in turn; trainer.global_step counts the steps of both."""
    L.seed_everything(0, verbose=False)
    data, module = Samples(26), TwoOptimizers(killed_at, interval, Path(folder))
    trainer = attached(folder, interval, max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True))
    steps = [int(path.name.removeprefix("step-")) for path in Path(folder, "checkpoints").glob("step-*")]
    assert max(steps) == 24, "twelve steps of each epoch: none of the two optimizers steps in the last batch"
    write(Path(folder), module.network, [module.num_batches, trainer.global_step], data.num_read)


def run_compressed(folder: str) -> None:
    """See PowerSGD refused, which keeps the errors of its compression, in the Trainer and in Fabric."""
    state = powerSGD_hook.PowerSGDState(None)

    class Compressing(L.Callback):
        """Does what DDPStrategy(ddp_comm_hook=...) does on CUDA devices alone."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    trainer = attached(folder, 1, max_epochs=1, strategy="ddp", callbacks=[Compressing()])
    with pytest.raises(ConfigError, match=r"DDP's communication hook .*powerSGD_hook"):
        trainer.fit(Regression(), shuffled(Samples(4)))
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    network: Any = fabric.setup_module(model())
    network._forward_module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ConfigError, match=r"DDP's communication hook .*powerSGD_hook"):
        fabric_manager(fabric, CheckpointConfig(), model=network, base_folder=folder)


def attached(folder: str, saves: int | CheckpointConfig, **settings: Any) -> L.Trainer:
    """Return a quiet trainer with checkpoints of titan_ckpt, at an interval or as a config says."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False} | settings
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        enable_checkpointing=False,
        default_root_dir=folder,
        **quiet,
    )
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=saves)) if isinstance(saves, int) else saves)
    return trainer


def write(folder: Path, network: torch.nn.Module, logs: list[Any], num_read: int) -> None:
    """Write the weights, the log and the number of samples that were read, of this rank."""
    state = network.state_dict().items()
    weights = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state}
    result = {"weights": weights, "logs": logs, "num_read": num_read}
    torch.save(result, folder / f"result-{os.environ.get('RANK', 0)}.pt")
