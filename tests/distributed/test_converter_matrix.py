"""The laws of converters for every converter and pair, on every model, single, on FSDP2's shards and under TP.

One launch runs them all: what the ordinary classes (tests/unit/converters/test_laws.py) have is not repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.converter_sets import LORA, SETS
from tests.distributed.layouts import split_converted
from tests.faults.scenarios import SOAK
from titan_ckpt.converters import ModelConvertersContainer, from_tables
from titan_ckpt.models import llama3, qwen3, qwen3_moe
from titan_ckpt.testing import ConverterTests, distributed

ENDS: dict[str, Any] = {**LORA, "target_modules": [*LORA["target_modules"], "output"]}
CUT: list[list[dict[str, Any]]] = [[{**ENDS, "use_dora": True}], [{**ENDS, "target_modules": ["tok_embeddings", "wo"]}]]
"""Sets of which tensor parallelism cuts more: lengths of rows, the head, and a table of words."""
SMALL: dict[str, Any] = {
    "dim": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128, "vocab_size": 96,
}  # fmt: skip


def make(name: str) -> nn.Module:
    """Return a tiny model of an architecture."""
    if name == "llama3":
        return llama3.Llama3(replace(llama3.FLAVORS["debug-2m"], **SMALL))
    if name == "qwen3":
        return qwen3.Qwen3(replace(qwen3.FLAVORS["debug-2m"], **SMALL))
    sizes = {**SMALL, "num_experts": 3, "expert_dim": 32, "dense_layers": ()}
    return qwen3_moe.Qwen3Moe(replace(qwen3_moe.FLAVORS["debug-1m"], **sizes))


class _Matrix(ConverterTests):
    """The laws for one cell; not collected as a test class."""

    def __init__(self, model: str, tables: list[dict[str, Any]]) -> None:
        self.model = model
        self.tables = tables

    def make_converter(self) -> ModelConvertersContainer:
        return from_tables(self.tables)

    def make_model(self) -> nn.Module:
        return make(self.model)


class _TensorParallel(_Matrix):
    def shard(self, model: nn.Module) -> None:
        split_converted(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def check(base: type[_Matrix], model: str, tables: list[dict[str, Any]]) -> None:
    try:
        base(model, tables).check_laws()
    except Exception as error:
        error.add_note(f"on {model} ({base.__name__})")
        raise


@distributed(nproc=2, timeout_seconds=240)
def check_on_shards(model: str) -> None:
    for tables in SETS.values():
        for base in (_Matrix, _TensorParallel):
            check(base, model, tables)
    if model == "llama3":
        for tables in CUT:
            check(_TensorParallel, model, tables)


@pytest.mark.parametrize("model", ["llama3", "qwen3", "qwen3_moe"])
def test_a8_laws_hold_for_every_set(model: str) -> None:
    """Five sets, whole, on FSDP2's shards of two ranks, and cut by tensor parallelism over two.

    A layer of Qwen3, which a soak cuts, too, is the attention of the mixture of experts and the feed-forward of Llama
    3; so a mixture of experts has no dense layer here.
    """
    for tables in SETS.values():
        check(_Matrix, model, tables)
    if model != "qwen3" or SOAK:
        check_on_shards(model)
