"""The laws of converters for what each can be told; test_converter_matrix.py has all pairs on all models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from converters import LoRAConfig, LoRAConverter, from_tables
from tests.converter_sets import FLOAT8, LORA
from titan_ckpt.models import qwen3
from titan_ckpt.testing import ConverterTests, distributed
from titan_ckpt.testing.converters import Converter

DA4W: dict[str, Any] = {"kind": "qat", "scheme": "int8_dynamic_act_int4_weight"}
SETS: dict[str, list[dict[str, Any]]] = {
    "lora": [LORA],
    "patterns, embeddings and trained modules": [
        {
            "kind": "lora",
            "target_modules": ["layers.*.attention.w[qv]", "tok_embeddings"],
            "rank": 8,
            "rank_pattern": {"layers.0.*": 2},
            "alpha_pattern": {"wv": 4.0},
            "modules_to_save": ["norm", "output"],
        }
    ],
    "int4 and embeddings": [{"kind": "qat", "scheme": "int4_weight_only", "embeddings": True, "group_size": 16}],
    "int8": [{"kind": "qat", "scheme": "int8_weight_only"}],
    "8da4w": [DA4W],
    "mxfp8": [{"kind": "qat", "scheme": "mxfp8"}],
    "float8 rowwise": [{**FLOAT8, "recipe": "rowwise"}],
    "float8 gathered": [{**FLOAT8, "fsdp_all_gather": True}],
    "8da4w and dora": [DA4W, {**LORA, "use_dora": True}],
    "float8 gathered and lora": [{**FLOAT8, "fsdp_all_gather": True}, LORA],
}


class Laws(ConverterTests):
    """The laws for one set; not collected."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self.tables = tables

    def make_converter(self) -> Converter:
        return from_tables(self.tables)


class LawsByItself(ConverterTests):
    """For one converter without a container, which would keep laws that its converter breaks."""

    def make_converter(self) -> Converter:
        targets = tuple(LORA["target_modules"])
        return LoRAConverter(LoRAConfig(targets, rank=4, use_dora=True, use_rslora=True, dropout=0.1))


class LawsOnQwen3(Laws):
    def make_model(self) -> nn.Module:
        shape = replace(qwen3.FLAVORS["debug-2m"], dim=64, num_layers=2, head_dim=16, ffn_dim=128)
        return qwen3.Qwen3(replace(shape, vocab_size=96, max_seq_len=32))


CASES: dict[str, ConverterTests] = {
    **{name: Laws(tables) for name, tables in SETS.items()},
    "dora by itself": LawsByItself(),
    "float8 and dora on qwen3": LawsOnQwen3([FLOAT8, {**LORA, "use_dora": True}]),
}


@pytest.mark.parametrize("name", CASES)
def test_laws_hold(name: str) -> None:
    """Every law, in one process; the note of an error names which."""
    CASES[name].check_laws()


@distributed(nproc=2)
def test_laws_hold_on_shards() -> None:
    """Every law, on FSDP2's shards of two ranks; one launch for all sets."""
    for name, case in CASES.items():
        try:
            case.check_laws()
        except Exception as error:
            error.add_note(name)
            raise
