"""Buffers that get their shape in the first forward pass: loaded by their module's own code, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    default_fused_per_channel_wt_fake_quant,
    default_per_channel_weight_fake_quant,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import world
from titan_ckpt.errors import LoadMismatchError, StateEncodingError
from titan_ckpt.testing import distributed

KINDS: dict[str, Callable[[], nn.Module]] = {
    "per channel": default_per_channel_weight_fake_quant,
    "fused": default_fused_per_channel_wt_fake_quant,
    "per tensor": FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
}


class Quantized(nn.Module):
    """A linear layer that trains for quantized weights, as torch.ao's do."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.weight_fake_quant = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight_fake_quant(self.linear.weight), self.linear.bias)


class Seen(nn.Module):
    """A buffer with a value for each sample of the first batch, which no code of its own can load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.first: torch.Tensor
        self.register_buffer("first", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.first.numel():
            self.first = x.detach().sum(1)
        out: torch.Tensor = self.linear(x)
        return out


class Late(nn.Module):
    """A buffer that comes, goes or gets another shape in step `at`."""

    def __init__(self, first: torch.Tensor | None, then: torch.Tensor | None, at: int) -> None:
        super().__init__()
        self.linear, self.then, self.at = nn.Linear(4, 6), then, at
        self.register_buffer("first", first)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("steps").add_(1)
        if self.get_buffer("steps") == self.at:
            self.first = self.then
        out: torch.Tensor = self.linear(x)
        return out


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    world.step_on(model, optimizer, torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))


def quantized(kind: str, way: str = "") -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Quantized(KINDS[kind])
    if way:
        model = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    return model, world.adamw(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_of_fake_quantizers_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Scales and ranges have the shape of the weights after the first forward, and another one in a new process."""
    world.assert_resumes(tmp_path, lambda: quantized(kind))


@distributed(nproc=2)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_killed_run_of_fake_quantizers_resumes_on_two_ranks(way: str, tmp_path: Path) -> None:
    world.assert_resumes(tmp_path, lambda: quantized("per channel", way))


def test_weights_alone_are_loaded_into_the_shape_that_they_have(tmp_path: Path) -> None:
    """As an initial load does, and as a load into a model that has run already, of which nothing changes its shape."""
    model, optimizer = quantized("per channel")
    step(model, optimizer, 1)
    world.save(world.manager(tmp_path / "first", model, optimizer))
    for has_run in (False, True):
        model = Quantized(KINDS["per channel"])
        if has_run:
            model(torch.ones(1, 4))
        source = tmp_path / "first" / "checkpoints" / "step-1"
        world.load(world.manager(tmp_path / f"second{has_run}", model, initial_load=[source]))
        assert model.get_buffer("weight_fake_quant.scale").shape == (6,)
        assert model.get_buffer("weight_fake_quant.activation_post_process.min_val").abs().min() > 0


def test_a_buffer_that_no_new_process_could_load_is_refused_before_the_first_save(tmp_path: Path) -> None:
    """The next step works: a call before the load gives the buffer its shape in both processes."""
    model = Seen()
    optimizer = world.adamw(model)
    with world.manager(tmp_path / "refused", model, optimizer) as manager:
        manager.load()
        step(model, optimizer, 1)
        with pytest.raises(StateEncodingError, match=r"the shape of 1 buffer of the model: first \[0\] -> \[3\].*once"):
            manager.save(1)
    assert "step-1" not in world.names_in(tmp_path / "refused" / "checkpoints")
    first, second = Seen(), Seen()
    for each in (first, second):
        each(torch.ones(3, 4))
    world.save(world.manager(tmp_path / "run", first))
    world.load(world.manager(tmp_path / "run", second))
    assert world.same(dict(first.state_dict()), dict(second.state_dict()))
    world.load_fails(world.manager(tmp_path / "run", Seen()), LoadMismatchError, r"first: expected float32\[0\]")


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("case", ["absent -> [2]", "[1] -> absent", "[1] -> [2]"])
def test_a_buffer_that_changes_in_any_step_is_refused_when_it_would_be_saved(
    case: str, at: int, tmp_path: Path
) -> None:
    """The steps before it are whole: a new process resumes the newest one."""
    shapes = {"absent": None, "[1]": torch.zeros(1), "[2]": torch.zeros(2)}
    first, then = (shapes[name] for name in case.split(" -> "))
    model = Late(first, then, at)
    optimizer = world.adamw(model)
    with world.manager(tmp_path, model, optimizer) as manager:
        manager.load()
        for number in range(1, at):
            step(model, optimizer, number)
            manager.save(number)
        step(model, optimizer, at)
        told = (
            "has added or removed 1 buffer of the model: first." if "absent" in case else f"of the model: first {case}."
        )
        with pytest.raises(StateEncodingError, match=re.escape(told)):
            manager.save(at)
    assert world.load(world.manager(tmp_path, Late(first, then, 9))).step == at - 1
