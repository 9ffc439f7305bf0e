"""Modules in wrappers of torch, modules of the user's own with the wrappers' names, and modules without memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.testing import distributed


class Mine(nn.Module):
    """A module of the user's own that is named as torch.compile names what it compiles."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(4, 4) if inner is None else inner
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1)
        out: torch.Tensor = self._orig_mod(x) * self.scale
        return out


MODELS: dict[str, Callable[[], Any]] = {
    "own": Mine,
    "own in another": lambda: nn.Sequential(Mine(), nn.Linear(4, 4)),
    "own, compiled": lambda: torch.compile(Mine(), backend="eager"),
    "compiled in own": lambda: Mine(torch.compile(nn.Linear(4, 4), backend="eager")),  # type: ignore[arg-type]
    "scripted": lambda: nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 4)),
    "traced": lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)), nn.Linear(4, 4)),
    "lazy, that has run": lambda: called(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())),
}


def called(model: nn.Module) -> nn.Module:
    model(torch.ones(2, 4))
    return model


def resumed(make: Callable[[], Any], root: Path) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = world.shard(make())
        return model, world.adamw(model)

    world.assert_resumes(root, made)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """No tensor is lost, of the module and of those in it."""
    resumed(MODELS[name], tmp_path)


@distributed(nproc=2)
@pytest.mark.parametrize("name", ["own", "own in another"])
def test_a_killed_run_resumes_bit_for_bit_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Under FSDP2."""
    resumed(MODELS[name], tmp_path)


@pytest.mark.parametrize("of_buffer", [False, True])
def test_two_tensors_of_one_name_are_refused_when_they_are_named(of_buffer: bool, tmp_path: Path) -> None:
    """Names of checkpoints have no wrapper's part, so one of the two would be lost."""
    model = Mine()
    if of_buffer:
        model.register_buffer("weight", torch.ones(4))
    else:
        model.weight = nn.Parameter(torch.ones(4))
    with pytest.raises(StateEncodingError, match=r"two tensors .* 'weight' without .*_orig_mod.*another name"):
        world.load(world.manager(tmp_path, model, world.adamw(model)))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_that_has_not_run_is_refused_beside_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(StateEncodingError, match=r"no memory yet for 2 tensors .*0\.weight.*run a lazy one once"):
        world.load(world.manager(tmp_path, model, world.adamw(model)))
