"""Decoding of typed JSON: one function per tag, which checks its payload and runs no code from it.

`typed_json` owns the encoding and the limits; docs/format.md lists the tags.
"""

from __future__ import annotations

import datetime
import math
import pathlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from titan_ckpt.encoding.strict_json import (
    Json,
    as_int,
    as_list,
    as_shape,
    as_str,
    from_base64,
    require_few_equal_hashes,
)
from titan_ckpt.errors import CorruptCheckpointError

_NOT_PLAIN_DATA = re.compile(r"q.*|u?int[1-7]")

MAX_DEPTH = 64
NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,6}(\[\d{0,6}[a-zA-Z]{1,2}\])?")
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{
        kind.__name__: kind
        for kind in (bool, int, float, str, bytes, list, dict, set, tuple, Counter, OrderedDict, deque)
    },
}
"""Factories that a defaultdict may have, by name."""
TENSOR_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
    and name == str(value).removeprefix("torch.")
    and not _NOT_PLAIN_DATA.fullmatch(name)
}

_TORCH_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,6})?")


def decode(encoded: Json, source: str = "state") -> Any:
    """Return the value that was encoded; the lists and objects of `encoded` become its own.

    Raises: CorruptCheckpointError naming the place in `source`.
    """
    return _decode(encoded, source, 0)


def _decode(encoded: Json, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        _corrupt(path, f"nested deeper than {MAX_DEPTH}")
    if isinstance(encoded, list):
        return _items_of(encoded, path, depth)
    if not isinstance(encoded, dict):
        return encoded
    tag = next((key for key in encoded if key.startswith("$")), None)
    if tag is None:
        for key, item in encoded.items():
            encoded[key] = _decode(item, f"{path}.{key}", depth + 1)
        return encoded
    if len(encoded) != 1 or tag not in _DECODERS:
        _corrupt(path, f"unknown type {tag!r}")
    try:
        return _DECODERS[tag](encoded[tag], path, depth)
    except CorruptCheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, MemoryError) as error:
        _corrupt(path, f"not a valid {tag}: {type(error).__name__}: {error}")


def _corrupt(path: str, cause: str) -> NoReturn:
    raise CorruptCheckpointError(f"{path}: {cause}", path)


def _items_of(payload: Json, path: str, depth: int) -> list[Any]:
    items: list[Any] = as_list(payload)
    for index, item in enumerate(items):  # in place: a small file has many lists, and a second copy of each is large
        items[index] = _decode(item, f"{path}[{index}]", depth + 1)
    return items


def _pairs_of(payload: Json, path: str, depth: int) -> list[tuple[Any, Any]]:
    pairs = [as_list(pair, 2) for pair in as_list(payload)]
    decoded = [(_decode(k, f"{path}.key", depth + 1), _decode(v, f"{path}[{k!r:.80}]", depth + 1)) for k, v in pairs]
    require_few_equal_hashes(key for key, _ in decoded)
    if len(dict(decoded)) != len(decoded):
        raise ValueError("a key is there twice")
    return decoded


def _set_of(kind: type, payload: Json, path: str, depth: int) -> Any:
    items = _items_of(payload, path, depth)
    require_few_equal_hashes(items)
    made = kind(items)
    if len(made) != len(items):
        raise ValueError("an element is there twice")
    return made


def _defaultdict_of(payload: Json, path: str, depth: int) -> Any:
    name, pairs = as_list(payload, 2)
    return defaultdict(FACTORIES[as_str(name)], _pairs_of(pairs, path, depth))


def _deque_of(payload: Json, path: str, depth: int) -> Any:
    maxlen, items = as_list(payload, 2)
    decoded = _items_of(items, path, depth)
    if maxlen is not None and len(decoded) > as_int(maxlen):
        raise ValueError("longer than its maxlen")
    return deque(decoded, None if maxlen is None else as_int(maxlen))


def _tensor_of(payload: Json, path: str, depth: int) -> torch.Tensor:
    name, shape, data, *order = as_list(payload)
    dtype = TENSOR_DTYPES[as_str(name)]
    sizes = as_shape(shape)
    axes, back = _axes_of(order, sizes)
    raw = bytearray(from_base64(data))
    if len(raw) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for shape {sizes} of {dtype}")
    if not raw:
        return torch.empty(sizes, dtype=dtype)
    made = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(sizes)
    return made.permute(axes).contiguous().permute(back)


