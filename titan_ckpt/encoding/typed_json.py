"""Typed JSON: non-tensor state as JSON that decodes to exactly the same types and runs no code.

Owns the encoding (docs/format.md, "Typed JSON"): plain values stay plain JSON; every other type is an object with one
key, `{"$tuple": [...]}`. The set of types is closed. Any other type is an error that names its path, and so are
subclasses (enums, named tuples), because decoding them would import code that the file names.

Aliases are not kept: an object that is referenced twice decodes to two objects. Tensors are decoded on the CPU.
"""

from __future__ import annotations

import datetime
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from titan_ckpt.encoding.strict_json import Json, is_unicode, parse, require_few_equal_hashes, to_base64, to_text
from titan_ckpt.encoding.typed_json_reader import FACTORIES, MAX_DEPTH, NUMPY_DTYPE, TENSOR_DTYPES, decode
from titan_ckpt.errors import StateEncodingError, listed

__all__ = ["Json", "decode", "dumps", "encode", "loads"]

MAX_BYTES = 256 * 2**20
MAX_INLINE_BYTES = 16 * 2**20
"""Limit for one tensor, array, bytes object or integer; larger data belongs in a rank file as a tensor."""

_MAX_LISTED = 50
_MAX_KEY_TEXT = 200
_PLAIN_INT_BITS = 63
_PLATFORM_DTYPES = ("f16", "c32")
_NUMPY_SCALARS = frozenset(np.sctypeDict.values()) - {np.str_, np.bytes_}


def dumps(value: Any, path: str = "state") -> bytes:
    """Return UTF-8 JSON text with each top-level key on a line of its own.

    Raises: StateEncodingError listing the path of every value that cannot be encoded; `path` names the root.
    """
    encoded = encode(value, path)
    if isinstance(encoded, dict) and encoded:
        lines = ",\n".join(f"{to_text(key)}: {to_text(item)}" for key, item in encoded.items())
        text = f"{{\n{lines}\n}}\n"
    else:
        text = to_text(encoded) + "\n"
    data = text.encode()
    if len(data) > MAX_BYTES:
        raise StateEncodingError(f"{path}: {len(data)} bytes of JSON, at most {MAX_BYTES} are allowed", path)
    return data


def loads(data: bytes, source: str = "state") -> Any:
    """Decode bytes of `dumps`; `source` names the file. Raises: CorruptCheckpointError and nothing else."""
    return decode(parse(data, MAX_BYTES, source), source)


def encode(value: Any, path: str = "state") -> Json:
    """Return the value as plain JSON. Raises: StateEncodingError listing the path of every offender."""
    encoder = _Encoder()
    encoded = encoder.encode(value, path, 0)
    if encoder.problems:
        lines = listed(encoder.problems, "\n  ", "\n  ... ", _MAX_LISTED)
        raise StateEncodingError(
            f"{len(encoder.problems)} value(s) cannot be stored as typed JSON:\n  {lines}\n"
            "  Return plain values, tensors or arrays from state_dict().",
            encoder.paths[0],
        )
    return encoded


def problems_of(value: Any, path: str = "state") -> list[str]:
    """Return `path: cause` for everything in the value that cannot be encoded."""
    encoder = _Encoder()
    encoder.encode(value, path, 0)
    return encoder.problems


