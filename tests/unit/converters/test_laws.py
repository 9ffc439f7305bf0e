"""The laws of converters for what each can be told; test_converter_matrix.py has all pairs on all models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.converter_sets import FLOAT8, LORA
from titan_ckpt.converters import LoRAConfig, LoRAConverter, from_tables
from titan_ckpt.models import qwen3
from titan_ckpt.testing import ConverterTests, distributed
from titan_ckpt.testing.converters import _TINY, LookalikeLlama, _close
from titan_ckpt.types import ModelConverter

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

    def make_converter(self) -> ModelConverter:
        return from_tables(self.tables)

    def make_model(self) -> nn.Module:
        """Return a model of two layers only where a setting names one of them."""
        return LookalikeLlama(replace(_TINY, num_layers=1 + ("layers." in str(self.tables))))


class LawsByItself(ConverterTests):
    """For one converter without a container, which would keep laws that its converter breaks."""

    def make_converter(self) -> ModelConverter:
        targets = tuple(LORA["target_modules"])
        return LoRAConverter(LoRAConfig(targets, rank=4, use_dora=True, use_rslora=True, dropout=0.1))


class LawsOnQwen3(Laws):
    def make_model(self) -> nn.Module:
        shape = replace(qwen3.FLAVORS["debug-2m"], dim=64, num_layers=1, head_dim=16, ffn_dim=128)
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


class Doubling(LoRAConverter):
    """Claims a key of the base, and doubles what it exports, in place."""

    def key_filter(self, fqn: str) -> bool:
        return super().key_filter(fqn) or fqn == "norm.weight"

    def state_dict_transform(self, state_dict: dict[str, Any], last_step: bool) -> dict[str, Any]:
        state_dict["norm.weight"].mul_(2)
        return super().state_dict_transform(state_dict, last_step)


class BrokenLaws(ConverterTests):
    """Not collected."""

    def make_converter(self) -> ModelConverter:
        return Doubling(LoRAConfig(("wq",), rank=4))


@pytest.mark.parametrize(
    ("law", "value"),
    [
        ("test_full_is_base_and_what_was_added", "base mode's keys.*:\n  norm.weight: expected .*, found none"),
        (
            "test_transforms_change_neither_their_input_nor_the_model",
            "live tensors that the transform changed:\n  too many: .'norm.weight'",
        ),
    ],
)
def test_a_broken_law_is_named_with_values(law: str, value: str) -> None:
    """The error says what differs; its note says the law in a sentence, and the converter."""
    with pytest.raises(AssertionError, match=value) as raised:
        getattr(BrokenLaws(), law)()
    (note,) = raised.value.__notes__
    assert note.startswith("law of lora: ")
    assert str(getattr(ConverterTests, law).__doc__) in note
    assert law in note


class Adrift(LoRAConverter):
    """Starts from other values whenever it is asked."""

    def initialize(self, model_parts: Any, fqns: Any = None) -> None:
        for part in model_parts:
            for name, parameter in part.named_parameters():
                if self.key_filter(name):
                    nn.init.normal_(parameter)


def test_a_value_that_differs_is_shown() -> None:
    """Tensors are named; outputs have the number of values that differ, and one of them."""

    class Laws(ConverterTests):
        def make_converter(self) -> ModelConverter:
            return Adrift(LoRAConfig(("wq",), rank=4))

    with pytest.raises(AssertionError, match=r"other values than without meta:\n  too many: .*lora_a"):
        Laws().test_conversion_on_meta_is_the_same()
    with pytest.raises(AssertionError, match=r"what: 1 of 3 values differ; expected 2, found 5 at 1"):
        _close("what", torch.tensor([1.0, 5.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
