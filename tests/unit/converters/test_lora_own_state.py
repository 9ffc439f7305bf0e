"""LoRA on weights that the model's own state_dict stores in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import world
from tests.own_state_models import DIM, FusedHeads
from titan_ckpt import CheckpointManager, ExportConfig
from titan_ckpt.converters.container import ModelConvertersContainer
from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.converters.lora.converter import LoRAConverter
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.keymap import Chain, KeyMap, KeyRule, PermuteRows, Split
from titan_ckpt.testing import distributed
from titan_ckpt.weights.transforms import StateDictTransforms

SCALING = 8.0


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(FusedHeads(), nn.Linear(DIM, DIM))


def adapted(seed: int, shard: bool) -> tuple[nn.Module, ModelConvertersContainer]:
    model = plain(seed)
    converters = ModelConvertersContainer(
        [LoRAConverter(LoRAConfig(rank=2, alpha=2 * SCALING, target_modules=("*wqkv",)))]
    )
    converters.convert(model)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, converters


def adapter_saves_and_merged_exports(folder: Path, *, shard: bool) -> None:
    base = plain(0)
    world.finish(world.manager(folder / "base", base, export=(ExportConfig("dcp"),)))
    settings: Any = {"export": (ExportConfig("dcp"),), "initial_load": [folder / "base/exports/step-1"]}
    model, converters = adapted(1, shard)
    with world.manager(folder / "run", model, model_converters=converters, **settings) as m, torch.no_grad():
        m.load()
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.add_(0.5)
        before = world.weights_and_moments(model)
        m.save(1)
        m.save(2, last_step=True)
        assert all(torch.equal(value, before[name]) for name, value in world.weights_and_moments(model).items())
    other, converters = adapted(2, shard)
    assert world.load(world.manager(folder / "run", other, model_converters=converters, **settings)).step == 2
    assert all(torch.equal(value, before[name]) for name, value in world.weights_and_moments(other).items())
    merged: Any = plain(3)
    world.load(world.manager(folder / "merged", merged, initial_load=[folder / "run/exports/step-2"]))
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


def names() -> KeyMap:
    """Return a table that stores q, k and v apart, and that knows how their rows lie in the fused weight."""
    heads = FusedHeads()
    heads.wqkv.weight = nn.Parameter(torch.arange(16.0)[:, None].expand(16, DIM).clone())
    parts = [heads.state_dict()[f"{name}.weight"][:, 0].int().tolist() for name in ("wq", "wk", "wv")]
    fused = Chain(PermuteRows(tuple(row for part in parts for row in part)), Split(tuple(map(len, parts))))
    files = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    return KeyMap((KeyRule.of("0.wqkv.weight", files, fused),), identity=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here
def test_peft_has_an_adapter_for_each_part_of_a_fused_weight(tmp_path: Path) -> None:
    """Each part has the whole A and its own rows of B; a run reads that back, and refuses parts whose A differ."""
    table = StateDictTransforms(names())
    base = tmp_path / "base"
    dcp.save(plain(0).state_dict(), checkpoint_id=base)

    def manager(model: nn.Module, converters: ModelConvertersContainer, folder: str, *more: Path) -> CheckpointManager:
        return world.manager(
            tmp_path / folder,
            model,
            interval=9,
            export=(ExportConfig("peft"),),
            initial_load=[base, *more],
            model_converters=converters,
            sd_transforms=table,
        )

    model, converters = adapted(1, shard=False)
    with manager(model, converters, "run") as m, torch.no_grad():
        m.load()
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_()
        trained = world.weights_and_moments(model)
        m.save(1, last_step=True)
    peft = tmp_path / "run/exports/step-1-peft"
    stored = load_file(peft / "adapter_model.safetensors")
    delta = (trained["0.wqkv.lora_b.weight"] @ trained["0.wqkv.lora_a.weight"]).reshape(2, 4, 2, DIM)
    for name, rows in (("q_proj", delta[:, :2]), ("k_proj", delta[:, 2]), ("v_proj", delta[:, 3])):
        a, b = (stored[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        torch.testing.assert_close(b @ a, rows.reshape(-1, DIM))
    other, converters = adapted(2, shard=False)
    world.load(manager(other, converters, "again", peft))
    assert all(torch.equal(value, trained[name]) for name, value in world.weights_and_moments(other).items())
    stored["base_model.model.v_proj.lora_A.weight"] += 1
    save_file(stored, peft / "adapter_model.safetensors", {"format": "pt"})
    with manager(other, converters, "refused", peft) as m, pytest.raises(LoadMismatchError) as error:
        m.load()
    assert "one A for weights that it fuses, and these differ: base_model.model.v_proj.lora_A" in str(error.value)