class _Encoder:
    """Encodes a value in one pass and continues after each offender, so that one error names them all."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.paths: list[str] = []
        self._open: set[int] = set()

    def encode(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is str:
            return value if is_unicode(value) else {"$str": to_base64(value.encode("utf-8", "surrogatepass"))}
        if kind is int:
            return self._int(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is np.str_:
            return {"$numpy.str": self.encode(str(value), path, depth)}
        if kind in _CONTAINERS:
            return self._container(value, path, depth)
        if kind is np.ndarray or kind in _NUMPY_SCALARS:
            return self._numpy(value, path)
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if kind in _ATOMS:
            return self._atom(value, path)
        return self._refuse(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _refuse(self, path: str, cause: str) -> Json:
        """Record an offender and return None in its place; `encode` then raises and discards the result."""
        self.paths.append(path)
        self.problems.append(f"{path}: {cause}")
        return None

    def _container(self, value: Any, path: str, depth: int) -> Json:
        if depth >= MAX_DEPTH or id(value) in self._open:
            return self._refuse(path, "contains itself" if depth < MAX_DEPTH else f"nested deeper than {MAX_DEPTH}")
        self._open.add(id(value))
        try:
            return self._open_container(value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _open_container(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            if all(type(key) is str and is_unicode(key) and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{path}.{key}", depth) for key, item in value.items()}
            return {"$dict": self._pairs(value, path, depth)}
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is torch.Size:
            return {"$torch.Size": self._items(value, path, depth)}
        if kind in (set, frozenset):
            self._check_hashes(value, path)
            return {f"${kind.__name__}": sorted(self._items(value, path, depth), key=to_text)}
        if kind is deque:
            return {"$deque": [value.maxlen, self._items(value, path, depth)]}
        if kind is defaultdict:
            name = next((name for name, factory in FACTORIES.items() if factory is value.default_factory), None)
            if name is None:
                return self._refuse(path, f"a defaultdict whose factory is {value.default_factory!r}")
            return {"$defaultdict": [name, self._pairs(value, path, depth)]}
        return {f"${kind.__name__}": self._pairs(value, path, depth)}

    def _items(self, values: Collection[Any], path: str, depth: int) -> list[Json]:
        if {*map(type, values)} == {int} and all(x.bit_length() <= _PLAIN_INT_BITS for x in (min(values), max(values))):
            return [*values]  # every save has the 625 numbers of Python's generator
        return [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: str, depth: int) -> list[Json]:
        self._check_hashes(values, path)
        return [
            [self.encode(key, f"{path}.key({name})", depth), self.encode(item, f"{path}[{name}]", depth)]
            for key, item in values.items()
            for name in [_shown(key)]
        ]

    def _check_hashes(self, keys: Iterable[Any], path: str) -> None:
        try:
            require_few_equal_hashes(keys)
        except ValueError as error:
            self._refuse(path, str(error))

    def _int(self, value: int, path: str) -> Json:
        bits = value.bit_length()
        if bits <= _PLAIN_INT_BITS:
            return value
        if bits > 8 * MAX_INLINE_BYTES:
            return self._refuse(path, f"an integer of {bits} bits")
        return {"$int": hex(value)}

    def _atom(self, value: Any, path: str) -> Json:
        kind = type(value)
        tag, to_json = _ATOMS[kind]
        if kind in (bytes, bytearray, np.bytes_) and len(value) > MAX_INLINE_BYTES:
            return self._refuse(path, f"{len(value)} bytes, at most {MAX_INLINE_BYTES} are kept in JSON")
        if kind in (datetime.datetime, datetime.time) and type(value.tzinfo) not in (type(None), datetime.timezone):
            return self._refuse(path, f"a {kind.__name__} with time zone {value.tzinfo!r}; use datetime.timezone")
        if isinstance(value, pathlib.PurePath) and not is_unicode(str(value)):
            return self._refuse(path, f"the path {value!r}, whose bytes are no UTF-8")
        if kind is range and any(abs(end).bit_length() > _PLAIN_INT_BITS for end in (value.start, value.stop)):
            return self._refuse(path, "a range beyond 64 bits")
        return {tag: to_json(value)}

    def _numpy(self, value: Any, path: str) -> Json:
        name = value.dtype.str
        scalar = type(value) in _NUMPY_SCALARS
        if not NUMPY_DTYPE.fullmatch(name) or name[1:] in _PLATFORM_DTYPES or not value.dtype.itemsize:
            return self._refuse(path, f"numpy data of dtype {value.dtype}")
        if value.nbytes > MAX_INLINE_BYTES:
            return self._refuse(path, f"an array of {value.nbytes} bytes, at most {MAX_INLINE_BYTES} are kept in JSON")
        data = to_base64(value.tobytes())
        if scalar:
            return {"$numpy.scalar": [name, data]}
        if value.size and any(stride <= 0 < size - 1 for stride, size in zip(value.strides, value.shape, strict=True)):
            return self._refuse(path, "an array that is a reversed or broadcast view; return a copy of it")
        order = None if value.flags.c_contiguous else _memory_order(value.shape, value.strides)
        return {"$numpy": [name, list(value.shape), data, *([] if order is None else [order])]}

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        name = str(value.dtype).removeprefix("torch.")
        num_bytes = value.numel() * value.element_size()
        if value.requires_grad or value.layout is not torch.strided or value.is_meta or name not in TENSOR_DTYPES:
            return self._refuse(
                path, f"a tensor that is not plain data ({value.dtype}, {value.device}, {value.layout})"
            )
        if num_bytes > MAX_INLINE_BYTES:
            return self._refuse(path, f"a tensor of {num_bytes} bytes, at most {MAX_INLINE_BYTES} are kept in JSON")
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        run = flat.as_strided((flat.numel(),), (1,))  # a slice of one element has any stride
        data = run.view(torch.uint8).numpy().tobytes()
        order = None if value.is_contiguous() else _memory_order(value.shape, value.stride())
        return {"$tensor": [name, list(value.shape), to_base64(data), *([] if order is None else [order])]}


_CONTAINERS = frozenset({list, dict, tuple, set, frozenset, torch.Size, deque, defaultdict, OrderedDict, Counter})

_ATOMS: dict[type, tuple[str, Callable[[Any], Json]]] = {
    bytes: ("$bytes", to_base64),
    np.bytes_: ("$numpy.bytes", to_base64),
    bytearray: ("$bytearray", to_base64),
    complex: ("$complex", lambda value: [repr(value.real), repr(value.imag)]),
    range: ("$range", lambda value: [value.start, value.stop, value.step]),
    datetime.datetime: ("$datetime", lambda value: [value.isoformat(), value.fold]),
    datetime.date: ("$date", lambda value: value.isoformat()),
    datetime.time: ("$time", lambda value: [value.isoformat(), value.fold]),
    datetime.timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    torch.dtype: ("$torch.dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$torch.device", str),
    type(pathlib.Path()): ("$path", str),
    pathlib.PurePosixPath: ("$posixpath", str),
}


def _memory_order(sizes: Sequence[int], strides: Sequence[int]) -> list[Json] | None:
    """Return the axes in the order of their strides, longest first; None if that is their own order."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    order = sorted(axes, key=lambda axis: -strides[axis])
    return None if order == axes else [*order, *(axis for axis, size in enumerate(sizes) if size <= 1)]


def _shown(key: Any) -> str:
    """Return a key as shown in paths, cut short, because it is repeated in the path of every value below it."""
    try:
        text = repr(key)
    except ValueError:  # an integer with more digits than Python converts to text
        return f"a {type(key).__name__}"
    return text if len(text) <= _MAX_KEY_TEXT else f"{text[:_MAX_KEY_TEXT]}..."
