"""The global norm of gradients that lie on many meshes, and their scaling. Knows no loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ckpt.training.parallel.degrees import AXES, FLAT
from titan_ckpt.training.parallel.ranks import Ranks


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None, ranks: Ranks) -> float:
    """Return the norm of all gradients of all ranks, scaled down in place to `max_norm` where that is given.

    Every element counts once, by the first of the ranks that hold it. Collective: one sum over all ranks.
    """
    for parameter in parameters:
        _complete(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    counted = [part for g, part in zip(gradients, local, strict=True) if part.numel() and _is_first(g, ranks)]
    square = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if counted:
        square += torch.stack(torch._foreach_norm(counted)).double().square().sum()  # noqa: SLF001 - has no public name
    norm = sqrt(float(ranks.sum(square)))
    if local and max_norm is not None and norm > max_norm:
        torch._foreach_mul_(local, max_norm / norm)
    return norm


def _complete(parameter: nn.Parameter) -> None:
    """Add up what the ranks of a tensor-parallel group each have of a gradient."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _is_first(gradient: torch.Tensor, ranks: Ranks) -> bool:
    """Say whether this rank is at the beginning of every axis that the gradient is not cut along, but its stage's."""
    cut = {"pp"}
    if isinstance(gradient, DTensor):
        for name, placement in zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True):
            if not placement.is_replicate():
                cut.update(FLAT.get(name, (name,)))
    place = ranks.place
    return all(getattr(place, axis) == 0 for axis in AXES if axis not in cut)
