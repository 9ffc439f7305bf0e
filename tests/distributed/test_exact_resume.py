"""A resume over shards that do not divide: no gap in the loss, and one rung of the ladder for all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.world import adamw, flip_bit, heard, manager
from titan_ckpt import CheckpointManager
from titan_ckpt.testing import distributed

VOCABULARY = 257
"""Over three ranks: 86, 86 and 85 rows."""


class Run:
    """A language model of one layer under FSDP2, with a gradient scaler; a rank whose bias shard is empty."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.2), nn.Linear(8, 2), nn.Linear(2, VOCABULARY))
        self.model = model
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        self.optimizer = adamw(self.model, lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        torch.manual_seed(seed + 1 + dist.get_rank())

    def step(self) -> float:
        tokens = torch.randint(VOCABULARY, (20,))
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def manager(self, folder: Path) -> CheckpointManager:
        return manager(folder, self.model, self.optimizer, states={"scaler": self.scaler})


@distributed(nproc=3)
def test_f5_the_loss_has_no_gap_where_the_vocabulary_does_not_divide(tmp_path: Path) -> None:
    """The next losses are the same floats; where one file is damaged, all ranks take the step before, saying why."""
    run = Run(0)
    with run.manager(tmp_path) as manager:
        manager.load()
        for step in (1, 2, 3):
            run.step()
            manager.save(step)
    expected = [run.step() for _ in range(3)]
    scale = run.scaler.get_scale()

    again = Run(100)
    with again.manager(tmp_path) as manager:
        assert manager.load().step == 3
    assert [again.step() for _ in range(3)] == expected
    assert again.scaler.get_scale() == scale != 4.0

    dist.barrier()
    if dist.get_rank() == 2:
        flip_bit(tmp_path / "checkpoints/step-3/rank-00002.safetensors", -9)
    dist.barrier()
    third = Run(200)
    with heard() as lines, third.manager(tmp_path) as manager:
        assert manager.load().step == 2
    assert any("step 3 cannot be resumed from" in line and "rank-00002.safetensors" in line for line in lines), lines
    third.step()
    assert [third.step() for _ in range(3)] == expected
