"""Tensors inside nested state: take them out under names of their own, and put them back in their places.

Owns the placeholder that a taken tensor leaves behind, and the order of its dims in memory. Knows no files and no
owners of state.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import CorruptCheckpointError, StateEncodingError
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.types import StateDict

PLACEHOLDER = "$tensor_file"
DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, tuple, deque)
_PLACEMENT = re.compile(r"R|S\d{1,2}")
MAX_DEPTH = 100
"""Deeper than typed JSON accepts. State that contains itself is left for typed JSON to refuse by name."""


@dataclass(slots=True)
class Taken:
    """The tensors taken so far, by which a tensor that is there twice is stored once and comes back as one."""

    names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Memory of a tensor -> its name."""
    repeated: frozenset[int] = frozenset()
    """Addresses of tensors that are there twice; 0-d tensors among them are taken too."""
    layout: Callable[[torch.Tensor], list[str] | None] = lambda _: None
    """The placements to store with a tensor; None if the reader knows them."""


def take_tensors(value: Any, path: str, into: StateDict, taken: Taken | None = None, depth: int = 0) -> Any:
    """Return a copy of nested state with every tensor moved to `into` and its name left in its place.

    Names follow the path and are made distinct; tensors alias live memory. 0-d tensors stay in place, unless
    `taken` says that they are there twice. A tensor that is there twice has one name, also across calls with the same
    `taken`.
    Raises: StateEncodingError for a dict that has the placeholder as a key of its own.
    """
    known = Taken() if taken is None else taken
    if isinstance(value, torch.Tensor):
        if not value.dim() and not isinstance(value, DTensor) and address(value) not in known.repeated:
            return value.detach()
        return placeholder(value, path, into, known)
    if depth < MAX_DEPTH and type(value) in DICTS and PLACEHOLDER in value:
        raise StateEncodingError(f"{path}: {PLACEHOLDER!r} cannot be a key of a state; rename it", path)
    if depth == MAX_DEPTH:
        return value
    return _changed(value, lambda key, item: take_tensors(item, f"{path}.{key}", into, known, depth + 1))


