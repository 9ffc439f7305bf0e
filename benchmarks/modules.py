"""The modules that one tensor passes in a save, a load and a merged LoRA export: python -m benchmarks.modules.

A module counts if, between the call and its end and in any thread, one of its functions is given the tensor: as a value
on this tensor's memory, under its name, or inside a container or dataclass (`self` does not count). Run it with
PYTHONPATH at another commit to compare the two.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    ExportConfig,
    InitialLoadConfig,
    KeyMap,
    KeyRule,
    SaveConfig,
    StateDictTransforms,
)
from titan_ckpt.converters import from_tables

NAME = "wq.weight"


def holds(value: Any, memory: int, name: str, depth: int = 4) -> bool:
    """Return whether a value is the tensor or its name, or a container of either."""
    if isinstance(value, torch.Tensor):
        return not value.is_meta and value.untyped_storage().data_ptr() == memory
    if isinstance(value, str):
        return value.endswith(name)
    if depth == 0 or isinstance(value, type | nn.Module):
        return False
    if isinstance(value, Mapping):
        return any(holds(part, memory, name, depth - 1) for item in value.items() for part in item)
    if isinstance(value, list | tuple | set | frozenset):
        return any(holds(part, memory, name, depth - 1) for part in value)
    if dataclasses.is_dataclass(value):
        parts = (getattr(value, field.name, None) for field in dataclasses.fields(value))
        return any(holds(part, memory, name, depth - 1) for part in parts)
    return False


@contextmanager
def passed(modules: set[str], tensor: torch.Tensor) -> Iterator[None]:
    """Collect the modules of this project whose functions are given the tensor."""
    memory = tensor.untyped_storage().data_ptr()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event != "call" or module in modules or not module.startswith("titan_ckpt."):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(n) for n in names if n not in ("self", "cls")]
        if any(holds(value, memory, NAME) for value in given):
            modules.add(module)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class OneMatrix(nn.Module):
    """A model of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(64, 64, bias=False)


def count(folder: Path) -> dict[str, set[str]]:
    """Return the modules of each way, the second time that it is gone: the first makes plans, leases and imports."""
    ways: dict[str, set[str]] = {"save": set(), "load": set(), "merged LoRA export": set()}
    save = SaveConfig(interval=1, async_mode="disabled")
    model = OneMatrix()
    with CheckpointManager(CheckpointConfig(save=save), model_parts=[model], base_folder=folder / "run") as manager:
        manager.save(1)
        manager.load()
        with passed(ways["save"], model.wq.weight):
            manager.save(2)
        with passed(ways["load"], model.wq.weight):
            manager.load(2)
    base = InitialLoadConfig(str(folder / "run" / "checkpoints" / "step-2"))
    config = CheckpointConfig(initial_load=(base,), export=(ExportConfig("hf"),))
    lora = from_tables([{"kind": "lora", "target_modules": ["wq"], "rank": 4, "alpha": 8.0}])
    adapted = OneMatrix()
    weight = adapted.wq.weight
    lora.convert(adapted)
    key_map = KeyMap((KeyRule.of("wq.weight", "model.q_proj.weight"),))
    names = StateDictTransforms(key_map, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    with CheckpointManager(
        config, model_parts=[adapted], sd_transforms=names, model_converters=lora, base_folder=folder / "adapted"
    ) as manager:
        manager.load()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.1)
        manager.export(1, last_step=True)
        with passed(ways["merged LoRA export"], weight):
            manager.export(2, last_step=True)
    return ways


def main() -> None:
    """Print the modules of each way, and their numbers as JSON on the last line."""
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        ways = count(Path(folder))
    for way, modules in ways.items():
        print(f"{way}: {len(modules)} modules")
        for module in sorted(modules):
            print(f"  {module}")
    print(json.dumps({way: len(modules) for way, modules in ways.items()}))


if __name__ == "__main__":
    main()
