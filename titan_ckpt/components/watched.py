"""Watch: whether what objects keep in attributes has changed since the training began, although no step holds it.

Owns the comparison, which the manager makes at every save. Knows no rules: unsaved_state.py and the rehearsal of
optimizers say what is watched.
"""

from __future__ import annotations

import pickle
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch
import xxhash
from torch import nn

from titan_ckpt.components.classes import is_own
from titan_ckpt.components.unsaved_state import MAX_DEPTH, variables_of
from titan_ckpt.errors import SaveError, listed
from titan_ckpt.geometry.chunks import as_bytes, local_tensor
from titan_ckpt.process import get_random, is_random

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_CONSTANTS = (PurePath, Decimal, Fraction, date, time, timedelta, UUID, range, slice)
"""Classes of Python whose objects never change."""
_COMPARED = 1 << 20
"""Elements of a tensor that are compared: all of a smaller one, each n-th of a larger one."""
_LOOKED_INTO = 1 << 14
"""Parts of one container that are compared, likewise, and objects within one value that are looked into.

Further parts of a value are compared by identity alone: the watch does not see a change within them.
"""
GIVE_STATE = "let the object return its state and take it back"


class _Watched(NamedTuple):
    """An object, and what its values were. It is kept, because its id might be given to another object."""

    owner: Any
    what: str
    allowed_as: str
    values: Callable[[], Mapping[str, Any]]
    live: frozenset[int]
    comes_back: Callable[[str], bool]
    how: str
    before: Mapping[str, Any]

    def now(self) -> Mapping[str, Any]:
        return {name: trace(value, self.live) for name, value in self.values().items()}

    def changed(self) -> list[str]:
        """Return the names of values that are others, that are new, or that are gone."""
        now = self.now()
        names = [name for name in {**self.before, **now} if self.before.get(name) != now.get(name)]
        return [name for name in names if not self.comes_back(name)]


class Watch:
    """Objects, with what their attributes were when they were added."""

    def __init__(self) -> None:
        self.objects: dict[int, _Watched] = {}
        """Those that are watched, by their ids."""

    def add(
        self,
        owner: Any,
        what: str,
        allowed_as: str,
        values: Callable[[], Mapping[str, Any]],
        live: Collection[int],
        comes_back: Callable[[str], bool] = lambda _: False,
        how: str = GIVE_STATE,
    ) -> None:
        """Watch values of an object from now on, if it is not watched yet.

        `values`: returns them by name. `live`: ids of objects whose state steps hold themselves. `comes_back`: whether
        a step holds a value that has changed. `how`: what lets a step hold it.
        """
        if id(owner) not in self.objects:
            added = _Watched(owner, what, allowed_as, values, frozenset(live), comes_back, how, {})
            self.objects[id(owner)] = added._replace(before=added.now())

    def refuse(self, step: int) -> None:
        """Raises: SaveError naming every value that has changed."""
        lines = [
            f"{known.what}: {listed(names, ', ', ' ')} changed since the training began, and no step holds it: "
            f'{known.how}, or allow that a resumed run loses it: checkpoint.allow = ["{known.allowed_as}"]'
            for known in self.objects.values()
            if (names := known.changed())
        ]
        if lines:
            raise SaveError(f"step {step} is not saved: {listed(lines)}")


class _Same:
    """An object that is not looked into: it is the same as itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value  # a reference: its id might be given to another object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]  # compared alone


def trace(value: Any, live: Collection[int] = (), depth: int = 0, seen: set[int] | None = None) -> Any:
    """Return what shows by == whether a value has changed: the content of data, the identity of anything else.

    `live`: ids of objects that do not count. `seen`: those of objects whose content is in the trace already.
    """
    seen = set() if seen is None else seen
    if id(value) in live:
        return id(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        flat: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return value.dtype.str, value.shape, xxhash.xxh3_128_digest(flat)
    if type(value) in ATOMS:
        return type(value), repr(value) if isinstance(value, (float, complex)) else value  # one NaN is as another
    if isinstance(value, (bytearray, memoryview, array, np.generic)):
        content: Any = value
        return type(value), bytes(content)
    if is_random(value):
        return trace(get_random(value))
    is_deep = depth >= MAX_DEPTH or len(seen) >= _LOOKED_INTO
    if id(value) in seen or is_deep or (parts := _parts(value)) is None:
        return (type(value), value) if isinstance(value, _CONSTANTS) else _Same(value)
    seen.add(id(value))
    if isinstance(value, (set, frozenset)) and {*map(type, value)} <= {*ATOMS}:
        return type(value), frozenset(value)  # the order in which it was filled does not count
    if isinstance(value, (list, tuple)) and {*map(type, value)} <= {int, float, bool}:
        return type(value), len(value), xxhash.xxh3_128_digest(pickle.dumps([*value]))
    return type(value), len(parts), [trace(part, live, depth + 1, seen) for part in _some(parts, _LOOKED_INTO)]


def _parts(value: Any) -> list[Any] | None:
    """Return what an object consists of; None for one that is not looked into. Nothing in it is made for this call."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        return [value.__code__, vars(value), *variables_of(value).values()]
    found: list[Any] = []
    if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
        found += [*value, *(value.values() if isinstance(value, dict) else ())]
    elif isinstance(value, np.ndarray):
        return value.tolist() if value.ndim else [value.item()]
    elif isinstance(value, (str, bytes, int, float, complex)):  # of a class derived from one of them
        kind: Any = next(kind for kind in type(value).__mro__ if kind in ATOMS)
        found += [kind.__repr__(value)]
    elif isinstance(value, nn.Module):  # one that its owner hides from the model, such as a teacher in a list
        found += [*value.parameters(), *value.buffers()]
        if not is_own(value):
            return found
    elif not (isinstance(value, (SimpleNamespace, UserDict, UserList, ChainMap)) or is_own(value)):
        return None
    elif hasattr(type(value), "__array__"):  # such as a table of pandas
        found += [np.asarray(value)]
    try:
        own = dict(getattr(value, "__dict__", {}))
    except Exception:  # a property of that name
        return None
    members = [item for kind in type(value).__mro__ for item in vars(kind).items()]
    slots = [name for name, member in members if isinstance(member, MemberDescriptorType)]
    return [*found, *own, *own.values(), *(getattr(value, name, None) for name in slots)]


def _of_tensor(value: torch.Tensor) -> Any:
    local = local_tensor(value).detach()
    version = None if value.is_inference() else value._version  # noqa: SLF001 - torch has no other name for it
    if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_meta or local.is_nested:
        return _Same(value), version
    part = _some(local.resolve_conj().resolve_neg().reshape(-1), _COMPARED)
    digest = xxhash.xxh3_128_digest(as_bytes(part).cpu().numpy().data)
    return value.dtype, value.shape, digest, None if part.numel() == local.numel() else version


def _some(flat: Any, number: int) -> Any:
    return flat[:: 1 + len(flat) // number]