def _axes_of(order: list[Json], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the axes in the order that they have in memory, by the last item of a payload, and the way back."""
    own = [*range(len(sizes))]
    axes = own if not order else [as_int(axis) for axis in as_list(order[0], len(sizes))]
    if len(order) > 1 or sorted(axes) != own:
        raise ValueError(f"{order!r:.80} is no order of {len(sizes)} axes")
    return axes, [axes.index(axis) for axis in own]


def _numpy_dtype(name: Json) -> np.dtype[Any]:
    if not NUMPY_DTYPE.fullmatch(as_str(name)) or np.dtype(as_str(name)).str != name:
        raise ValueError(f"dtype {name!r:.80}")
    return np.dtype(as_str(name))


def _array_of(payload: Json, path: str, depth: int) -> Any:
    name, shape, data, *order = as_list(payload)
    dtype, sizes, raw = _numpy_dtype(name), as_shape(shape), from_base64(data)
    axes, back = _axes_of(order, sizes)
    if len(raw) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for shape {sizes} of {dtype}")
    if not raw:
        return np.empty(sizes, dtype)
    array = np.frombuffer(bytearray(raw), dtype).reshape(sizes)
    if dtype.kind == "U" and array.reshape(-1).view(f"{dtype.byteorder}u4").max() > sys.maxunicode:
        raise ValueError("not text")
    return array.transpose(axes).copy().transpose(back) if order else array


def _scalar_of(payload: Json, path: str, depth: int) -> Any:
    name, data = as_list(payload, 2)
    dtype, raw = _numpy_dtype(name), from_base64(data)
    if dtype.kind in "SU":
        raise ValueError(f"dtype {name!r:.80}")  # those are $numpy.str and $numpy.bytes
    (value,) = np.frombuffer(raw, dtype)
    return value


def _float_of(payload: Json, path: str, depth: int) -> float:
    if as_str(payload) not in ("nan", "inf", "-inf"):
        raise ValueError(f"{payload!r:.80} is no such number")
    return float(as_str(payload))  # a new object each time: as a key, NaN equals only the same object


def _time_of(kind: type[datetime.datetime | datetime.time], payload: Json) -> datetime.datetime | datetime.time:
    text, fold = as_list(payload, 2)
    return kind.fromisoformat(as_str(text)).replace(fold=as_int(fold))


def _dtype_of(payload: Json, path: str, depth: int) -> torch.dtype:
    value = vars(torch)[as_str(payload)]
    if not isinstance(value, torch.dtype):
        raise TypeError(f"torch.{payload} is no dtype")
    return value


def _device_of(payload: Json, path: str, depth: int) -> torch.device:
    if not _TORCH_DEVICE.fullmatch(as_str(payload)):
        raise ValueError(f"device {payload!r:.80}")
    return torch.device(as_str(payload))


def _big_int_of(payload: Json, path: str, depth: int) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", as_str(payload)):
        raise ValueError("not hexadecimal digits")
    return int(as_str(payload), 16)


_DECODERS: dict[str, Callable[[Json, str, int], Any]] = {
    "$str": lambda payload, path, depth: from_base64(payload).decode("utf-8", "surrogatepass"),
    "$int": _big_int_of,
    "$float": _float_of,
    "$complex": lambda payload, path, depth: complex(*(float(as_str(part)) for part in as_list(payload, 2))),
    "$bytes": lambda payload, path, depth: from_base64(payload),
    "$bytearray": lambda payload, path, depth: bytearray(from_base64(payload)),
    "$range": lambda payload, path, depth: range(*(as_int(part) for part in as_list(payload, 3))),
    "$tuple": lambda payload, path, depth: tuple(_items_of(payload, path, depth)),
    "$set": lambda payload, path, depth: _set_of(set, payload, path, depth),
    "$frozenset": lambda payload, path, depth: _set_of(frozenset, payload, path, depth),
    "$deque": _deque_of,
    "$dict": lambda payload, path, depth: dict(_pairs_of(payload, path, depth)),
    "$OrderedDict": lambda payload, path, depth: OrderedDict(_pairs_of(payload, path, depth)),
    "$Counter": lambda payload, path, depth: Counter(dict(_pairs_of(payload, path, depth))),
    "$defaultdict": _defaultdict_of,
    "$datetime": lambda payload, path, depth: _time_of(datetime.datetime, payload),
    "$date": lambda payload, path, depth: datetime.date.fromisoformat(as_str(payload)),
    "$time": lambda payload, path, depth: _time_of(datetime.time, payload),
    "$timedelta": lambda payload, path, depth: datetime.timedelta(*map(as_int, as_list(payload, 3))),
    "$path": lambda payload, path, depth: pathlib.Path(as_str(payload)),
    "$posixpath": lambda payload, path, depth: pathlib.PurePosixPath(as_str(payload)),
    "$numpy": _array_of,
    "$numpy.scalar": _scalar_of,
    "$numpy.str": lambda payload, path, depth: np.str_(as_str(_decode(payload, path, depth))),
    "$numpy.bytes": lambda payload, path, depth: np.bytes_(from_base64(payload)),
    "$tensor": _tensor_of,
    "$torch.dtype": _dtype_of,
    "$torch.device": _device_of,
    "$torch.Size": lambda payload, path, depth: torch.Size([as_int(size) for size in as_list(payload)]),
}
