"""Where this process stands among the ranks, and how a model is laid out over them: by FSDP2, or not at all.

Owns the process group's life. Knows no training loop and no checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_ckpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. `mesh` is None in a single process without torchrun."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place. Collective."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group())
        return values


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of this process. Raises: ConfigError if CUDA is asked for and not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError(['training.device: "cuda" is asked for and there is none; use "auto" or "cpu"'])
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(wanted: Literal["auto", "cpu", "cuda"]) -> Iterator[Ranks]:
    """Join the other ranks where torchrun started this process, and leave them at the end.

    A group that is there already is used and left as it is.
    """
    device = find_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        if dist.is_initialized():
            mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
            yield Ranks(dist.get_rank(), dist.get_world_size(), device, mesh)
        else:
            yield Ranks(0, 1, device)
    finally:
        if joined:
            dist.destroy_process_group()


def shard(model: nn.Module, ranks: Ranks, compute_dtype: torch.dtype) -> None:
    """Shard the parameters over all ranks in place: one FSDP2 group per layer, one for the rest.

    Parameters stay in their dtype; they are gathered and multiplied in `compute_dtype`, gradients reduced in float32.
    """
    if ranks.mesh is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = model.get_submodule("layers")
    for layer in layers.children():
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy)


def sync_gradients(model: nn.Module, *, when: bool) -> None:
    """Say whether the next backward exchanges gradients between ranks; with accumulation only the last one does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)
