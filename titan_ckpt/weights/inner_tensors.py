"""Weights that are made of other tensors (torchao's quantized weights), as the plain tensors inside them.

Owns their names: `<fqn>.<class>.<inner name>`, so that a weight of one class is not loaded into one of another. The
live weight is what a load fills, so no class is looked up by a name in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_ckpt.errors import StateEncodingError
from titan_ckpt.geometry.chunks import local_tensor, sharded_as
from titan_ckpt.types import StateDict


def is_made_of_others(value: object) -> bool:
    """Return whether this rank's part of a tensor is made of other tensors."""
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):  # the usual case, and a hot path
        return False
    return is_traceable_wrapper_subclass(local_tensor(value))


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
    local: Any = local_tensor(value)
    names, _ = local.__tensor_flatten__()
    for name in names:
        inner = getattr(local, name).detach()
        key = f"{fqn}.{type(local).__name__}.{name}"
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
