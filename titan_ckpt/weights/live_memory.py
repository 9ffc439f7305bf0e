"""The memory of tensors on this rank: whether two tensors share it or hold the same bits, and what writes to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from titan_ckpt.encoding import typed_json
from titan_ckpt.geometry.chunks import as_bytes, local_tensor


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
        self._parts = list(_versioned(tensors))
        self._versions = [part._version for _, part in self._parts]  # noqa: SLF001 - torch has no other name for it

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since this object was made."""
        pairs = zip(self._parts, self._versions, strict=True)
        names = (name for (name, part), version in pairs if part._version != version)  # noqa: SLF001
        return list(dict.fromkeys(names))


def _versioned(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has a version; a DTensor has one of its own, beside that of the tensor on this rank."""
    for name, value in tensors.items():
        if not value.is_inference():
            yield name, value
            if isinstance(value, DTensor):
                yield name, local_tensor(value)


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
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return typed_json.encode(a) == typed_json.encode(b)
    a, b = local_tensor(a), local_tensor(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors on this rank that a tensor consists of."""
    local = local_tensor(value)
    if is_traceable_wrapper_subclass(local):
        names, _ = local.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(local, name))]
    return [local]


def _ranges(value: object) -> list[tuple[int, int]]:
    """Return the addresses of the first byte, and of the byte after the last, of each part of a tensor on this rank."""
    out = []
    for part in _parts(value) if isinstance(value, torch.Tensor) else ():
        if part.layout is torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            start = part.data_ptr()
            out.append((start, start + (last + 1) * part.element_size() if part.numel() else start))
    return out
