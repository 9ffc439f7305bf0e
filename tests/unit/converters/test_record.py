"""Resuming with another set of converters: each difference is a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from titan_ckpt.converters import from_tables
from titan_ckpt.errors import ConverterError
from titan_ckpt.weights.identity import check_converters, differences

QAT = {"kind": "qat", "scheme": "int8_weight_only"}
LORA = {"kind": "lora", "target_modules": ["wq", "wv"], "rank": 4}


def described(*tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of converters as a manifest gives them back."""
    stored: list[dict[str, Any]] = json.loads(json.dumps(from_tables(list(tables)).describe()))
    return stored


def test_the_same_set_is_accepted() -> None:
    """Equal settings, through JSON, are no difference; neither is having no converters twice."""
    check_converters(described(QAT, LORA), from_tables([QAT, LORA]).describe(), 5)
    check_converters([], [], 5)


def test_f10_every_difference_is_listed() -> None:
    """Added, removed and changed converters are all in the one message, which says what to do."""
    saved = described(QAT, LORA)
    here = described({"kind": "float8", "emulate": True}, {**LORA, "rank": 8, "target_modules": ["wq"]})
    with pytest.raises(ConverterError) as caught:
        check_converters(saved, here, 7)
    for line in (
        "step 7 was saved with converters qat, lora, this run has float8, lora",
        "qat: only in the checkpoint",
        "float8: only in this run",
        "lora.target_modules: ['wq', 'wv'] in the checkpoint, ['wq'] in this run",
        "lora.rank: 4 in the checkpoint, 8 in this run",
        "Resume with the same [[converters]]",
    ):
        assert line in str(caught.value)
    assert "dropout" not in str(caught.value)


def test_order_and_unknown_settings_count() -> None:
    """The same converters the other way round differ, as does a setting that only one side knows."""
    one, other = {"kind": "a"}, {"kind": "b", "new": None}
    assert differences([one, other], [other, one]) == ["order: a, b in the checkpoint, b, a in this run"]
    assert differences([{"kind": "b"}], [other]) == ["b.new: nothing in the checkpoint, None in this run"]
