"""Modules of torch.nn in a loop of one's own: trained, saved and resumed exactly, or refused by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from tests import world
from tests.zoo.optimizer_runs import comparable, difference
from tests.zoo.sample import chosen
from tests.zoo.worlds import Row, judged
from titan_ckpt.errors import CheckpointError

FLOORS = {"": 140}
"""Modules that are exact at the least."""
_ARGUMENTS: dict[str, Any] = {
    "in_features": 8, "out_features": 8, "in1_features": 8, "in2_features": 8, "in_channels": 4, "out_channels": 4,
    "kernel_size": 3, "num_features": 4, "num_channels": 4, "num_groups": 2, "normalized_shape": 8, "embed_dim": 8,
    "num_heads": 2, "d_model": 8, "nhead": 2, "input_size": 8, "hidden_size": 8, "num_embeddings": 10,
    "embedding_dim": 8, "n_classes": 10, "cutoffs": [4, 8], "num_layers": 2, "output_size": 2, "size": 3, "padding": 1,
    "dim": 1, "unflattened_size": (2, 2), "upscale_factor": 2, "downscale_factor": 2, "output_padding": 0,
    "lower": 0.1, "upper": 0.3, "min_val": -1.0, "max_val": 1.0, "threshold": 0.1, "value": 0.0, "groups": 2,
    "dim_feedforward": 16, "num_encoder_layers": 1, "num_decoder_layers": 1,
}  # fmt: skip
"""Arguments of constructors by name."""
_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "decoder_layer": lambda: nn.TransformerDecoderLayer(8, 2, 16),
}
_SHAPES = ((2, 8), (2, 4, 8), (2, 4, 8, 8), (2, 4, 8, 8, 8), (8,), (2, 8, 8))


@dataclass(frozen=True, slots=True)
class Case:
    """A module, and what it is called with."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]

    def __str__(self) -> str:
        return self.name


class Trained(nn.Module):
    """A module whose output, whatever it is, is scaled by a parameter; in a process group FSDP2 shards it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = case.build()
        self.scale = nn.Parameter(torch.ones(1) if dist.is_initialized() else torch.ones(()))
        self(*case.inputs())  # gives lazy modules their parameters
        if dist.is_initialized():
            fully_shard(self)

    def forward(self, *inputs: Any) -> torch.Tensor:
        loss = self.scale * 0
        for value in _tensors(self.inner(*inputs)):
            loss = loss + (value.to(torch.float32) * self.scale).square().mean()
        return loss


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _modules() -> list[type[nn.Module]]:
    """Return every module class of torch.nn that is no container and no base class."""
    kinds = (value for name, value in vars(nn).items() if name[0] != "_" and inspect.isclass(value))
    modules = [k for k in kinds if issubclass(k, nn.Module) and k is not nn.Module]
    return [k for k in modules if not k.__module__.endswith(("container", "data_parallel", "distributed"))]


def _builder(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    parameters = inspect.signature(kind).parameters.values()

    def build() -> nn.Module:
        plain = {p.name: _ARGUMENTS[p.name] for p in parameters if p.default is p.empty and p.name in _ARGUMENTS}
        return kind(**plain, **{p.name: _LAYERS[p.name]() for p in parameters if p.name in _LAYERS})

    return build


def _calls() -> Iterator[Callable[[], tuple[Any, ...]]]:
    """Yield inputs to try: floats of several shapes, one to three of them, and indices."""
    for shape, count in product(_SHAPES, (1, 2, 3)):
        yield lambda shape=shape, count=count: tuple(torch.randn(shape) for _ in range(count))  # type: ignore[misc]
    yield lambda: (torch.randint(0, 10, (2, 3)),)
    yield lambda: (torch.randn(2, 8), torch.randint(0, 8, (2,)))
    yield lambda: (torch.randn(2, 8), torch.randn(2, 8), torch.ones(2))
    yield lambda: (torch.randn(2, 8), torch.ones(2, 8), torch.rand(2, 8))
    yield lambda: (torch.randn(2, 8).log_softmax(-1), torch.randint(1, 8, (2, 2)), torch.tensor(2), torch.tensor(1))


def _case(name: str, build: Callable[[], nn.Module]) -> Case | None:
    """Return a case with the first inputs that the module takes; None if it takes none."""
    for inputs in _calls():
        torch.manual_seed(0)
        case = Case(name, build, inputs)
        try:
            Trained(case)(*inputs()).backward()
        except Exception:  # any error: these inputs are not for this module
            continue
        return case
    return None


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)  # type: ignore[no-any-return]


EXTRA: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(8, 8),
    "LSTM": lambda: nn.LSTM(8, 8, 2),
    "GRU": lambda: nn.GRU(8, 8),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "Upsample": lambda: nn.Upsample(scale_factor=2),
    "LPPool2d": lambda: nn.LPPool2d(2, 2),
    "parametrizations.weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "parametrizations.spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "parametrizations.orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "utils.weight_norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "utils.spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "utils.prune": _pruned,
    "AveragedModel": lambda: AveragedModel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), use_buffers=True),
    "LSTM in two directions with a projection": lambda: nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4),
    "Sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)),
    "ParameterList": lambda: Listed(),
}


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.named = nn.ParameterDict({"a": torch.ones(8)})

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.items[0] + self.items[1] * self.named["a"]


def builders() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each module, by name."""
    return {kind.__name__: _builder(kind) for kind in _modules()} | EXTRA


def judge(name: str, build: Callable[[], nn.Module], folder: Path) -> tuple[str, str]:
    """Return ("exact" | "refused" | "different", note); "unbuilt" for what simple arguments and inputs do not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = _case(name, build)
        if case is None:
            return "unbuilt", ""
        try:
            return _judge(case, folder)
        except CheckpointError as error:
            return "refused", str(error)


def _judge(case: Case, folder: Path) -> tuple[str, str]:
    first, second = (_start(case, seed) for seed in (0, 1))
    with world.manager(folder, *first, async_mode="disabled") as manager:
        manager.load()
        for number in (1, 2, 3):
            _step(case, *first, number)
        manager.save(3)
    assert world.load(world.manager(folder, *second, async_mode="disabled")).step == 3
    for number in (3, 4, 5):
        a, b = (comparable([dict(m.state_dict()), o.state_dict()]) for m, o in (first, second))
        if a != b:
            return "different", f"after step {number}: {difference(a, b)}"
        for run in (first, second):
            _step(case, *run, number + 1)
    return "exact", ""


def _start(case: Case, seed: int) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(seed)
    model = Trained(case)
    return model, world.adamw(model)


def _step(case: Case, model: nn.Module, optimizer: AdamW, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(*case.inputs()).backward()
    optimizer.step()


@pytest.mark.parametrize("name", chosen(sorted(builders()), 25, unbuilt=["MaxUnpool1d"]))
def test_a_module_resumes_exactly(name: str, tmp_path: Path) -> None:
    """Weights, buffers and moments go on with the bits of a run without a stop."""
    verdict, note = judge(name, builders()[name], tmp_path)
    if verdict == "unbuilt":
        pytest.skip("other arguments or inputs than simple ones")
    assert verdict == "exact", note


def rows() -> list[Row]:
    """Return the row of every module."""
    return judged(rows_of, list(builders()))


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return the row of a module; none if simple arguments and inputs do not run it."""
    verdict, note = judge(name, builders()[name], folder)
    return [] if verdict == "unbuilt" else [(f"torch.nn.{name}", verdict, note)]
