"""Quantized exports from shards: two ranks write the folder that one process writes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.layouts import split_converted
from tests.world import assert_same_bytes, convert, llama, manager, part, save, shard
from titan_ckpt import ExportConfig
from titan_ckpt.errors import ExportError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.models.llama3 import Llama3Config
from titan_ckpt.testing import distributed
from titan_ckpt.weights.wrapper import ModelWrapper

# 384 rows are two ranks' 192, so that blocks of 128 cross from one to the other
SHAPE = Llama3Config(
    dim=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=384, vocab_size=97, max_seq_len=32
)
INT4: dict[str, Any] = {"kind": "qat", "scheme": "int4_weight_only", "embeddings": True}
INT8: dict[str, Any] = {"kind": "qat", "scheme": "int8_weight_only"}
LORA: dict[str, Any] = {"kind": "lora", "target_modules": ["wq", "wo", "w2"], "rank": 4}
SETS: dict[str, tuple[torch.dtype, list[dict[str, Any]]]] = {
    "int4": (torch.float32, [INT4]),
    "int8_lora": (torch.float32, [INT8, LORA]),
    "mxfp8": (torch.bfloat16, [{"kind": "qat", "scheme": "mxfp8"}]),
    "float8_dora": (torch.float32, [{"kind": "float8", "emulate": True}, {**LORA, "use_dora": True}]),
}
LAYOUTS = ("rows", "tensors", "single")
"""FSDP2, tensor parallelism, and both ranks with everything, as DDP has it."""
EXPORT = "exports/step-1-quantized"


class Run:
    """A converted model with values that depend on names alone, laid out in one of three ways, and its exports."""

    def __init__(self, name: str, layout: str, folder: Path) -> None:
        dtype, tables = SETS[name]
        self.model: Any = llama(SHAPE).to(dtype)
        self.converters = convert(self.model, *tables)
        if layout == "rows":
            shard(self.model)
        elif layout == "tensors":
            split_converted(self.model, init_device_mesh("cpu", (dist.get_world_size(),)))
        for fqn, value in ModelWrapper([self.model], self.converters).state_dict("full").items():
            if self.converters.key_filter(fqn):
                whole = torch.rand(value.shape, generator=torch.Generator().manual_seed(sum(fqn.encode()))) / 8
                for block in blocks_of(value):
                    block.data.copy_(part(whole, block.chunk))
        export = ExportConfig("hf_quantized", max_shard_bytes=30_000)
        self.manager = manager(folder, self.model, save=None, export=(export,), model_converters=self.converters)

    def export(self) -> None:
        save(self.manager, last_step=True)


@distributed(nproc=2)
def export_shards(folder: Path) -> None:
    for name in SETS:
        for layout in LAYOUTS:
            Run(name, layout, folder / name / layout).export()
        broken = Run(name, "rows", folder / name / "broken")
        for fqn, parameter in broken.model.named_parameters():
            if fqn.endswith("attention.wv.weight") and dist.get_rank() == 1:
                for block in blocks_of(parameter):
                    block.data.fill_(float("inf"))
        with pytest.raises(ExportError, match=r"v_proj\.weight holds NaN or infinite values"):
            broken.export()


def test_f1_two_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    """Rows cut between blocks, columns cut within groups, replicas: one folder. Where a rank fails there is none."""
    export_shards(tmp_path)
    for name in SETS:
        Run(name, "single", tmp_path / name).export()
        expected = tmp_path / name / EXPORT
        for layout in LAYOUTS:
            assert_same_bytes(expected, tmp_path / name / layout / EXPORT)
            made = [folder / "config.json" for folder in (expected, tmp_path / name / layout / EXPORT)]
            assert made[0].read_bytes() == made[1].read_bytes()
        assert not [*(tmp_path / name / "broken").glob("exports/step*")]
