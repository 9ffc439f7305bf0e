"""A reader of pickles that knows what DCP's metadata is made of, and nothing else: no import, no call, no attribute.

Owns the opcodes and the records that may occur. The file only chooses among them: it can make no other object, and
change none that it has not made. Checks the types of fields only where Python's own dicts would run into them.
Source: pickletools; torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_ckpt.encoding.strict_json import MAX_SIZE

_OF_INDEX = ((str,), (torch.Size, type(None)), (int, type(None)))
"""The types of a MetadataIndex's fields: fqn, offset and index."""
_MAX_DIMS = 64
MAX_PATH = 4096
"""Characters. A few bytes of a pickle copy a size or a path again and again, which is bounded by these two."""
_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS: dict[str, type[Any]] = {
    f"{_MODULE}.Metadata": Metadata,
    f"{_MODULE}.TensorStorageMetadata": TensorStorageMetadata,
    f"{_MODULE}.BytesStorageMetadata": BytesStorageMetadata,
    f"{_MODULE}.ChunkStorageMetadata": ChunkStorageMetadata,
    f"{_MODULE}.TensorProperties": TensorProperties,
    f"{_MODULE}.MetadataIndex": MetadataIndex,
    f"{_MODULE}.StorageMeta": StorageMeta,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
}
"""Classes whose instances are made empty and then filled, by the name that a file gives them."""
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FIELDS = {kind: frozenset(field.name for field in fields(kind)) for kind in _RECORDS.values()}


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in the file, in place of the class or function that pickle would look up."""

    text: str


class _Mark:
    """The place on the stack where the items of a tuple, list or dict begin."""


def unpickle(data: bytes) -> Any:
    """Return the object that a pickle of DCP's metadata describes.

    Raises: UnpicklingError naming the opcode, class or value that no such pickle has; ValueError for damaged bytes.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _STORES:  # the most frequent opcodes come first: a large folder has millions
            memo[len(memo) if argument is None else argument] = _top(stack)
        elif name in _FETCHES:
            if argument not in memo:
                raise UnpicklingError(f"it asks for number {argument}, which it has not stored")
            stack.append(memo[argument])
        elif name in _VALUES:
            make = _VALUES[name]
            stack.append(argument if make is None else make())
        elif name in _ON_STACK:
            _ON_STACK[name](stack)
        elif name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STOP":
            return _pop(stack)
        elif name not in ("PROTO", "FRAME"):
            raise UnpicklingError(f"it uses {name}, which no DCP metadata needs")
    raise UnpicklingError("it ends without STOP")


def _named(module: str, name: str) -> Any:
    """Return a dtype or layout of torch, or the name of something that `_call` or `_new` makes."""
    text = f"{module}.{name}"
    if module == "torch" and isinstance(value := vars(torch).get(name), (torch.dtype, torch.layout)):
        return value
    if text not in _RECORDS and text not in _CALLS:
        raise UnpicklingError(f"it names {text:.200}, which no DCP metadata needs")
    return _Name(text)


def _top(stack: list[Any]) -> Any:
    if not stack:
        raise UnpicklingError("it takes a value that it has not made")
    return stack[-1]


def _pop(stack: list[Any]) -> Any:
    value = _top(stack)
    del stack[-1]
    if isinstance(value, _Mark):
        raise UnpicklingError("it takes a mark for a value")
    return value


def _since_mark(stack: list[Any]) -> list[Any]:
    for i in range(len(stack) - 1, -1, -1):
        if isinstance(stack[i], _Mark):
            items = stack[i + 1 :]
            del stack[i:]
            return items
    raise UnpicklingError("it ends a list that it has not begun")


def _tuple(count: int) -> Callable[[list[Any]], None]:
    def make(stack: list[Any]) -> None:
        items = [_pop(stack) for _ in range(count)]
        stack.append(tuple(reversed(items)))

    return make


def _append(stack: list[Any], items: list[Any]) -> None:
    into = _top(stack)
    if type(into) is not list:
        raise UnpicklingError(f"it appends to a {_kind(into)}")
    into += items


