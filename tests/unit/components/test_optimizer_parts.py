"""Several model parts and several optimizers in one checkpoint; tied and frozen parameters in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests import world


class First(nn.Module):
    """An embedding whose matrix is the output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight


class Second(nn.Module):
    """A layer with a frozen bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(4)


class Run:
    """Both parts, each parameter with one of three optimizers of different kinds, and a schedule for each."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.first, self.second = First(), Second()
        self.optimizers: list[Optimizer] = [
            AdamW(self.first.parameters(), lr=0.1),
            SGD([self.second.layer.weight], lr=0.2, momentum=0.9),
            AdamW(self.second.norm.parameters(), lr=0.3, amsgrad=True),
        ]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5 + i / 10) for i, o in enumerate(self.optimizers)]
        self.schedulers = schedulers
        self.manager = world.manager(folder, self.first, self.second, *self.optimizers, lr_schedulers=schedulers)

    def step(self, number: int) -> None:
        tokens = torch.arange(number, number + 5) % 7
        self.first.output(self.second.norm(self.second.layer(self.first.embedding(tokens)))).square().sum().backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for part in (self.first, self.second) for k, v in part.state_dict().items()}


def test_every_optimizer_gets_its_own_state_back(tmp_path: Path) -> None:
    """A resumed run takes the same next steps, bit for bit; the tied matrix and its moments are stored once."""
    run = Run(tmp_path, seed=0)
    with run.manager:
        run.step(1)
        run.step(2)
        run.manager.save(2)
    run.step(3)
    run.step(4)
    other = Run(tmp_path, seed=9)
    with other.manager:
        assert other.manager.load().step == 2
    assert other.first.output.weight is other.first.embedding.weight
    other.step(3)
    other.step(4)
    assert run.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(value, other.tensors()[fqn]) for fqn, value in run.tensors().items())
    with safe_open(tmp_path / "checkpoints" / "step-2" / "rank-00000.safetensors", "pt") as file:
        state = [name for name in file.keys() if name.startswith("optimizer.")]  # noqa: SIM118 - no mapping
        assert "model.layer.bias" in file.keys()  # noqa: SIM118
    assert sorted(state) == [
        "optimizer.embedding.weight.exp_avg",
        "optimizer.embedding.weight.exp_avg_sq",
        "optimizer.layer.weight.momentum_buffer",
        *(f"optimizer.norm.{p}.{s}" for p in ("bias", "weight") for s in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ]


class Whole(SGD):
    """A copy of it has all its attributes; torch's own have no hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def test_an_optimizer_can_be_copied_with_its_hooks(tmp_path: Path) -> None:
    """The copy shares the manager, which cannot be copied: it has threads and locks."""
    model = nn.Linear(2, 2)
    optimizer = Whole(model.parameters(), lr=0.1)
    with world.manager(tmp_path, model, optimizer):
        again = copy.deepcopy(optimizer)
    assert [p.shape for p in again.param_groups[0]["params"]] == [p.shape for p in model.parameters()]
