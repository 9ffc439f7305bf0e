"""A small training loop with a RunGuard, as a program that tests start as ranks and interrupt from outside.

Prints a line for what it does.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.world import Value
from titan_ckpt import CheckpointManager, RunGuard
from titan_ckpt.config import CheckpointConfig, from_dict
from titan_ckpt.guard import run_guard


class Data(Value):
    """A position in endless data, moved by every micro-batch."""

    def take(self) -> torch.Tensor:
        self.value += 1
        return torch.full((2, 4), self.value / 100)


class Model(torch.nn.Module):
    """One matrix, and a buffer that every forward changes."""

    num_passes: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, width)
        self.register_buffer("num_passes", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        y: torch.Tensor = self.linear(x * torch.rand(()))
        return y


def say(*words: object) -> None:
    print(*words, flush=True)


def main(job: dict[str, Any]) -> None:
    """Train `steps` steps; `raise_at`, `slow` and their like say what goes wrong or takes long."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = Model(job.get("width", 4)), Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = from_dict(CheckpointConfig, job["checkpoint"])
    run_guard.ANSWER_SECONDS = job.get("answer_seconds", run_guard.ANSWER_SECONDS)
    run_guard.SAME_SIGNAL_SECONDS = job.get("same_signal_seconds", run_guard.SAME_SIGNAL_SECONDS)
    say("pid", os.getpid())
    with (
        CheckpointManager(
            config, model_parts=[model], optimizers=[optimizer], dataloader=data, base_folder=Path(job["folder"])
        ) as manager,
        RunGuard(manager) as guard,
    ):
        start = manager.load().step
        say("from", start, data.value, int(model.num_passes))
        for step in range(start + 1, job["steps"] + 1):
            for micro_batch in range(2):
                time.sleep(job.get("slow", 0.005) + rank * job.get("lag", 0))
                model(data.take()).square().mean().backward()
                say("micro-batch", step, micro_batch)
                if job.get("raise_at") == [step, rank] or job.get("raise_at") == step:
                    raise ValueError("a batch that cannot be")
                guard.check()
            for parameter in model.parameters():
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if job.get("raise_after_step") == step:
                raise ValueError("after the optimizer's step")
            manager.save(step, last_step=step == job["steps"])
            say("step", step, float(model.linear.weight.detach().sum()))
            if guard.step_ended(step):
                break
        say("left", guard.stopped)
    say("closing")
    time.sleep(job.get("closing", 0))
    say("end")