def _set_items(stack: list[Any], items: list[Any]) -> None:
    into = _top(stack)
    if type(into) not in (dict, OrderedDict) or len(items) % 2:
        raise UnpicklingError(f"it sets items of a {_kind(into)}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not _is_key(key):
            raise UnpicklingError(f"it has a {_kind(key)} as the key of a dict")
        if key in into:
            raise UnpicklingError(f"it has a key twice: {key!r:.200}")
        into[key] = value


def _is_key(key: Any) -> bool:
    """Return whether this can be hashed and shown at once: a tuple of tuples of tuples may take for ever."""
    if type(key) is MetadataIndex:
        types = [type(vars(key).get(name)) for name in ("fqn", "offset", "index")]
        known = all(kind in allowed for kind, allowed in zip(types, _OF_INDEX, strict=True))
        return known and abs(vars(key).get("index") or 0) <= MAX_SIZE
    return type(key) is str or (type(key) is int and abs(key) <= MAX_SIZE)


def _new(stack: list[Any]) -> None:
    arguments, name = _pop(stack), _pop(stack)
    if not isinstance(name, _Name) or name.text not in _RECORDS or type(arguments) is not tuple or arguments:
        raise UnpicklingError(f"it makes a {_kind(name)} in a way that no DCP metadata does")
    stack.append(object.__new__(_RECORDS[name.text]))


def _build(stack: list[Any]) -> None:
    state, made = _pop(stack), _top(stack)
    known = _FIELDS.get(type(made))
    if known is None:
        raise UnpicklingError(f"it sets attributes of a {_kind(made)}")
    if vars(made):  # a key of a dict would have another hash
        raise UnpicklingError(f"it fills a {type(made).__name__} twice")
    if type(made) is TensorProperties and type(state) is tuple and len(state) == 5:
        made.__setstate__(state)
    elif type(state) is dict and known.issuperset(state):
        vars(made).update(state)
    else:
        unknown = sorted(map(str, set(state) - known)) if type(state) is dict else [f"a {_kind(state)}"]
        raise UnpicklingError(
            f"it gives a {type(made).__name__} {', '.join(unknown)[:200]}, which this version does not know"
        )


def _call(stack: list[Any]) -> None:
    arguments, name = _pop(stack), _pop(stack)
    make = _CALLS.get(name.text) if isinstance(name, _Name) else None
    value = make(*arguments) if make is not None and type(arguments) is tuple else None
    if value is None:
        raise UnpicklingError(f"it calls {_kind(name)} in a way that no DCP metadata does")
    stack.append(value)


def _size(*arguments: Any) -> torch.Size | None:
    numbers = arguments[0] if len(arguments) == 1 else None
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMS:
        return None
    return torch.Size(numbers) if all(type(n) is int and abs(n) <= MAX_SIZE for n in numbers) else None


def _layout(*arguments: Any) -> torch.layout | None:
    return _LAYOUTS.get(arguments[0]) if len(arguments) == 1 and type(arguments[0]) is str else None


def _memory_format(*arguments: Any) -> _MEM_FORMAT_ENCODING | None:
    known = {encoding.value: encoding for encoding in _MEM_FORMAT_ENCODING}
    return known.get(arguments[0]) if len(arguments) == 1 and type(arguments[0]) is int else None


def _path(*arguments: Any) -> PurePosixPath | None:
    texts = len(arguments) <= MAX_PATH and all(type(part) is str for part in arguments)
    return PurePosixPath(*arguments) if texts and sum(map(len, arguments)) <= MAX_PATH else None


def _ordered_dict(*arguments: Any) -> OrderedDict[Any, Any] | None:
    return None if arguments else OrderedDict()


def _kind(value: Any) -> str:
    return value.text if isinstance(value, _Name) else type(value).__name__


_CALLS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    f"{_MODULE}._MEM_FORMAT_ENCODING": _memory_format,
    "collections.OrderedDict": _ordered_dict,
    **{
        f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
    },
}
"""Functions and classes that a file calls. None of them is called here: each has a maker, which checks the arguments
and returns None for wrong ones."""
_STORES = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT"})
_FETCHES = frozenset({"BINGET", "LONG_BINGET"})
_VALUES: dict[str, Callable[[], Any] | None] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE")),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": _Mark,
}
"""Opcodes that push a value: their argument (None), or a new one."""
_ON_STACK: dict[str, Callable[[list[Any]], None]] = {
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "APPEND": lambda stack: _append(stack, [_pop(stack)]),
    "APPENDS": lambda stack: _append(stack, _since_mark(stack)),
    "SETITEM": lambda stack: _set_items(stack, [_pop(stack), _pop(stack)][::-1]),
    "SETITEMS": lambda stack: _set_items(stack, _since_mark(stack)),
    "STACK_GLOBAL": lambda stack: stack.append(_named_of(_pop(stack), _pop(stack))),
    "NEWOBJ": _new,
    "REDUCE": _call,
    "BUILD": _build,
}
"""Opcodes that take values from the stack and leave one."""


def _named_of(name: Any, module: Any) -> Any:
    if type(name) is not str or type(module) is not str:
        raise UnpicklingError("it names something by other than text")
    return _named(module, name)
