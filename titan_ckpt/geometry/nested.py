"""Tensors inside nested state: take them out under names of their own, and put them back in their places.

Owns the placeholder that a taken tensor leaves behind. Knows no files and no owners of state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import StateEncodingError
from titan_ckpt.types import StateDict

PLACEHOLDER = "$tensor_file"
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, tuple, deque)
MAX_DEPTH = 100
"""Deeper than typed JSON accepts. State that contains itself is left for typed JSON to refuse by name."""


def take_tensors(value: Any, path: str, into: StateDict, depth: int = 0) -> Any:
    """Return a copy of nested state with every tensor moved to `into` and its name left in its place.

    Names follow the path and are made distinct; tensors alias live memory. 0-d tensors stay in place.
    Raises: StateEncodingError for a dict that has the placeholder as a key of its own.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not value.dim() and not isinstance(value, DTensor):
            return value.detach()
        while path in into:  # {"a.b": x} beside {"a": {"b": y}}
            path += "'"
        into[path] = value.detach()
        return {PLACEHOLDER: path}
    if depth < MAX_DEPTH and kind in _DICTS:
        if PLACEHOLDER in value:
            raise StateEncodingError(f"{path}: {PLACEHOLDER!r} cannot be a key of a state; rename it", path)
        taken = copy.copy(value)
        taken.update({k: take_tensors(v, f"{path}.{k}", into, depth + 1) for k, v in value.items()})
        return taken
    if depth < MAX_DEPTH and kind in _LISTS:
        items = (take_tensors(v, f"{path}.{i}", into, depth + 1) for i, v in enumerate(value))
        return deque(items, value.maxlen) if isinstance(value, deque) else kind(items)
    return value


def give_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the result of `take_tensors` with the tensors in their places again."""
    kind = type(value)
    if kind in _DICTS:
        if set(value) == {PLACEHOLDER}:
            return tensors[value[PLACEHOLDER]]
        given = copy.copy(value)
        given.update({k: give_tensors(v, tensors) for k, v in value.items()})
        return given
    if kind in _LISTS:
        items = (give_tensors(v, tensors) for v in value)
        return deque(items, value.maxlen) if isinstance(value, deque) else kind(items)
    return value


def names_of(value: Any) -> Iterator[str]:
    """Yield the name of every tensor that was taken out of `value`."""
    kind = type(value)
    if kind in _DICTS:
        if set(value) == {PLACEHOLDER}:
            yield value[PLACEHOLDER]
            return
        value = value.values()
    if kind in _DICTS or kind in _LISTS:
        for item in value:
            yield from names_of(item)
