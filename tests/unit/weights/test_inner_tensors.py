"""Weights that torchao has quantized, frozen in a model that is trained: saved by the tensors inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

from tests import world
from tests.zoo.optimizer_runs import comparable
from titan_ckpt import ExportConfig
from titan_ckpt.errors import CheckpointError, LoadMismatchError

CONFIGS = {"int8": Int8WeightOnlyConfig, "intx": IntxWeightOnlyConfig, "float8": Float8WeightOnlyConfig}


class Model(nn.Module):
    """A frozen quantized matrix, and one that is trained."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.base.requires_grad_(False)
        quantize_(self.base, CONFIGS[kind]())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.base(x))
        return out


class Run:
    def __init__(self, folder: Path, kind: str, seed: int, **settings: Any) -> None:
        self.model = Model(kind, seed)
        self.optimizer = torch.optim.AdamW(self.model.head.parameters(), lr=0.1)
        self.manager = world.manager(folder, self.model, self.optimizer, async_mode="disabled", **settings)

    def step(self) -> None:
        world.step_on(self.model, self.optimizer, torch.ones(2, 16))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_frozen_quantized_weight_comes_back(kind: str, tmp_path: Path) -> None:
    """Quantized values, scales and zero points are the same bits, and so are the next outputs."""
    first, second = Run(tmp_path, kind, 0), Run(tmp_path, kind, 1)
    with first.manager as manager:
        manager.load()
        first.step()
        manager.save(1)
    assert world.load(second.manager).step == 1
    assert comparable(dict(first.model.state_dict())) == comparable(dict(second.model.state_dict()))
    for run in (first, second):
        run.step()
    x = torch.ones(2, 16)
    assert torch.equal(first.model(x), second.model(x))


def test_a_weight_of_another_class_is_not_filled(tmp_path: Path) -> None:
    """int8 values are not loaded into a weight that reads them in another way: named, nothing is changed."""
    world.save(Run(tmp_path, "int8", 0).manager)
    other = Run(tmp_path, "intx", 1)
    before = comparable(dict(other.model.state_dict()))
    world.load_fails(other.manager, LoadMismatchError, r"base\.weight\.Int8Tensor\.qdata")
    assert comparable(dict(other.model.state_dict())) == before


def test_an_export_of_quantized_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    """Other programs know no such tensors: one error before the first step."""
    with pytest.raises(CheckpointError, match=r"made of other tensors, such as base\.weight"):
        Run(tmp_path, "int8", 0, export=(ExportConfig(format="dcp", folder="out"),))
