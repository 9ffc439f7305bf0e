"""Optimizer state that is a slice of a parameter, as Prodigy's with `slice_p`: it has strides, or one element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import world
from titan_ckpt.geometry.chunks import as_bytes
from titan_ckpt.testing import distributed
from titan_ckpt.weights.live_memory import is_same


class Sliced(torch.optim.Optimizer):
    """Estimates its rate from every n-th element, as Prodigy does: github.com/konstmish/prodigy, prodigy.py."""

    def __init__(self, params: Any, lr: float = 0.1, slice_p: int = 11) -> None:
        super().__init__(params, {"lr": lr, "slice_p": slice_p, "d": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, part = self.state[p], p.flatten()[:: group["slice_p"]]
                if "step" not in state:
                    state["step"] = 0
                    state["s"] = torch.zeros_like(part).detach()
                    state["p0"] = part.detach().clone()
                state["step"] += 1
                state["newest"] = p.grad.flatten()[:: group["slice_p"]]  # a view, with the strides of the slice
                state["s"].add_(state["newest"], alpha=group["d"])
                group["d"] += float((state["p0"] - part).abs().sum() + state["s"].abs().sum()) / 100
                p.add_(p.grad, alpha=-group["lr"] * group["d"])


def resumed(root: Path, sizes: tuple[int, int], slice_p: int, **save: Any) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 1))
        model = DistributedDataParallel(model) if dist.is_initialized() else model
        return model, Sliced(model.parameters(), slice_p=slice_p)

    world.assert_resumes(root, make, sizes[0], **save)


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.parametrize("slice_p", [3, 11])
@pytest.mark.parametrize("sizes", [(4, 7), (2, 3), (1, 1)])
def test_a_killed_run_resumes_bit_for_bit(sizes: tuple[int, int], slice_p: int, mode: str, tmp_path: Path) -> None:
    resumed(tmp_path, sizes, slice_p, async_mode=mode)


@distributed(nproc=2)
def test_a_killed_run_resumes_bit_for_bit_on_two_ranks(tmp_path: Path) -> None:
    """The ranks compare their copies of such state, too."""
    resumed(tmp_path, (2, 3), 11)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (3,), (2, 3)])
def test_the_bytes_of_any_slice_are_its_values(shape: tuple[int, ...]) -> None:
    """Two of one element are compared bit for bit, whatever their strides are."""
    base = torch.arange(100.0).view(10, 10)
    part = base.as_strided(shape, (22, 7)[: len(shape)], 5)
    assert as_bytes(part).numpy().tobytes() == part.numpy().tobytes()
    assert is_same(part, part.clone())
    assert not part.numel() or not is_same(part, part + 1)
    assert not is_same(part, object())
