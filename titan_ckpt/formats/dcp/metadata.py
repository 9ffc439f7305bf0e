"""Reading the metadata file of the torch.distributed.checkpoint format as data: nothing in it is trusted or executed.

Owns a reader of pickles that knows what such metadata is made of, and nothing else: no import, no call, no attribute.
It has the opcodes and the records that may occur. The file only chooses among them: it can make no other object, and
change none that it has not made. It checks the types of fields only where Python's own dicts would run into them; then
every field is checked. Reads no tensors.
Source: pickletools; torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, takewhile
from operator import methodcaller
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

from titan_ckpt.encoding.strict_json import MAX_SIZE, is_unicode
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, store_of

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


def unpickle(data: bytes) -> Any:
    """Return the object that a pickle of DCP's metadata describes.

    Raises: UnpicklingError naming the opcode, class or value that no such pickle has; ValueError for damaged bytes.
    """
    try:
        return _run(iter(data), {})
    except IndexError:
        raise UnpicklingError("it takes a value that it has not made") from None
    except KeyError as error:
        raise UnpicklingError(f"it asks for number {error}, which it has not stored") from None


def _run(rest: Iterator[int], memo: dict[int, Any]) -> Any:
    """Make what the opcodes say, a large folder's millions: the most frequent ones come first."""
    stack: list[Any] = []
    outer: list[list[Any]] = []
    """The stacks below each mark; `stack` has what came after the last one."""
    for code in rest:
        if code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code in _ON_STACK:
            _ON_STACK[code](stack)
        elif code == _MARK:
            outer.append(stack)
            stack = []
        elif code in _WITH_ITEMS:
            if not outer:
                raise UnpicklingError("it ends a list that it has not begun")
            items, stack = stack, outer.pop()
            _WITH_ITEMS[code](stack, items)
        elif code in _SIZES:
            size = _SIZES[code]
            number = next(rest, 0) if size == 1 else int.from_bytes(islice(rest, size), "little")
            if code in _FETCHES:
                stack.append(memo[number])
            elif code in _NUMBERS:
                stack.append(number - (number >> 31 << 32))  # signed, in four bytes
            elif code in _STORES:
                memo[number] = stack[-1]
            elif code in _SIZED:
                found = bytes(islice(rest, number))
                if len(found) < number:
                    raise UnpicklingError(f"expected {number} bytes, found {len(found)}")
                stack.append(_SIZED[code](found))
        elif code == _GLOBAL:
            module, name = (bytes(takewhile(lambda byte: byte != 10, rest)).decode() for _ in range(2))
            stack.append(_named(module, name))
        elif code == _STOP:
            return stack.pop()
        else:
            names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
            raise UnpicklingError(f"it uses {names.get(code, code)}, which no DCP metadata needs")
    raise UnpicklingError("it ends without STOP")


def _named(module: Any, name: Any) -> Any:
    """Return a dtype or layout of torch, or the name of something that `_call` or `_new` makes."""
    if type(name) is not str or type(module) is not str:
        raise UnpicklingError("it names something by other than text")
    text = f"{module}.{name}"
    if module == "torch" and isinstance(value := vars(torch).get(name), (torch.dtype, torch.layout)):
        return value
    if text not in _RECORDS and text not in _CALLS:
        raise UnpicklingError(f"it names {text:.200}, which no DCP metadata needs")
    return _Name(text)


def _append(stack: list[Any], items: list[Any]) -> None:
    into = stack[-1]
    if type(into) is not list:
        raise UnpicklingError(f"it appends to a {_kind(into)}")
    into += items


def _set_items(stack: list[Any], items: list[Any]) -> None:
    into = stack[-1]
    if type(into) not in (dict, OrderedDict) or len(items) % 2:
        raise UnpicklingError(f"it sets items of a {_kind(into)}")
    values = iter(items)
    for key in values:
        if type(key) is not str and not _is_key(key):
            raise UnpicklingError(f"it has a {_kind(key)} as the key of a dict")
        if key in into:
            raise UnpicklingError(f"it has a key twice: {key!r:.200}")
        into[key] = next(values)


def _is_key(key: Any) -> bool:
    """Return whether this, which is no text, can be hashed and shown at once: tuples of tuples may take for ever."""
    if type(key) is MetadataIndex:
        types = [type(vars(key).get(name)) for name in ("fqn", "offset", "index")]
        known = all(kind in allowed for kind, allowed in zip(types, _OF_INDEX, strict=True))
        return known and abs(vars(key).get("index") or 0) <= MAX_SIZE
    return type(key) is int and abs(key) <= MAX_SIZE


