"""The memory of tensors on this rank: whether two tensors share it or hold the same bits, and what writes to it.

Weights that are made of other tensors (torchao's quantized weights) are the plain tensors inside them. Owns the names
of these: `<fqn>.<class>.<inner name>`, so that a weight of one class is not loaded into one of another. The live weight
is what a load fills, so no class is looked up by a name in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.geometry.chunks import as_bytes, is_made_of_others, local_tensor, sharded_as
from titan_ckpt.types import StateDict


class WriteRecorder(TorchDispatchMode):
    """Records the memory that torch's operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranges: set[tuple[int, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = func._schema.arguments  # noqa: SLF001 - torch has no public name for it
        given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
        written: set[tuple[int, int]] = set()
        read: set[tuple[int, int]] = set()
        for argument in arguments:
            value = given.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            values = value if isinstance(value, list | tuple) else [value]
            (written if is_written else read).update(*map(_ranges, values))
        is_copy = func.overloadpacket is torch.ops.aten.copy_
        self._ranges |= written - read if is_copy else written  # a tensor copied onto itself has its old values
        return func(*args, **(kwargs or {}))

    def reached(self, value: torch.Tensor) -> bool:
        """Return whether any of the tensor's memory was written to; true of a tensor without memory on this rank."""
        ranges = _ranges(value)
        empty = all(start == stop for start, stop in ranges)
        return empty or any(a < stop and start < b for a, b in ranges for start, stop in self._ranges)


class Watched:
    """Tensors, and the version that torch counts up whenever it changes one.

    Not noticed: changes through `.data`, by numpy, by foreign kernels and by torch.optim's fused kernels, and changes
    of inference tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = [(name, value) for name, value in tensors.items() if not value.is_inference()]
        # a DTensor has a version of its own, beside that of the tensor on this rank
        self._parts = own + [(name, local_tensor(value)) for name, value in own if isinstance(value, DTensor)]
        self._versions = [part._version for _, part in self._parts]  # noqa: SLF001 - torch has no other name for it

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since this object was made."""
        pairs = zip(self._parts, self._versions, strict=True)
        names = (name for (name, part), version in pairs if part._version != version)  # noqa: SLF001
        return list(dict.fromkeys(names))


def is_live(value: object, live: torch.Tensor | None) -> bool:
    """Return whether a value of a state dict is the live tensor's own memory on this rank."""
    if not isinstance(value, torch.Tensor) or live is None:
        return False
    if is_lazy(live) or value is live:
        return True
    if value.shape != live.shape or value.dtype != live.dtype or value.layout != live.layout:
        return False
    if value.layout is not torch.strided:  # it has no pointer
        return True
    if getattr(value, "placements", None) != getattr(live, "placements", None):  # DTensors have them
        return False
    places, live_places = ([(p.data_ptr(), p.stride(), p.shape) for p in _parts(t)] for t in (value, live))
    return places == live_places


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors bit for bit on this rank."""
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return False
    if not isinstance(a, torch.Tensor):
        return typed_json.encode(a) == typed_json.encode(b)
    a, b = local_tensor(a), local_tensor(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors on this rank that a tensor consists of."""
    if is_made_of_others(value):
        return [part for inner in inner_tensors(value).values() for part in _parts(inner)]
    return [local_tensor(value)]


def _ranges(value: object) -> list[tuple[int, int]]:
    """Return the addresses of the first byte, and of the byte after the last, of each part of a tensor on this rank."""
    out = []
    for part in _parts(value) if isinstance(value, torch.Tensor) else ():
        if part.layout is torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            start = part.data_ptr()
            out.append((start, start + (last + 1) * part.element_size() if part.numel() else start))
    return out


def inner_tensors(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank's part of a tensor is made of; they alias its memory."""
    local: Any = local_tensor(value)
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name).detach() for name in names}


def with_inner_tensors(tensors: StateDict) -> StateDict:
    """Return the state dict with the tensors inside such weights in place of them; they alias live memory.

    Raises: StateEncodingError for a sharded weight whose inner tensors are not sharded by rows as it is.
    """
    if not any(map(is_made_of_others, tensors.values())):
        return tensors
    out: StateDict = {}
    for fqn, value in tensors.items():
        out |= dict(_inner(fqn, value)) if is_made_of_others(value) else {fqn: value}
    return out


def _inner(fqn: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, inner in inner_tensors(value).items():
        key = f"{fqn}.{type(local_tensor(value)).__name__}.{name}"
        whole = _sharded(key, inner, value) if isinstance(value, DTensor) else inner
        yield from _inner(key, whole) if is_made_of_others(whole) else [(key, whole)]


def _sharded(key: str, inner: torch.Tensor, value: DTensor) -> DTensor:
    """Return an inner tensor as part of a DTensor, if it is sharded as the weight is."""
    local, placements = local_tensor(value), value.placements
    shape = (*value.shape[:1], *inner.shape[1:])
    if inner.shape == local.shape:
        shape = tuple(value.shape)
    elif all(placement.is_replicate() for placement in placements):
        shape = tuple(inner.shape)
    elif inner.shape[:1] != local.shape[:1] or any(getattr(placement, "dim", 0) for placement in placements):
        raise StateEncodingError(
            f"{key}: {list(inner.shape)} values belong to a shard {list(local.shape)} of {list(value.shape)}, and not "
            "to its rows, so they cannot be saved. Shard rows of weights with a scale for each row, or leave the "
            "weight whole on every rank (ignored_params of fully_shard)",
            key,
        )
    return sharded_as(value, inner, shape)
