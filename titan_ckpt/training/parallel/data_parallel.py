"""Data parallelism by FSDP2: parameters are sharded, or replicated and sharded (HSDP), in one group per layer. Also
clips gradients, which lie on several meshes, by their global norm.

One copy per rank (DDP) is HSDP with one shard per copy. Gradients are summed, never averaged: the loss is already
divided by the tokens of all ranks, so experts, which fewer ranks share, need no different divisor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import sqrt
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import ConfigError, listed
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.training.parallel.degrees import AXES, FLAT
from titan_ckpt.training.parallel.ranks import Ranks

Reshard = Literal["default", "always", "never"]
Named = list[tuple[str, nn.Parameter]]


def shard(
    model: nn.Module,
    ranks: Ranks,
    compute_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    reshard_after_forward: Reshard = "default",
) -> None:
    """Shard a model part in place over the ranks with different data, and `experts` over the ranks with equal experts.

    Parameters keep their dtype; they are gathered and multiplied in `compute_dtype`. Gradients are reduced in float32.
    """
    if not is_sharded(ranks):
        return
    copies = ("dp_replicate",) if ranks.degrees.dp_replicate > 1 else ()
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    reshard = {"default": None, "always": True, "never": False}[reshard_after_forward]
    for module in experts:
        fully_shard(
            module, mesh=ranks.mesh(*copies, "fsdp_of_experts"), mp_policy=policy, reshard_after_forward=reshard
        )
    mesh = ranks.mesh(*copies, "fsdp")
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    sum_gradients(model)


def check_axes(model_parts: Sequence[nn.Module], name: str) -> None:
    """Check that `name`, a model that distributes itself, uses the axes of `Ranks.mesh`.

    Raises: ConfigError for parameters on others: `sum_and_clip` cannot tell which ranks hold the same elements of them.
    """
    known = {*AXES, *FLAT}
    named = [
        (fqn, value) for part in model_parts for fqn, value in part.named_parameters() if isinstance(value, DTensor)
    ]
    if strange := [fqn for fqn, v in named if not known.issuperset(v.device_mesh.mesh_dim_names or ("",))]:
        found = f"its parallelize puts {listed(strange, ', ', ' ')} on a mesh of its own, so no norm can be found"
        use = 'use the meshes of ranks, such as ranks.mesh("fsdp"), or give the Architecture a clip_gradients'
        raise ConfigError([f"model.name: {name!r}: {found}; {use}"])


def find_mixed(model_parts: Sequence[nn.Module]) -> tuple[str, str] | None:
    """Return a distributed and a whole parameter, both decayed or both not, if this rank trains such a pair."""
    for group in decay_groups(model_parts):
        cut = next((fqn for fqn, value in group if isinstance(value, DTensor)), None)
        whole = next((fqn for fqn, value in group if not isinstance(value, DTensor)), None)
        if cut is not None and whole is not None:
            return cut, whole
    return None


_UNDECAYED = re.compile(r"(?i)norm(?!al)|bias\w*$")
"""In "<module> <class> <parameter>": the parameter is not decayed, however many dims it has."""


def decay_groups(model_parts: Sequence[nn.Module]) -> tuple[Named, Named]:
    """Return the trained parameters with weight decay (matrices) and without (vectors, norms and biases), each once."""
    groups: tuple[Named, Named] = [], []
    seen: set[nn.Parameter] = set()
    for prefix, module in (pair for part in model_parts for pair in part.named_modules()):
        for name, value in module.named_parameters(recurse=False):
            if value.requires_grad and value not in seen:
                seen.add(value)
                about = f"{prefix.rpartition('.')[2]} {type(module).__name__} {name}"
                is_decayed = value.dim() >= 2 and not _UNDECAYED.search(about)
                groups[not is_decayed].append((f"{prefix}.{name}".lstrip("."), value))
    return groups


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum the gradients of its ranks, which it averages by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def is_sharded(ranks: Ranks) -> bool:
    """Return whether FSDP2 manages the parameters."""
    return ranks.degrees.dp_replicate * ranks.degrees.of("fsdp") > 1


def prepare_backward(model_parts: Sequence[nn.Module], *, last: bool, keep_gathered: bool) -> None:
    """Set what the next backward pass of a step does: only the `last` one exchanges gradients between ranks.

    `keep_gathered`: parameters stay gathered until the last one, which frees them.
    """
    for part in model_parts:
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_backward(last or not keep_gathered)


def free_gathered(model_parts: Sequence[nn.Module]) -> None:
    """Free all gathered parameters; a forward pass without a backward pass keeps some."""
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None, ranks: Ranks) -> float:
    """Return the global norm of the gradients; scale them down in place to `max_norm` if it is given. Collective."""
    norm, _ = sum_and_clip(parameters, max_norm, ranks, torch.empty(0, dtype=torch.float64, device=ranks.device))
    return norm


def sum_and_clip(
    parameters: Sequence[nn.Parameter], max_norm: float | None, ranks: Ranks, values: torch.Tensor
) -> tuple[float, list[float]]:
    """Do as `clip_gradients`, and return the sums of `values` (1-D, float64) over all ranks beside the norm.

    Every element of a gradient counts once, on the first rank that holds it. Collective: one sum over all ranks, and
    one copy to the host.
    """
    complete_gradients(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [local_tensor(g) for g in gradients]
    place = ranks.place
    away = [axis for axis in AXES if axis != "pp" and getattr(place, axis) > 0]
    counted = [part for g, part in zip(gradients, local, strict=True) if part.numel() and _is_first(g, away)]
    square = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if counted:
        square += torch.stack(torch._foreach_norm(counted)).double().square().sum()  # noqa: SLF001 - has no public name
    squared, *sums = ranks.sum(torch.cat([square.unsqueeze(0), values])).tolist()
    norm = sqrt(squared)
    if local and max_norm is not None and norm > max_norm:
        torch._foreach_mul_(local, max_norm / norm)
    return norm, sums


def complete_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum partial gradients over the ranks of their tensor-parallel group."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _is_first(gradient: torch.Tensor, away: Collection[str]) -> bool:
    """Return whether a gradient is cut along all of `away`, the axes on which this rank has another index than 0."""
    cut: set[str] = set()
    if away and isinstance(gradient, DTensor):
        for name, placement in zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True):
            if not placement.is_replicate():
                cut.update(FLAT.get(name, (name,)))
    return cut.issuperset(away)
