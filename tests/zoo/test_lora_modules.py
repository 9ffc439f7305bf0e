"""Every linear and embedding class of the installed transformers under LoRA: trained as merged, or refused by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from torch import nn
from transformers import PretrainedConfig

from tests.zoo.model_runs import quiet
from tests.zoo.sample import chosen
from tests.zoo.worlds import Row, judged
from titan_ckpt.converters import LoRAConfig, build
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.weights.wrapper import ModelWrapper

FLOORS = {"": 28}
"""Classes that are exact at the least."""
ROOT = Path(transformers.models.__path__[0])
_CLASS = re.compile(r"^class (\w+)\((?:nn\.Linear|nn\.Embedding|Conv1D)\):", re.MULTILINE)
_SIZE = 8
"""Number of inputs, outputs, rows and columns."""


@functools.cache
def classes() -> list[str]:
    """Return "module:class" of each class of transformers' models that derives from a linear or embedding class."""
    return [
        f"transformers.models.{path.parent.name}.{path.stem}:{name}"
        for path in sorted(ROOT.glob("*/modeling_*.py"))
        for name in _CLASS.findall(path.read_text())
    ]


def made(name: str) -> nn.Module | None:
    """Return a small module of the class; None if nothing here can construct it."""
    module, _, kind = name.partition(":")
    cls = getattr(import_module(module), kind)
    for small in _arguments(inspect.signature(cls), cls):
        try:
            return cls(**small)  # type: ignore[no-any-return]
        except Exception:  # the sizes of some classes have to fit each other
            continue
    return None


def _arguments(signature: inspect.Signature, cls: type) -> Iterator[dict[str, Any]]:
    """Yield small values for the arguments that have no default, and for the factor by which a class scales."""
    wanted = [n for n, p in signature.parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    wanted += ["embed_scale"] if "embed_scale" in signature.parameters else []
    known = {"padding_idx": 1, "bias": True, "embed_scale": 3.0, "norm_eps": 1e-6, "n_groups": 2}
    for config in _configs(cls) if "config" in wanted else (None,):
        yield {name: config if name == "config" else known.get(name, _SIZE) for name in wanted}


def _configs(cls: type) -> Iterator[Any]:
    """Yield the configurations beside the class, with small sizes."""
    configuration: Any = import_module(cls.__module__.replace(".modeling_", ".configuration_"))
    for kind in vars(configuration).values():
        if inspect.isclass(kind) and issubclass(kind, PretrainedConfig) and kind.__module__ == configuration.__name__:
            try:
                sized: Any = kind
                yield sized(hidden_size=_SIZE, num_local_experts=_SIZE)
            except Exception:  # it has other sizes
                continue


def verdict(name: str) -> str:
    """Return "exact", "refused: why" or "cannot be constructed"; raise if it trains another model than it exports."""
    with quiet():
        torch.manual_seed(0)
        module = made(name)
        if module is None or getattr(module, "weight", None) is None:
            return "cannot be constructed"
        model = nn.ModuleDict({"m": module})
        converters = build([LoRAConfig(("m",), rank=2)])
        try:
            converters.convert(model)
        except ConverterError as error:
            return f"refused: {' '.join(str(error).split())}"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
            given = torch.randint(0, _SIZE, (2, 3)) if isinstance(module, nn.Embedding) else torch.randn(2, 3, _SIZE)
            trained = model["m"](given)
            (block,) = blocks_of(ModelWrapper([model], converters).state_dict("export")["m.weight"])
            exported = made(name)
            assert exported is not None
            exported.load_state_dict({**exported.state_dict(), **_base(model), "weight": block.data})
            torch.testing.assert_close(trained, exported(given), rtol=1e-4, atol=1e-4)
    return "exact"


def _base(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n[2:]: v for n, v in model.state_dict().items() if "lora_" not in n}


@pytest.mark.parametrize("name", chosen(classes(), 6))
def test_a_class_of_transformers_trains_what_it_exports(name: str) -> None:
    """An adapter on it gives the merged module's result, or its name is in an error."""
    if verdict(name) == "cannot be constructed":
        pytest.skip("its arguments are not known here")


def test_all_classes_are_found() -> None:
    """The scan sees the classes of many models, without importing one."""
    assert len(classes()) > 40


def rows() -> list[Row]:
    """Return the row of every class."""
    return judged(rows_of, classes())


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return the row of a class; none if nothing here can construct it."""
    try:
        found = verdict(name)
    except AssertionError as error:
        return [(_short(name), "different", " ".join(str(error).split())[:300])]
    judgement, _, note = found.partition(": ")
    return [] if found == "cannot be constructed" else [(_short(name), judgement, note[:300])]


def _short(name: str) -> str:
    return name.removeprefix("transformers.models.")
