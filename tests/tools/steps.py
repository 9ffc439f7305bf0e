"""Steps for the tests of the command line tools, and a call of them.

Ranks import this module, so it imports no library that they lack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests import world
from tests.world import TINY as SHAPE
from tests.world import TOKENS, shard
from titan_ckpt import InitialLoadConfig, KeepConfig
from titan_ckpt.cli.main import main
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.testing import distributed

LORA: dict[str, Any] = {"kind": "lora", "target_modules": ["wq", "w2"], "rank": 4, "alpha": 8.0}


def save_step(base: Path, run: Path, *, converters: Any = None, cast: bool = False) -> Llama3:
    """Load the base, take a step that changes no weight but the adapters', and save it as step 1 of a run."""
    model = Llama3(SHAPE)
    if converters is not None:
        converters.convert(model)
    shard(model)
    optimizer = world.adamw(model, 0.0 if converters is None else 0.1, weight_decay=0.0)
    with world.manager(
        run,
        model,
        optimizer,
        async_mode="disabled",
        keep=KeepConfig(latest=3),
        initial_load=[InitialLoadConfig(str(base), cast=cast)],
        model_converters=converters,
    ) as manager:
        manager.load()
        model(TOKENS).sum().backward()
        optimizer.step()
        manager.save(1, metrics={"loss": 2.5})
    return model


@distributed(nproc=2)
def save_sharded(root: Path) -> None:
    """Two ranks: our step, plain dcp.save, and torchtitan's layout, in which the model is at the top."""
    model = save_step(root / "hf", root / "run2")
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=str(root / "dcp"))
    moments = {f"optimizer.state.{name}.exp_avg": torch.zeros(3) for name in ("tok_embeddings.weight", "norm.weight")}
    others: dict[str, Any] = {"lr_scheduler": {"last_epoch": 1}, "train_state": {"step": torch.tensor(1)}}
    dcp.save({**state, **moments, **others}, checkpoint_id=str(root / "titan" / "step-1"))


def call(*words: object) -> int:
    """Call titan-ckpt in this process; return its exit code."""
    return main([*map(str, words)])
