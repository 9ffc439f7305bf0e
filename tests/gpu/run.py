"""A small training run on any device, which can be resumed, and its weights and moments as bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from tests import world

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]

WIDTH = 64


def small_model(device: torch.device) -> nn.Sequential:
    """Return a model with dropout, statistics that a forward changes, and tensors of many sizes."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, 8)]
    return nn.Sequential(*layers).to(device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def train(
    folder: Path,
    device: torch.device,
    steps: int,
    *,
    mode: Any = "thread",
    interval: int = 2,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = lambda parameters: AdamW(parameters, lr=0.01),
    step: Step = loss_of,
    states: dict[str, Any] | None = None,
    backward: Callable[[torch.Tensor, Optimizer], None] | None = None,
) -> dict[str, bytes]:
    """Train to `steps`, from the newest step in the folder. Batches are drawn on the device: its generator counts."""
    model = small_model(device)
    made = optimizer(list(model.parameters()))
    with world.manager(folder, model, made, interval=interval, async_mode=mode, states=states) as manager:
        for number in range(manager.load().step + 1, steps + 1):
            made.zero_grad()
            loss = step(model, torch.randn(16, WIDTH, device=device))
            if backward is None:
                loss.backward()
                made.step()
            else:
                backward(loss, made)
            manager.save(number, last_step=number == steps)
        return content(model, made)


def content(model: nn.Module, optimizer: Optimizer) -> dict[str, bytes]:
    """Return every tensor of the model and of the optimizer as bytes."""
    tensors = dict(model.state_dict())
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{i}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: raw(value) for name, value in tensors.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )
