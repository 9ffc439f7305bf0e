"""LoRA on weights that the model's own state_dict stores in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from converters.container import ModelConverters
from converters.lora.config import LoRAConfig
from converters.lora.converter import LoRAConverter
from tests.own_state_models import DIM, FusedHeads
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, InitialLoadConfig, SaveConfig
from titan_ckpt.testing import distributed

SCALING = 8.0


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(FusedHeads(), nn.Linear(DIM, DIM))


def adapted(seed: int, shard: bool) -> tuple[nn.Module, ModelConverters]:
    model = plain(seed)
    converters = ModelConverters([LoRAConverter(LoRAConfig(rank=2, alpha=2 * SCALING, target_modules=("*wqkv",)))])
    converters.convert(model)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, converters


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for name, v in named}


def adapter_saves_and_merged_exports(folder: Path, *, shard: bool) -> None:
    base = plain(0)
    export = CheckpointConfig(save=SaveConfig(interval=1), export=(ExportConfig("dcp"),))
    with CheckpointManager(export, model_parts=[base], base_folder=folder / "base") as m:
        m.load()
        m.save(1, last_step=True)
    source = (InitialLoadConfig(str(folder / "base/exports/step-1")),)
    config = CheckpointConfig(save=SaveConfig(interval=1), export=(ExportConfig("dcp"),), initial_load=source)

    def manager(model: nn.Module, converters: ModelConverters) -> CheckpointManager:
        return CheckpointManager(config, model_parts=[model], model_converters=converters, base_folder=folder / "run")

    model, converters = adapted(1, shard)
    with manager(model, converters) as m, torch.no_grad():
        m.load()
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.add_(0.5)
        before = whole(model)
        m.save(1)
        m.save(2, last_step=True)
        assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    other, converters = adapted(2, shard)
    with manager(other, converters) as m:
        assert m.load().step == 2
    assert all(torch.equal(value, before[name]) for name, value in whole(other).items())
    merged: Any = plain(3)
    config = CheckpointConfig(initial_load=(InitialLoadConfig(str(folder / "run/exports/step-2")),))
    with CheckpointManager(config, model_parts=[merged], base_folder=folder / "merged") as m:
        m.load()
    a, b = (before[f"0.wqkv.lora_{name}.weight"] for name in "ab")
    expected = before["0.wqkv.weight"] + SCALING * (b @ a)
    assert torch.equal(merged[0].wqkv.weight, expected)


def test_an_adapter_on_a_fused_weight_is_saved_alone_and_exported_merged(tmp_path: Path) -> None:
    """The export holds q, k and v as the model's own code splits the merged weight; the live weights stay."""
    adapter_saves_and_merged_exports(tmp_path, shard=False)


@distributed(nproc=2)
def test_the_same_when_sharded(tmp_path: Path) -> None:
    """The merged weight is sharded like the live one, and the hooks gather it."""
    adapter_saves_and_merged_exports(tmp_path, shard=True)
