"""A component is one class: a seventh one, of this file alone, is saved, loaded, exported and missed as the six are.

Beside the class it has a name in `config.Component`, and its place in `RunState.items`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import world
from titan_ckpt import CheckpointManager, ExportConfig
from titan_ckpt.components.items.item import Item, Stored
from titan_ckpt.config import Component
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.geometry.nested import give_tensors, names_of, take_tensors
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict


class Curriculum(Item):
    """What a run has seen of each topic: a tensor, and a number beside it."""

    component = "curriculum"

    def __init__(self, level: int = 0) -> None:
        self.seen, self.level = torch.full((3,), float(level)), level

    def value(self, tensors: StateDict) -> Any:
        return take_tensors({"seen": self.seen, "level": self.level}, self.key, tensors)

    def destinations(self, stored: Stored, available: Mapping[str, TensorInfo]) -> tuple[StateDict, list[str]]:
        names = names_of(stored.values[self.key])
        return {name: torch.empty(available[name].shape, dtype=available[name].dtype) for name in names}, []

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        content = give_tensors(stored.values[self.key], tensors)
        self.seen, self.level = content["seen"], content["level"]


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the component its name in the settings, which a manifest may have then."""
    monkeypatch.setattr("titan_ckpt.directory.manifest.Component", Literal[(*get_args(Component), "curriculum")])


def manager(folder: Path, item: Item | None = None, **settings: Any) -> CheckpointManager:
    made = world.manager(folder, nn.Linear(2, 2), **settings)
    made._run.items[:0] = [item] if item is not None else []
    return made


def test_a_seventh_component_is_saved_loaded_exported_and_missed(tmp_path: Path) -> None:
    """Its tensor is in the tensor file, its number in state.json; a step without it is refused by its name."""
    with manager(tmp_path, Curriculum(3), export=(ExportConfig("torchtitan"),)) as m:
        m.save(1, last_step=True)
        assert m._run.components() == ("model", "rng", "curriculum")
    item = Curriculum()
    world.load(manager(tmp_path, item))
    assert item.level == 3 and item.seen.tolist() == [3.0] * 3
    with DcpReader(next((tmp_path / "exports").glob("*"))) as reader:
        assert reader.item("curriculum.level") == 3 and "curriculum.seen" in reader.tensors
    world.save(manager(tmp_path / "without"))
    world.load_fails(manager(tmp_path / "without", Curriculum()), LoadMismatchError, "has no state for: curriculum. It")


def test_values_that_differ_between_ranks_are_each_ranks_own(tmp_path: Path) -> None:
    """Nobody's is lost, and each rank gets its own again."""
    _differ(tmp_path)


@distributed(nproc=2)
def _differ(folder: Path) -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_ckpt.directory.manifest.Component", Literal[(*get_args(Component), "curriculum")])
        world.save(manager(folder, Curriculum(rank + 1)))
        item = Curriculum()
        world.load(manager(folder, item))
    assert item.level == rank + 1 and item.seen.tolist() == [rank + 1.0] * 3
