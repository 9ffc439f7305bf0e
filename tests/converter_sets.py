"""The converters that tests train, combine and export: each by itself, and the pairs."""

from __future__ import annotations

from typing import Any

LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "target_modules": ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]}
INT4: dict[str, Any] = {"kind": "qat", "scheme": "int4_weight_only"}
FLOAT8: dict[str, Any] = {"kind": "float8", "emulate": True}
SETS: dict[str, list[dict[str, Any]]] = {
    "lora": [LORA],
    "qat": [INT4],
    "float8": [FLOAT8],
    "qat_lora": [INT4, LORA],
    "float8_lora": [FLOAT8, LORA],
}
