"""How many modules of the product a save, an export and a load enter: on a disk, in a bucket, and to Hugging Face.

Whoever follows a tensor reads these modules. The limits are what the ways need now; a longer way needs a reason.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests import memory_store  # noqa: F401 - its scheme is ram://
from tests.forked import answer
from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    ExportConfig,
    KeyMap,
    KeyRule,
    SaveConfig,
    StateDictTransforms,
)

_ROUNDS = 3
_MODULES = {
    "disk": {"save": 34, "export": 30, "load": 52, "hf export": 41},
    "bucket": {"save": 35, "export": 31, "load": 55, "hf export": 41},
}


def entered(*calls: Callable[[], object]) -> int:
    """Return how many modules of the product have a function that these calls enter, in any thread."""
    seen = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_globals.get("__name__", ""))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        for call in calls:
            call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len([name for name in seen if name.startswith(("titan_ckpt.", "converters."))])


def ways(base: Path, root: str, container: Literal["dcp", "hf"]) -> dict[str, list[int]]:
    """Return the counts of each round, of a run under `root`."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    exports = (ExportConfig(container, folder=f"{root}/exports", interval=1),)
    config = CheckpointConfig(folder=f"{root}/checkpoints", save=SaveConfig(interval=1), export=exports)
    table = KeyMap((KeyRule.of("weight", "model.w"), KeyRule.of("bias", "model.b")))
    transforms = (
        StateDictTransforms(table, {"model_type": "mine", "architectures": ["Mine"]}) if container == "hf" else None
    )

    def manager() -> CheckpointManager:
        return CheckpointManager(
            config, model_parts=[model], optimizers=[optimizer], sd_transforms=transforms, base_folder=base
        )

    found: dict[str, list[int]] = {"save": [], "export": [], "load": []}
    with manager() as run:
        run.load()
        run.save(1, export=False)
        run.wait()
        for step in range(2, 2 + _ROUNDS):
            found["save"].append(entered(partial(run.save, step, export=False), run.wait))
            found["export"].append(entered(partial(run.export, step), run.wait))
    for _ in range(_ROUNDS):
        with manager() as run:
            found["load"].append(entered(run.load))
    return found


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_tensor_passes_few_modules(place: str, tmp_path: Path) -> None:
    root = "run" if place == "disk" else f"ram://ways/{tmp_path.name}"

    def counts() -> dict[str, list[int]]:
        exports = ways(tmp_path, f"{root}-hf", "hf")["export"]
        return {**ways(tmp_path, root, "dcp"), "hf export": exports}

    found, code = answer(counts)
    assert code == 0
    assert {way: {*of_rounds} for way, of_rounds in found.items()} == {way: {n} for way, n in _MODULES[place].items()}
