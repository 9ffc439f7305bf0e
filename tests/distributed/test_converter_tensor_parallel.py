"""The laws of converters under tensor parallelism: weights cut by rows and by columns, adapters with them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from converters import ModelConverters, from_tables
from converters.parallel import converted_plan
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.testing import ConverterTests

_TINY = Llama3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=96, max_seq_len=32
)
_ALL = {"kind": "lora", "rank": 4, "target_modules": ["wq", "wk", "wv", "wo", "w1", "w2", "w3", "output"]}


class _TensorParallelTests(ConverterTests):
    tables: ClassVar[list[dict[str, Any]]]

    def make_converter(self) -> ModelConverters:
        return from_tables(self.tables)

    def make_model(self) -> nn.Module:
        return Llama3(_TINY)

    def shard(self, model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ends: dict[str, ParallelStyle] = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
        block: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            **{name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")},
        }
        parallelize_module(model, mesh, converted_plan(ends))
        for layer in model.get_submodule("layers").children():
            parallelize_module(layer, mesh, converted_plan(block))


class TestDoRA(_TensorParallelTests):
    tables: ClassVar = [{**_ALL, "use_dora": True}]


class TestLoRAOnEmbeddings(_TensorParallelTests):
    tables: ClassVar = [{**_ALL, "target_modules": ["tok_embeddings", "wo"]}]