def _changed(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a copy of a container with `change(key, item)` for each item, and anything else as it is."""
    kind = type(value)
    if kind in DICTS:
        result = copy.copy(value)
        result.update({key: change(key, item) for key, item in value.items()})
        return result
    if kind in _LISTS:
        items = (change(i, item) for i, item in enumerate(value))
        return deque(items, value.maxlen) if kind is deque else kind(items)
    return value


def placeholder(value: torch.Tensor, path: str, into: StateDict, taken: Taken) -> dict[str, Any]:
    """Move one tensor to `into`, unless it is there, and return the object that stands for it."""
    name = taken.names.get(_memory(value))
    if name is None:
        while path in into:  # {"a.b": x} beside {"a": {"b": y}}
            path += "'"
        name = path
        into[name] = value.detach()
        taken.names[_memory(value)] = name
    dims, placements = memory_order(value), taken.layout(value)
    rest = [dims] if placements is None else [dims, placements]
    return {PLACEHOLDER: name if rest == [None] else [name, *rest]}


def _memory(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if and only if they are the same memory, seen in the same way."""
    local = local_tensor(value)
    layout = value.placements if isinstance(value, DTensor) else None
    stride = local.stride() if local.layout is torch.strided else None
    return local.device, address(value), local.dtype, local.shape, stride, layout


def address(value: torch.Tensor) -> int:
    """Return the address of this rank's values, or of the object itself if it has none."""
    try:
        return (value if type(value) is torch.Tensor else local_tensor(value)).data_ptr() or id(value)
    except RuntimeError:  # sparse, or made of other tensors
        return id(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested state."""
    return (tensor for _, tensor in _placed_tensors(value, "", 0))


def _placed_tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < MAX_DEPTH and (type(value) in DICTS or type(value) in _LISTS):
        for key, item in value.items() if type(value) in DICTS else enumerate(value):
            yield from _placed_tensors(item, f"{path}.{key}", depth + 1)


def unlike_plain(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, what it is) of every tensor in nested state that would not come back as it is."""
    for place, tensor in _placed_tensors(value, path, 0):
        if type(tensor) not in (torch.Tensor, DTensor):
            yield place, f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
        elif tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            yield place, f"a tensor that is not dense ({tensor.dtype}, {tensor.device}, {tensor.layout})"
        elif tensor.requires_grad:
            yield place, "a tensor that requires gradients"
        elif tensor.is_conj() or tensor.is_neg():
            yield place, "a tensor that is conjugated or negated when it is read"
        elif any(stride == 0 < size - 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            yield place, f"a tensor expanded to {list(tensor.shape)}"


def memory_order(value: torch.Tensor) -> list[int] | None:
    """Return the dims in the order of their strides, longest first; None for a tensor that is contiguous."""
    local = local_tensor(value)
    if local.layout is not torch.strided or local.is_contiguous():
        return None
    strides = local.stride()
    dims = sorted(range(local.dim()), key=lambda dim: (-strides[dim], dim))
    return None if dims == sorted(dims) else dims


def in_memory_order(value: torch.Tensor, dims: Sequence[int] | None) -> torch.Tensor:
    """Return the tensor with its dims in that order in memory: itself if they are, else a copy."""
    if memory_order(value) == dims:
        return value
    order = list(range(value.dim())) if dims is None else list(dims)
    if len(order) != value.dim():
        raise CorruptCheckpointError(f"{len(order)} dims of a tensor that has {value.dim()}. Take another checkpoint")
    back = [order.index(dim) for dim in range(value.dim())]
    return value.permute(order).contiguous().permute(back)


def give_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the result of `take_tensors` with the tensors in their places again."""
    given: dict[str, torch.Tensor] = {}

    def give(place: Mapping[str, Any]) -> torch.Tensor:
        name, dims, _ = _parts(place)
        if name not in given:
            given[name] = in_memory_order(tensors[name], dims)
        return given[name]

    return _replaced(value, give)


def rename_tensors(value: Any, names: Mapping[str, str]) -> Any:
    """Return the result of `take_tensors` as if the tensors of some names had been taken under others."""

    def rename(place: Mapping[str, Any]) -> dict[str, Any]:
        content = place[PLACEHOLDER]
        name, *rest = [content] if isinstance(content, str) else content
        renamed = names.get(name, name)
        return {PLACEHOLDER: [renamed, *rest] if rest else renamed}

    return _replaced(value, rename)


def _replaced(value: Any, replace: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a copy of nested state with something else in the place of each placeholder."""
    if type(value) in DICTS and set(value) == {PLACEHOLDER}:
        return replace(value)
    return _changed(value, lambda _, item: _replaced(item, replace))


def names_of(value: Any) -> Iterator[str]:
    """Yield the name of every tensor that was taken out of `value`."""
    return (name for name, _ in layouts_of(value))


def layouts_of(value: Any) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the name and the stored placements of every tensor that was taken out of `value`."""
    kind = type(value)
    if kind in DICTS:
        if set(value) == {PLACEHOLDER}:
            name, _, placements = _parts(value)
            yield name, placements
            return
        value = value.values()
    if kind in DICTS or kind in _LISTS:
        for item in value:
            yield from layouts_of(item)


def _parts(value: Mapping[str, Any]) -> tuple[str, list[int] | None, list[str] | None]:
    """Return the name in a placeholder, the order of its dims in memory, and its placements.

    Raises: CorruptCheckpointError.
    """
    content = value[PLACEHOLDER]
    match content:
        case str():
            return content, None, None
        case [str(name), dims, *rest] if dims is None or _is_order(dims):
            match rest:
                case []:
                    return name, dims, None
                case [list(placements)] if all(isinstance(p, str) and _PLACEMENT.fullmatch(p) for p in placements):
                    return name, dims, placements
    raise CorruptCheckpointError(f"{PLACEHOLDER}: {content!r:.80} is no name of a tensor. Take another checkpoint")


def _is_order(dims: Any) -> bool:
    """Return whether these are the dims of a tensor in some order."""
    return type(dims) is list and all(type(dim) is int for dim in dims) and sorted(dims) == [*range(len(dims))]
