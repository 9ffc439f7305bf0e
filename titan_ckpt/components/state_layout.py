"""The placements of optimizer state: when they are stored, and the room that is made by them at a load.

Most state has the shape and the placements of its parameter, or is replicated; then nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from titan_ckpt.errors import StateEncodingError
from titan_ckpt.geometry.chunks import TensorInfo


def placements_unlike(parameter: torch.Tensor, value: torch.Tensor) -> list[str] | None:
    """Return the placements of state of a parameter; None if `room_like` makes them without being told.

    A list without entries stands for a plain tensor beside a sharded parameter.
    """
    if not isinstance(value, DTensor):
        return [] if value.dim() and isinstance(parameter, DTensor) else None
    if isinstance(parameter, DTensor):
        same_shape = value.shape == parameter.shape
        expected = parameter.placements if same_shape else (Replicate(),) * parameter.device_mesh.ndim
        if value.placements == expected:
            return None
    return _texts(value)


def placements_beside(value: torch.Tensor, mesh: DeviceMesh | None, path: str) -> list[str] | None:
    """Return the placements of a tensor that belongs to no parameter.

    Raises: StateEncodingError for a tensor on another mesh than the parameters' first one.
    """
    if not isinstance(value, DTensor):
        return None
    texts = _texts(value)
    if value.device_mesh != mesh or texts is None:
        raise StateEncodingError(
            f"{path}: a sharded tensor {list(value.shape)} that is state of no parameter is not sharded as parameters "
            "are, so it cannot be stored. Keep it in the state of a parameter",
            path,
        )
    return texts


def room_like(parameter: nn.Parameter, info: TensorInfo, placements: Sequence[str] | None) -> torch.Tensor:
    """Return a tensor to fill with state of a parameter, laid out as the optimizer would make it."""
    if placements is not None:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        return room(info, parameter.device, mesh, placements)
    if info.shape == tuple(parameter.shape):
        # as optimizers do: for a float8-aware parameter zeros_like returns a plain tensor, empty_like does not
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False).detach()
    return parameter.detach().new_empty(info.shape, dtype=info.dtype)


def room(
    info: TensorInfo, device: torch.device, mesh: DeviceMesh | None, placements: Sequence[str] | None
) -> torch.Tensor:
    """Return a tensor to fill; it is replicated if its placements are those of a mesh with other axes."""
    if not placements or mesh is None:
        return torch.empty(info.shape, dtype=info.dtype, device=device)
    parsed = [Replicate() if text == "R" else Shard(int(text[1:])) for text in placements]
    if len(parsed) != mesh.ndim or any(getattr(placement, "dim", -1) >= len(info.shape) for placement in parsed):
        parsed = [Replicate()] * mesh.ndim
    return zeros(info.shape, dtype=info.dtype, device_mesh=mesh, placements=parsed)


def _texts(value: DTensor) -> list[str] | None:
    """Return placements as text; None for those that cannot be made by name."""
    texts = []
    for placement in value.placements:
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            return None
        texts.append(f"S{placement.dim}" if isinstance(placement, Shard) else "R")
    return texts
