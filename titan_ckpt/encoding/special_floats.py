"""Infinities and NaN in config.json, which JSON does not have, as transformers writes them.

Source: transformers, `configuration_utils.py`, _encode_special_floats and _decode_special_floats.
"""

from __future__ import annotations

import math
from typing import Any

_TAG = "__float__"
_VALUES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def decode(value: Any) -> Any:
    """Return parsed JSON with every `{"__float__": "Infinity"}` as the float."""
    if isinstance(value, dict):
        if value.keys() == {_TAG} and isinstance(value[_TAG], str) and value[_TAG] in _VALUES:
            return _VALUES[value[_TAG]]
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def encode(value: Any) -> Any:
    """Return a value for JSON with every float that JSON lacks as an object; the inverse of `decode`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: next(name for name, number in _VALUES.items() if repr(number) == repr(value))}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value
