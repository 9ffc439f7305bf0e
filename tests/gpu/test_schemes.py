"""Converters that compute with units which only some GPUs have; the CPU refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from tests import world

pytest.importorskip("torchao")

from tests.unit.converters.test_float8 import convert as to_float8
from tests.world import convert, llama

pytestmark = pytest.mark.gpu(only=True)


def needs(capability: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs a GPU of compute capability {capability[0]}.{capability[1]}")


def train(model: Any, device: torch.device, folder: Path, steps: int) -> list[bytes]:
    """Train on fixed tokens, from the newest step in the folder; return the parameters as bytes."""
    tokens = torch.arange(32, device=device).view(2, 16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with world.manager(folder, model, optimizer, async_mode="thread", sd_transforms=None) as manager:
        for step in range(manager.load().step + 1, steps + 1):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                model(tokens).float().square().mean().backward()
            optimizer.step()
            manager.save(step, last_step=step == steps)
    return [p.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_training_on_float8_units_goes_on(tmp_path: Path, device: torch.device, recipe: str) -> None:
    """Without emulation; resumed bit for bit."""
    needs((8, 9))

    def made() -> Any:
        torch.manual_seed(0)
        model = llama()
        to_float8(model, recipe=recipe, emulate=False)
        return model.to(device)

    whole = train(made(), device, tmp_path / "whole", 4)
    train(made(), device, tmp_path / "parts", 2)
    assert train(made(), device, tmp_path / "parts", 4) == whole


@pytest.mark.parametrize(("scheme", "capability"), [("float8_dynamic_act_float8_weight", (8, 9)), ("nvfp4", (10, 0))])
def test_schemes_that_the_cpu_refuses_train_and_go_on(
    tmp_path: Path, device: torch.device, scheme: str, capability: tuple[int, int]
) -> None:
    """Fake quantization to float8 and nvfp4; resumed bit for bit."""
    needs(capability)

    def made() -> Any:
        torch.manual_seed(0)
        model = llama()
        convert(model, {"kind": "qat", "scheme": scheme})
        return model.to(device)

    whole = train(made(), device, tmp_path / "whole", 4)
    train(made(), device, tmp_path / "parts", 2)
    assert train(made(), device, tmp_path / "parts", 4) == whole
