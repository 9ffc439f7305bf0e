"""A fourth kind of adapter is one file: this one. It trains, saves, resumes, merges and exports as LoRA does."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests import world
from titan_ckpt import ExportConfig, InitialLoadConfig, SaveConfig, converters
from titan_ckpt.cli.main import main
from titan_ckpt.converters import ModelConverter
from titan_ckpt.converters.targets import select
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import Chunk, Shape
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.types import StateDict
from titan_ckpt.weights.low_rank import StoredUpdates, WeightUpdate, merged

# the adapter: W * (1 + c r), by a column c and a row r; LoRA adds its product


@dataclass(frozen=True)
class OuterConfig:
    target_modules: tuple[str, ...]
    strength: float = 1.0
    kind: Literal["outer"] = "outer"


@dataclass(frozen=True, slots=True)
class Outer(WeightUpdate):
    """weight * (1 + strength * column * row)."""

    weight: str
    strength: float

    @property
    def tensors(self) -> tuple[str, ...]:
        return (f"{self.weight}_column", f"{self.weight}_row")

    def base_shape(self, shapes: Sequence[Shape], weight: Shape) -> Shape:
        return (shapes[0][0], shapes[1][1])

    def acts(self, values: Sequence[torch.Tensor]) -> bool:
        return all(bool(value.any()) for value in values)

    def factor(self, column: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return 1 + self.strength * column * row

    def merged(
        self,
        weight: torch.Tensor,
        chunk: Chunk,
        factors: Sequence[torch.Tensor],
        norms: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, columns = (slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        column, row = (value.float() for value in factors)
        return weight.reshape(chunk.sizes).float() * self.factor(column[rows], row[:, columns])


class OuterLinear(nn.Linear):
    update: Outer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        column, row = self.get_parameter("weight_column"), self.get_parameter("weight_row")
        return nn.functional.linear(input, self.weight * self.update.factor(column, row), self.bias)


class OuterConverter(ModelConverter):
    stage: ClassVar[Literal["adapt"]] = "adapt"
    config_class: ClassVar[type[Any]] = OuterConfig
    config: OuterConfig

    def __init__(self, config: OuterConfig) -> None:
        super().__init__(config)
        self.adapted: dict[str, Outer] = {}

    def convert(self, model: nn.Module) -> None:
        linear = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
        model.requires_grad_(False)
        for fqn in select(list(linear), self.config.target_modules, "linear module"):
            module: Any = linear[fqn]
            num_out, num_in = module.weight.shape
            module.__class__ = OuterLinear
            module.update = self.adapted[fqn] = Outer(f"{fqn}.weight", self.config.strength)
            module.weight_column = nn.Parameter(module.weight.new_zeros(num_out, 1))
            module.weight_row = nn.Parameter(module.weight.new_ones(1, num_in))

    def key_filter(self, fqn: str) -> bool:
        return any(fqn in update.tensors for update in self.adapted.values())

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        if not last_step:
            return dict(state_dict)
        changed = {update.weight: merged(update, state_dict) for update in self.adapted.values()}
        return {fqn: changed.get(fqn, v) for fqn, v in state_dict.items() if not self.key_filter(fqn)}

    @classmethod
    def updates(
        cls, description: Mapping[str, Any], tensors: Mapping[str, Any], modules: Mapping[str, nn.Module], table: Any
    ) -> StoredUpdates:
        weights = [name.removesuffix("_column") for name in tensors if name.endswith(".weight_column")]
        return StoredUpdates([Outer(weight, description["strength"]) for weight in weights], {})

    def initialize(self, model_parts: Sequence[nn.Module], fqns: Collection[str] | None = None) -> None:
        for name, parameter in (pair for part in model_parts for pair in part.named_parameters()):
            if self.key_filter(name) and (fqns is None or name in fqns):
                nn.init.constant_(parameter, float(name.endswith("_row")))


# its proof

TABLE = {"kind": "outer", "target_modules": ["wq", "w2"], "strength": 0.5}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that names the kind."""
    entry = EntryPoint("outer", f"{__name__}:OuterConverter", converters.GROUP)
    monkeypatch.setattr(converters, "entry_points", lambda group: [entry])


def _model(base: Path, converter: Any) -> Llama3:
    return world.llama(Llama3Config.from_hf(json.loads((base / "config.json").read_text())), 0, converter)


def _run(folder: Path, base: Path, steps: int, *, last: int, **settings: Any) -> Llama3:
    converter = converters.from_tables([TABLE])
    model = _model(base, converter)
    optimizer = world.adamw(model)
    settings = {"save": SaveConfig(interval=1), "model_converters": converter, **settings}
    with world.manager(folder, model, optimizer, initial_load=[base], **settings) as manager:
        for step in range(manager.load().step + 1, steps + 1):
            torch.manual_seed(step)
            ids = torch.randint(0, 96, (2, 8))
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            world.learn(optimizer, loss)
            manager.save(step, last_step=step == last)
    return model


def test_a_fourth_kind_of_adapter_is_one_file(tmp_path: Path, base: Path) -> None:
    """It resumes bit for bit from steps of its own tensors; a merge of a step gives the weights that it exports."""
    export = {"export": (ExportConfig("hf"),)}
    whole = _run(tmp_path / "whole", base, 3, last=3, **export)
    _run(tmp_path / "run", base, 2, last=3, **export)
    resumed = _run(tmp_path / "run", base, 3, last=3, **export)
    assert world.same(dict(resumed.state_dict()), dict(whole.state_dict()))
    step = tmp_path / "run/checkpoints/step-2"
    stored = [name for name in load_file(step / "rank-00000.safetensors") if name.startswith("model.")]
    assert stored and all(name.endswith(("_column", "_row")) for name in stored)

    (exported,) = (tmp_path / "run/exports").glob("*")
    adapter = tmp_path / "run/checkpoints/step-3"
    assert main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    wanted, made = (load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "merged"))
    assert world.same(made, wanted)

    plain = _model(base, None)
    sources = [base, InitialLoadConfig(str(adapter), load="merge")]
    world.load(world.manager(tmp_path / "plain", plain, world.adamw(plain), initial_load=sources))
    reloaded = _model(base, None)
    world.load(world.manager(tmp_path / "reloaded", reloaded, world.adamw(reloaded), initial_load=[exported]))
    assert world.same(dict(plain.state_dict()), dict(reloaded.state_dict()))


def test_a_kind_that_no_package_has_is_not_merged(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says what its tensors do, so nothing is loaded."""
    _run(tmp_path / "run", base, 1, last=1)
    monkeypatch.setattr(converters, "entry_points", lambda group: [])
    plain = _model(base, None)
    sources = [base, InitialLoadConfig(str(tmp_path / "run/checkpoints/step-1"), load="merge")]
    run = world.manager(tmp_path / "plain", plain, world.adamw(plain), initial_load=sources)
    world.load_fails(run, LoadMismatchError, "nothing says the scale of its tensors")
