"""Exact resume on a device, in one process: killed runs go on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

from tests.gpu.run import loss_of, train

pytestmark = pytest.mark.gpu


def assert_resumes(folder: Path, device: torch.device, **settings: Any) -> None:
    """Train 5 steps at once, and 3 steps and then the others: the same weights and moments."""
    whole = train(folder / "whole", device, 5, **settings)
    train(folder / "parts", device, 3, **settings)
    torch.manual_seed(99)
    assert train(folder / "parts", device, 5, **settings) == whole


@pytest.mark.parametrize("mode", ["disabled", "thread", pytest.param("process", marks=pytest.mark.gpu(only=True))])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, device: torch.device, mode: str) -> None:
    """Dropout masks and batches are drawn on the device; the copy overlaps with the next forward and backward."""
    assert_resumes(tmp_path, device, mode=mode)


@pytest.mark.parametrize(
    "settings", [{"foreach": True}, {"fused": True}, {"amsgrad": True}], ids=["foreach", "fused", "amsgrad"]
)
def test_optimizers_of_a_device_go_on(tmp_path: Path, device: torch.device, settings: dict[str, bool]) -> None:
    """Each keeps its step counters where it wants them."""
    assert_resumes(tmp_path, device, optimizer=lambda p: AdamW(p, lr=0.01, **settings))  # type: ignore[arg-type]


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("compiled", [False, True])
def test_capturable_and_compiled_optimizers_go_on(tmp_path: Path, device: torch.device, compiled: bool) -> None:
    """A learning rate in a tensor of the device, and a step that torch compiled."""

    def make(parameters: list[Any]) -> Optimizer:
        made = AdamW(parameters, lr=torch.tensor(0.01, device=device), capturable=True)
        if compiled:
            made.step = torch.compile(made.step)  # type: ignore[method-assign]
        return made

    assert_resumes(tmp_path, device, optimizer=make)


def test_a_run_under_bf16_autocast_goes_on(tmp_path: Path, device: torch.device) -> None:
    """The weights stay float32."""

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(model, batch)

    assert_resumes(tmp_path, device, step=step)


@pytest.mark.gpu(only=True)
def test_a_gradient_scaler_goes_on(tmp_path: Path, device: torch.device) -> None:
    """The scale, which grows every second step, is that of the step that was saved."""

    def run(folder: Path, steps: int) -> dict[str, bytes]:
        scaler = torch.amp.GradScaler("cuda", growth_interval=2)

        def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16):
                return loss_of(model, batch)

        def backward(loss: torch.Tensor, optimizer: Optimizer) -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        found = train(folder, device, steps, step=step, backward=backward, states={"scaler": scaler})
        return found | {"scale": str(scaler.get_scale()).encode()}

    whole = run(tmp_path / "whole", 5)
    run(tmp_path / "parts", 3)
    assert run(tmp_path / "parts", 5) == whole


def test_a_run_on_a_stream_of_its_own_saves_what_it_computed_there(tmp_path: Path, device: torch.device) -> None:
    """No thread of a save overtakes the work that training has enqueued."""

    def on_a_stream(act: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        if device.type == "cpu":
            return act()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = act()
        stream.synchronize()
        return found

    for mode in ("disabled", "thread"):
        whole = on_a_stream(lambda: train(tmp_path / f"{mode} whole", device, 5, mode=mode))  # noqa: B023
        on_a_stream(lambda: train(tmp_path / f"{mode} parts", device, 3, mode=mode))  # noqa: B023
        assert on_a_stream(lambda: train(tmp_path / f"{mode} parts", device, 5, mode=mode)) == whole  # noqa: B023
