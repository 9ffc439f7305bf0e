"""Strict JSON: bounded size, no duplicate keys, no literals that are not JSON; and typed access to parsed values.

Owns parsing of untrusted bytes. `parse` raises CorruptCheckpointError; the other functions raise ValueError or
TypeError. Knows neither the manifest nor typed values.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, NoReturn, TypeAlias

from titan_ckpt.errors import CorruptCheckpointError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_BYTES_BY_HAND = 16 * 2**20
"""Limit of files that people write."""
MAX_EQUAL_HASHES = 100
"""Python compares each key of a dict with all that have the same hash, and the hash of a number is known beforehand."""
MAX_SIZE = sys.hash_info.modulus - 1
"""Limit of a tensor's sizes and offsets. Larger numbers have the hash of a smaller one, and there may be many such."""
_MAX_DIMS = 64
_FLOAT = "__float__"
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""As transformers writes them to config.json (`configuration_utils.py`, _encode_special_floats)."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(data: bytes, max_bytes: int, source: str) -> Json:
    """Parse strict JSON: no duplicate keys, no NaN or overflowing literals, bounded size and nesting.

    Raises: CorruptCheckpointError.
    """
    if len(data) > max_bytes:
        raise CorruptCheckpointError(f"{source}: {len(data)} bytes, at most {max_bytes} are allowed", source)
    try:
        return loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source}: not the JSON that was written: {error}", source) from None


def loads(text: str) -> Json:
    """Parse strict JSON, as `parse` does, of any size. Raises: ValueError; RecursionError."""
    return _loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)


def loads_by_hand(data: bytes) -> Any:
    """Parse JSON that people write, in any Unicode encoding and with NaN; no key twice. Raises: ValueError."""
    if len(data) > MAX_BYTES_BY_HAND:
        raise ValueError(f"it has {len(data)} bytes, at most {MAX_BYTES_BY_HAND} are allowed")
    try:
        return _loads(data.decode(json.detect_encoding(data)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _loads(text: str, **options: Any) -> Json:
    parsed: Json = json.loads(text, object_pairs_hook=_object_without_duplicates, **options)
    if _SURROGATE.search(text) and not is_unicode(json.dumps(parsed, ensure_ascii=False)):
        raise ValueError("it has text with a lone surrogate, which is no character")
    return parsed


def require_few_equal_hashes(keys: Iterable[Hashable]) -> None:
    """Check keys before they are put into a dict or a set. Raises: ValueError if that would take quadratic time."""
    ((_, number),) = Counter(map(hash, keys)).most_common(1) or [(0, 0)]
    if number > MAX_EQUAL_HASHES:
        raise ValueError(f"{number} keys have the same hash, at most {MAX_EQUAL_HASHES} are allowed")


def is_unicode(text: str) -> bool:
    """Return whether a file can hold the text: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_list(value: Json, length: int | None = None) -> list[Json]:
    """Return the value if it is a list, of `length` if given. Raises: TypeError, as do all functions `as_*`."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise TypeError(f"expected a list{'' if length is None else f' of {length}'}, found {value!r:.80}")
    return value


def as_str(value: Json) -> str:
    """Return the value if it is text."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def as_int(value: Json) -> int:
    """Return the value if it is an integer and not a boolean."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, found {value!r:.80}")
    return value


def as_shape(value: Json) -> tuple[int, ...]:
    """Return the value as a tensor's shape. Raises: ValueError if no tensor can have it."""
    sizes = tuple(as_int(size) for size in as_list(value))
    if len(sizes) > _MAX_DIMS or any(not 0 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(f"shape {sizes!r:.80}")
    return sizes


def to_base64(data: bytes | bytearray) -> str:
    """Return padded base64 in the standard alphabet."""
    return base64.b64encode(data).decode("ascii")


def from_base64(value: Json) -> bytes:
    """Return the decoded bytes. Raises: ValueError on anything but padded base64."""
    try:
        return base64.b64decode(as_str(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def to_text(value: Json) -> str:
    """Return compact JSON text. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _object_without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"a key is there twice: {twice!r:.200}")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is out of range")
    return value


def decode_floats(value: Any) -> Any:
    """Return parsed JSON with every `{"__float__": "Infinity"}` as the float."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and isinstance(value[_FLOAT], str) and value[_FLOAT] in _FLOATS:
            return _FLOATS[value[_FLOAT]]
        return {key: decode_floats(item) for key, item in value.items()}
    return [decode_floats(item) for item in value] if isinstance(value, list) else value


def encode_floats(value: Any) -> Any:
    """Return a value for JSON with every float that JSON lacks as an object; the inverse of `decode_floats`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: next(name for name, number in _FLOATS.items() if repr(number) == repr(value))}
    if isinstance(value, dict):
        return {key: encode_floats(item) for key, item in value.items()}
    return [encode_floats(item) for item in value] if isinstance(value, (list, tuple)) else value
