"""Quantized optimizer state of torchao (8-bit, 4-bit, fp8) as the plain tensors inside it, and back.

Owns the geometry of the inner tensors. Quantization blocks follow each other in the flattened local tensor, so an inner
tensor has the shape of the state with a shorter last dim, if the blocks divide that dim. Then it is sharded as the
state is, and any layout whose shards hold whole blocks can read it. The optimizer itself makes the state that is
filled, so no class is looked up by a name in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.errors import LoadMismatchError, StateEncodingError
from titan_ckpt.geometry.chunks import is_made_of_others, local_chunks, local_tensor, shard_sizes, sharded_as
from titan_ckpt.geometry.nested import Taken, placeholder
from titan_ckpt.types import StateDict
from titan_ckpt.weights.live_memory import inner_tensors

QUANTIZED = "$quantized"
_TABLE = "qmap"
"""The inner tensor that is a table of values, equal in every shard."""
_MODULES = "torchao.optim."


def quantizes(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is one of torchao's, which quantize their state."""
    return type(optimizer).__module__.startswith(_MODULES) and hasattr(optimizer, "_new_buffer")


def take(optimizer: Optimizer, value: torch.Tensor, path: str, into: StateDict, taken: Taken) -> dict[str, Any]:
    """Move the inner tensors to `into` and return what stands for the state.

    Raises: StateEncodingError for a class that is none of torchao's, and for blocks that cross borders of shards.
    """
    local = local_tensor(value)
    if not quantizes(optimizer) or not type(local).__module__.startswith(_MODULES):
        raise StateEncodingError(
            f"{path} is a {type(local).__module__}.{type(local).__qualname__}, a tensor made of other tensors, which "
            "cannot be stored as optimizer state unless torchao's optimizers made it",
            path,
        )
    inner = {name: placeholder(part, f"{path}.{name}", into, taken) for name, part in parts(value, path).items()}
    return {QUANTIZED: type(local).__name__, "signed": bool(getattr(local, "signed", True)), "parts": inner}


def parts(value: torch.Tensor, path: str) -> dict[str, torch.Tensor]:
    """Return the inner tensors, sharded like the state; they alias its memory.

    Raises: StateEncodingError if quantization blocks cross borders of shards.
    """
    inner = inner_tensors(value)
    return {name: part if name == _TABLE else _global(value, part, path) for name, part in inner.items()}


def _global(value: torch.Tensor, part: torch.Tensor, path: str) -> torch.Tensor:
    """Return an inner tensor in the shape that it has in every layout."""
    ratio = local_tensor(value).numel() // part.numel()
    for local_shape, shape in _shapes(local_tensor(value).shape, value.shape, ratio):
        view = part.view(local_shape)
        if not isinstance(value, DTensor):
            return view
        if any(getattr(placement, "dim", 0) >= len(shape) for placement in value.placements):
            continue
        made = sharded_as(value, view, shape)
        if [chunk.sizes for chunk, _ in local_chunks(made)] == [tuple(view.shape)]:
            return made
    raise StateEncodingError(
        f"{path}: its quantization blocks of {ratio} elements cross the borders of its shards, so its state cannot be "
        "stored. Shard rows only, or use an optimizer that does not quantize",
        path,
    )


def _shapes(local: torch.Size, whole: torch.Size, ratio: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield candidates for the shape of an inner tensor: on this rank, and of all ranks."""
    if local[-1] % ratio == 0 and whole[-1] % ratio == 0:
        yield (*local[:-1], local[-1] // ratio), (*whole[:-1], whole[-1] // ratio)
    row = math.prod(local[1:])
    if row % ratio == 0 and local[1:] == whole[1:]:
        yield (local[0], row // ratio), (whole[0], row // ratio)
    elif local.numel() % ratio == 0 and whole.numel() % ratio == 0 and local[1:] == whole[1:]:
        yield (local.numel() // ratio,), (whole.numel() // ratio,)


def room_for(optimizer: Optimizer, parameter: nn.Parameter, live: Any, stored: Mapping[str, Any], path: str) -> Any:
    """Return the state to fill: the live one if it is of the same kind, else what the optimizer makes.

    Raises: LoadMismatchError if this optimizer does not quantize the parameter in the same way.
    """
    kind, signed = stored[QUANTIZED], stored["signed"]
    made = live
    if not _is_kind(live, kind, signed):
        with torch.no_grad():
            made = optimizer._new_buffer(parameter, signed) if quantizes(optimizer) else None  # type: ignore[attr-defined]  # noqa: SLF001
    if _is_kind(made, kind, signed):
        return made
    num = local_tensor(parameter).numel()
    raise LoadMismatchError(
        f"{path} was stored as {kind} and {type(optimizer).__qualname__} does not quantize it so here, where this rank "
        f"holds {num} of its {parameter.numel()} elements. Use the optimizer that saved it, and shards that "
        'it quantizes too, or start it afresh: checkpoint.resume.exclude = ["optimizer"]'
    )


def fill(room: torch.Tensor, inner: Mapping[str, torch.Tensor], path: str) -> torch.Tensor:
    """Copy the inner tensors that were read into the state, unless they are its own memory; return the state."""
    for name, part in parts(room, path).items():
        source, target = local_tensor(inner[name]), local_tensor(part)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    return room


def uneven(optimizer: Optimizer, parameter: DTensor) -> bool:
    """Return whether an optimizer that quantizes does so with the shards of some ranks and not with those of others.

    Source: torchao/optim/adam.py, _AdamBase._new_buffer.
    """
    block: int = optimizer.block_size  # type: ignore[attr-defined]
    sizes = shard_sizes(parameter)
    return len({size >= 4096 and size % block == 0 for size in sizes}) > 1


def _is_kind(value: Any, kind: str, signed: bool) -> bool:
    if not is_made_of_others(value):
        return False
    local = local_tensor(value)
    return type(local).__name__ == kind and bool(getattr(local, "signed", True)) is signed
