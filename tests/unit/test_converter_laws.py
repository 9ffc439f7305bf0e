"""The laws of converters for what each can be told; test_converter_matrix.py has all pairs on all models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from converters import LoRAConfig, LoRAConverter, ModelConverters, from_tables
from titan_ckpt.models import qwen3
from titan_ckpt.testing import ConverterTests

_LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "target_modules": ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]}
_FLOAT8 = {"kind": "float8", "emulate": True}
_INT4 = {"kind": "qat", "scheme": "int4_weight_only"}


class _TableTests(ConverterTests):
    tables: ClassVar[list[dict[str, Any]]]

    def make_converter(self) -> ModelConverters:
        return from_tables(self.tables)


class _Qwen3Tests(_TableTests):
    def make_model(self) -> nn.Module:
        shape = replace(qwen3.FLAVORS["debug-2m"], dim=64, num_layers=2, head_dim=16, ffn_dim=128)
        return qwen3.Qwen3(replace(shape, vocab_size=96, max_seq_len=32))


class TestLoRA(_TableTests):
    tables: ClassVar = [_LORA]


class TestDoRA(ConverterTests):
    """By itself: a container would keep laws that its converter breaks."""

    def make_converter(self) -> LoRAConverter:
        targets = tuple(_LORA["target_modules"])
        return LoRAConverter(LoRAConfig(targets, rank=4, use_dora=True, use_rslora=True, dropout=0.1))


class TestLoRAPatternsEmbeddingsAndTrainedModules(_TableTests):
    tables: ClassVar = [
        {
            "kind": "lora",
            "target_modules": ["layers.*.attention.w[qv]", "tok_embeddings"],
            "rank": 8,
            "rank_pattern": {"layers.0.*": 2},
            "alpha_pattern": {"wv": 4.0},
            "modules_to_save": ["norm", "output"],
        }
    ]


class TestQATInt4WithEmbeddings(_TableTests):
    tables: ClassVar = [{**_INT4, "embeddings": True, "group_size": 16}]


class TestQATInt8(_TableTests):
    tables: ClassVar = [{"kind": "qat", "scheme": "int8_weight_only"}]


class TestQAT8da4w(_TableTests):
    tables: ClassVar = [{"kind": "qat", "scheme": "int8_dynamic_act_int4_weight"}]


class TestQATMX(_TableTests):
    tables: ClassVar = [{"kind": "qat", "scheme": "mxfp8"}]


class TestFloat8Rowwise(_TableTests):
    tables: ClassVar = [{**_FLOAT8, "recipe": "rowwise"}]


class TestFloat8Gathered(_TableTests):
    tables: ClassVar = [{**_FLOAT8, "fsdp_all_gather": True}]


class TestQAT8da4wAndDoRA(_TableTests):
    tables: ClassVar = [{"kind": "qat", "scheme": "int8_dynamic_act_int4_weight"}, {**_LORA, "use_dora": True}]


class TestFloat8GatheredAndLoRA(_TableTests):
    tables: ClassVar = [{**_FLOAT8, "fsdp_all_gather": True}, _LORA]


class TestFloat8AndDoRAOnQwen3(_Qwen3Tests):
    tables: ClassVar = [_FLOAT8, {**_LORA, "use_dora": True}]
