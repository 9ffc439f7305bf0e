"""torchtitan's LoRA with our checkpointer: the same steps, adapter-only saves, and exports that lose no adapter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.torchtitan.runs import config, distributed, same, steps_in, train

LORA = "llama3_debugmodel_float8_emulate_lora"


@distributed(1)
def _probe(assets: Path, folder: Path) -> None:
    t = time.time()
    made = config(assets, folder / "base", steps=1, last_save_model_only=True, last_save_in_hf=True)
    train(made)
    print("base", time.time() - t); t = time.time()
    base: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_path": str(folder / "base/exports/step-1")}
    theirs = train(config(assets, folder / "theirs", LORA, titan=False, **base))
    print("theirs", time.time() - t); t = time.time()
    last: dict[str, Any] = {"last_save_model_only": True, "last_save_in_hf": True, "last_save_adapter": "both"}
    ours = train(config(assets, folder / "ours", LORA, async_mode="async", **base, **last))
    print("ours", time.time() - t); t = time.time()
    same(theirs, ours)
    print(steps_in(folder / "ours"))
    import os
    for f in sorted((folder / "ours").rglob("*")):
        print(f.relative_to(folder), f.stat().st_size)
    print((folder / "ours/exports/step-6-peft/adapter_config.json").read_text())
    print((folder / "ours/checkpoint/step-4/MANIFEST.json").read_text()[:3000])


def test_probe(assets: Path, tmp_path: Path) -> None:
    _probe(assets, tmp_path)