def _new(stack: list[Any]) -> None:
    arguments, name = stack.pop(), stack.pop()
    if not isinstance(name, _Name) or name.text not in _RECORDS or type(arguments) is not tuple or arguments:
        raise UnpicklingError(f"it makes a {_kind(name)} in a way that no DCP metadata does")
    stack.append(object.__new__(_RECORDS[name.text]))


def _build(stack: list[Any]) -> None:
    state, made = stack.pop(), stack[-1]
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
    arguments, name = stack.pop(), stack.pop()
    make = _CALLS.get(name.text) if isinstance(name, _Name) else None
    value = make(*arguments) if make is not None and type(arguments) is tuple else None
    if value is None:
        raise UnpicklingError(f"it calls {_kind(name)} in a way that no DCP metadata does")
    stack.append(value)


def _size(*arguments: Any) -> torch.Size | None:
    numbers = arguments[0] if len(arguments) == 1 else None
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMS:
        return None
    for number in numbers:
        if type(number) is not int or abs(number) > MAX_SIZE:
            return None
    return torch.Size(numbers)


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


_text = methodcaller("decode", "utf-8", "surrogatepass")
_MEMOIZE, _MARK, _STOP, _GLOBAL = pickle.MEMOIZE[0], pickle.MARK[0], pickle.STOP[0], pickle.GLOBAL[0]
_STORES = frozenset(pickle.BINPUT + pickle.LONG_BINPUT)
_FETCHES = frozenset(pickle.BINGET + pickle.LONG_BINGET)
_NUMBERS = frozenset(pickle.BININT + pickle.BININT1 + pickle.BININT2)
_SIZES = {
    **dict.fromkeys(pickle.BINPUT + pickle.BINGET + pickle.BININT1 + pickle.SHORT_BINUNICODE + pickle.LONG1, 1),
    **dict.fromkeys(pickle.LONG_BINPUT + pickle.LONG_BINGET + pickle.BININT + pickle.BINUNICODE, 4),
    **dict(zip(pickle.PROTO + pickle.BININT2 + pickle.FRAME, (1, 2, 8), strict=True)),
}
"""Opcodes that a number of so many bytes follows."""
_SIZED: dict[int, Callable[[bytes], Any]] = {
    **dict.fromkeys(pickle.SHORT_BINUNICODE + pickle.BINUNICODE, _text),
    pickle.LONG1[0]: partial(int.from_bytes, byteorder="little", signed=True),
}
"""Opcodes with an argument whose number of bytes comes before it."""
_ON_STACK: dict[int, Callable[[list[Any]], None]] = {
    pickle.EMPTY_TUPLE[0]: lambda stack: stack.append(()),
    pickle.NEWOBJ[0]: _new,
    pickle.BUILD[0]: _build,
    pickle.EMPTY_DICT[0]: lambda stack: stack.append({}),
    pickle.TUPLE1[0]: lambda stack: stack.append((stack.pop(),)),
    pickle.TUPLE2[0]: lambda stack: stack.append((stack.pop(), stack.pop())[::-1]),
    pickle.TUPLE3[0]: lambda stack: stack.append((stack.pop(), stack.pop(), stack.pop())[::-1]),
    pickle.REDUCE[0]: _call,
    pickle.EMPTY_LIST[0]: lambda stack: stack.append([]),
    pickle.NONE[0]: lambda stack: stack.append(None),
    pickle.NEWTRUE[0]: lambda stack: stack.append(True),
    pickle.NEWFALSE[0]: lambda stack: stack.append(False),
    pickle.APPEND[0]: lambda stack: _append(stack, [stack.pop()]),
    pickle.SETITEM[0]: lambda stack: _set_items(stack, [stack.pop(), stack.pop()][::-1]),
    pickle.STACK_GLOBAL[0]: lambda stack: stack.append(_named(name=stack.pop(), module=stack.pop())),
}
"""Opcodes that change the stack alone."""
_WITH_ITEMS: dict[int, Callable[[list[Any], list[Any]], None]] = {
    pickle.TUPLE[0]: lambda stack, items: stack.append(tuple(items)),
    pickle.APPENDS[0]: _append,
    pickle.SETITEMS[0]: _set_items,
}
"""Opcodes that take everything since the last mark, too."""


METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30


@gc_paused()
def read_metadata(path: Place) -> Metadata:
    """Return a folder's metadata with every field checked. Nothing in the file is executed.

    Raises: OSError; CorruptCheckpointError for anything that is no valid metadata.
    """
    data = store_of(path).read_whole(path, MAX_METADATA_BYTES)
    try:
        metadata = unpickle(data)
        if not isinstance(metadata, Metadata):
            raise UnpicklingError(f"it holds a {type(metadata).__name__}")
        _check_types(metadata)
    except (UnpicklingError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{path} is not the metadata of a DCP checkpoint, and may be hostile: {error}. Nothing was executed. "
            "Take another checkpoint",
            str(path),
        ) from error
    return metadata


def storage_table(metadata: Metadata) -> dict[Any, Any]:
    """Return index -> place of every stored chunk and item."""
    table: dict[Any, Any] | None = metadata.storage_data
    return table or {}


def saved_paths(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """Return name -> path in the nested state that was saved; a name with anything but text in its path is left out."""
    paths: Any = metadata.planner_data
    if type(paths) is not dict:
        return {}
    plain = ((n, p) for n, p in paths.items() if type(n) is str and type(p) is tuple and p)
    return {name: path for name, path in plain if all(type(part) is str for part in path)}


def _check_types(metadata: Metadata) -> None:
    """Check the types and values of all fields before anything uses them. Raises: UnpicklingError."""
    entries, places = (vars(metadata).get(name) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(places, dict | None):
        raise UnpicklingError("its tables of names and places are malformed")
    for index, info in (places or {}).items():
        _check_place(index, info)
    listed: set[int] = set()
    for name, entry in entries.items():
        if type(name) is not str or not (name.isascii() or is_unicode(name)):  # there are millions
            raise UnpicklingError("a name is malformed")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(name, vars(entry))
            if id(entry.chunks) in listed:  # thousands of names with thousands of chunks take few bytes otherwise
                raise UnpicklingError(f"the chunks of {name!r:.200} are those of another tensor")
            listed.add(id(entry.chunks))
        elif type(entry) is not BytesStorageMetadata:
            raise UnpicklingError(f"the entry of {name!r:.200} is malformed")


def _check_place(index: Any, info: Any) -> None:
    if type(info) is not _StorageInfo or type(index) is not MetadataIndex:
        raise UnpicklingError("its table of places is malformed")
    name, offset = vars(index).get("fqn"), vars(index).get("offset")
    place = vars(info)
    transforms = place.get("transform_descriptors")
    sizes = (place.get("offset"), place.get("length"), *(offset or ()))
    if (
        not all(type(n) is int and n >= 0 for n in sizes)
        or type(place.get("relative_path")) is not str
        or len(place["relative_path"]) > MAX_PATH
        or not (transforms is None or _is_texts(transforms))
    ):
        raise UnpicklingError(f"the place of {name!r:.200} is malformed")


def _is_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) < 64 and all(type(text) is str for text in value)


def _check_tensor(name: str, entry: Mapping[str, Any]) -> None:
    shape, properties, chunks = entry.get("size"), entry.get("properties"), entry.get("chunks")
    dtype = vars(properties).get("dtype") if type(properties) is TensorProperties else None
    if not isinstance(dtype, torch.dtype) or type(shape) is not torch.Size or any(n < 0 for n in shape):
        raise UnpicklingError(f"the shape or dtype of {name!r:.200} is malformed")
    if type(chunks) is not list or not all(type(chunk) is ChunkStorageMetadata for chunk in chunks):
        raise UnpicklingError(f"the chunks of {name!r:.200} are malformed")
    filled: set[torch.Size] = set()
    for chunk in chunks:
        offsets: Any = vars(chunk).get("offsets")
        sizes: Any = vars(chunk).get("sizes")
        comparable = type(offsets) is type(sizes) is torch.Size and len(offsets) == len(sizes) == len(shape)
        if not comparable or not all(
            o >= 0 and n >= 0 and o + n <= size for size, o, n in zip(shape, offsets, sizes, strict=True)
        ):
            raise UnpicklingError(f"a chunk of {name!r:.200} is not inside its shape")
        if math.prod(sizes):
            if offsets in filled:
                raise UnpicklingError(f"two chunks of {name!r:.200} begin at the same place")
            filled.add(offsets)
