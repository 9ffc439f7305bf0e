"""Steps for the tests of the command line tools. Ranks import this module, so it imports no library that they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    InitialLoadConfig,
    KeepConfig,
    SaveConfig,
    StateDictTransforms,
)
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.testing import distributed

SHAPE = Llama3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=96, max_seq_len=32
)
TOKENS = torch.arange(24).reshape(2, 12)
LORA: dict[str, Any] = {"kind": "lora", "target_modules": ["wq", "w2"], "rank": 4, "alpha": 8.0}


def save_step(base: Path, run: Path, *, sharded: bool = False, converters: Any = None, cast: bool = False) -> Llama3:
    """Load the base, take a step that changes no weight but the adapters', and save it as step 1 of a run."""
    model = Llama3(SHAPE)
    if converters is not None:
        converters.convert(model)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.layers.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0 if converters is None else 0.1, weight_decay=0.0)
    config = CheckpointConfig(
        save=SaveConfig(interval=1, async_mode="disabled", keep=KeepConfig(latest=3)),
        initial_load=(InitialLoadConfig(str(base), cast=cast),),
    )
    with CheckpointManager(
        config,
        model_parts=[model],
        optimizers=[optimizer],
        sd_transforms=StateDictTransforms(model.key_map(), model.hf_config()),
        model_converters=converters,
        base_folder=run,
    ) as manager:
        manager.load()
        model(TOKENS).sum().backward()
        optimizer.step()
        manager.save(1, metrics={"loss": 2.5})
    return model


@distributed(nproc=2)
def save_sharded(root: Path) -> None:
    """Two ranks: our step, plain dcp.save, and torchtitan's layout, in which the model is at the top."""
    model = save_step(root / "hf", root / "run2", sharded=True)
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=str(root / "dcp"))
    moments = {f"optimizer.state.{name}.exp_avg": torch.zeros(3) for name in ("tok_embeddings.weight", "norm.weight")}
    others: dict[str, Any] = {"lr_scheduler": {"last_epoch": 1}, "train_state": {"step": torch.tensor(1)}}
    dcp.save({**state, **moments, **others}, checkpoint_id=str(root / "titan" / "step-1"))
