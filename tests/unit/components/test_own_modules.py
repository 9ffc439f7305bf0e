"""What modules of the user's own keep beside the model's state is refused when it changes, and outputs are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.errors import SaveError


class Part(nn.Module):
    """A module within the model."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(2), persistent=False)
        self.number, self.seen, self.moments = 0, [0.0], torch.zeros(2)
        self.output: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * (1 + self.number + len(self.seen)) + self.running + self.moments
        return out


class InBuffer(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running += x.detach().mean(0)
        return super().forward(x)


class InNumber(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return super().forward(x)


class InList(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean().item())
        return super().forward(x)


class InTensor(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.moments = 0.9 * self.moments + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Stored(InNumber):
    """Gives the state itself."""

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


class Outputs(Part):
    """Leaves outputs of its forward behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written = x.mean().item()
        self.output = self.inner(x).mean(0)
        added: torch.Tensor = super().forward(x) + self.output
        return added


class Below(nn.Linear):
    """Extends a module of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = getattr(self, "scale", 1.0) * 0.5
        out: torch.Tensor = super().forward(x) * self.scale
        return out


def trained(part: nn.Module, folder: Path, allow: tuple[str, ...] = ()) -> None:
    """Train two steps, the second of which is saved."""
    model = nn.Sequential(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = CheckpointConfig(save=SaveConfig(interval=2, async_mode="disabled"), allow=allow)
    with CheckpointManager(config, model_parts=[model], optimizers=[optimizer], base_folder=folder) as manager:
        manager.load()
        for step in (1, 2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (InBuffer, "self.running"),
        (InNumber, "self.number"),
        (InList, "self.seen"),
        (InTensor, "self.moments"),
        (lambda: Below(2, 2), "self.scale"),
    ],
)
def test_what_a_module_keeps_beside_its_state_is_refused_after_the_first_step(
    make: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    part = make()
    own = f"{type(part).__module__}.{type(part).__qualname__}"
    with pytest.raises(SaveError, match=rf"step 1 is not saved: module 0, {own}: {name} changed .*persistent buffer"):
        trained(part, tmp_path / "refused")
    trained(make(), tmp_path / "allowed", (own,))
    assert (tmp_path / "allowed" / "checkpoints" / "step-2").is_dir()


@pytest.mark.parametrize("kind", [Part, Stored, Outputs])
def test_what_is_stored_or_made_anew_by_each_step_runs(kind: type[nn.Module], tmp_path: Path) -> None:
    trained(kind(), tmp_path)
    assert (tmp_path / "checkpoints" / "step-2").is_dir()
