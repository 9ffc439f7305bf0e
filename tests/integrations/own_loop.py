"""A loop of one's own over a PositionedLoader, under DDP or FSDP2, as docs/resume.md writes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations.phases import die_at
from titan_ckpt import CheckpointConfig, CheckpointManager, PositionedLoader, RunGuard, SaveConfig

STEPS, SAMPLES = 14, 24
"""Six steps are an epoch: each has four samples, on any number of ranks."""


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Vectors with their numbers, and with noise of the process's random state; it counts what is read."""

    def __init__(self) -> None:
        self.values = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.num_read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.num_read += 1
        return index, self.values[index] + 0.1 * torch.rand(4)


def copied(folder: str, source: str) -> None:
    """Let another run go on from the same checkpoints."""
    shutil.copytree(Path(source, "checkpoints"), Path(folder, "checkpoints"))


def run(folder: str, way: str, interval: int, killed_at: int | None) -> None:
    """Train; write the samples of each step, then the weights."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    model = network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    if ranks > 1:
        network = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)  # type: ignore[assignment]
    torch.manual_seed(rank + 1)
    data = Numbered()
    sampler: Any = DistributedSampler(data, ranks, rank, seed=3)
    loader = PositionedLoader(DataLoader(data, batch_size=2, sampler=sampler))
    batches: Iterator[Any] = chain.from_iterable(repeat(loader))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = CheckpointConfig(save=SaveConfig(interval=interval))
    read: dict[int, list[int]] = {}
    with (
        CheckpointManager(
            config, model_parts=[model], optimizers=[optimizer], dataloader=loader, base_folder=folder
        ) as manager,
        RunGuard(manager) as guard,
    ):
        for step in range(manager.load().step + 1, STEPS + 1):
            die_at(step - 1, killed_at, interval, Path(folder))
            for _ in range(2 // ranks):
                numbers, values = next(batches)
                read.setdefault(step, []).extend(numbers.tolist())
                (network(values).square().mean() / (2 // ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, last_step=step == STEPS)
            if guard.step_ended(step):
                break
    result = {"read": read, "num_read": data.num_read}
    Path(folder, f"read-{rank}.json").write_text(json.dumps(result))
    local = {name: getattr(value, "_local_tensor", value) for name, value in model.state_dict().items()}
    torch.save(local, Path(folder, f"weights-{rank}.pt"))
