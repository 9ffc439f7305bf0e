"""Where this process stands among the ranks: the process group, and the meshes of every axis.

Owns the process group's life. Knows no model, no training loop and no checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.parallel.degrees import AXES, FLAT, Degrees

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers, at its place in the world."""

    rank: int
    size: int
    device: torch.device
    degrees: Degrees = field(default_factory=Degrees)
    axes: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Of each axis that has more than one rank, and of those that are one axis to FSDP2; see `mesh`."""

    def mesh(self, *axes: str) -> DeviceMesh:
        """Return the mesh of some axes, each of degrees.AXES or degrees.FLAT, in the order of the ranks."""
        meshes = [self.axes[axis] for axis in axes]
        return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)  # noqa: SLF001 - as FSDP2 does

    @property
    def place(self) -> Degrees:
        """Return where this rank is on each axis."""
        return self.degrees.place(self.rank)

    @property
    def data_rank(self) -> int:
        """Return this rank's number among those that see different sequences."""
        return self.degrees.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Return how many ranks see different sequences."""
        return self.degrees.data_size

    def sum(self, values: torch.Tensor, *, over_data: bool = False) -> torch.Tensor:
        """Return the sum over all ranks; `over_data`: over one of each group that sees the same data. Collective."""
        if self.size > 1:
            values = torch.zeros_like(values) if over_data and not self._counts else values.clone()
            dist.all_reduce(values)
        return values

    @property
    def _counts(self) -> bool:
        """Say whether this is the rank that speaks for its data: the first of those that share a sequence's tokens."""
        place = self.place
        return place.tp == place.pp == place.cp == 0


def find_device(wanted: Device) -> torch.device:
    """Return the device of this process. Raises: ConfigError if CUDA is asked for and not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError(['training.device: "cuda" is asked for and there is none; use "auto" or "cpu"'])
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def world_size() -> int:
    """Return how many ranks this run has, before they have joined too."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(wanted: Device, degrees: Degrees) -> Iterator[Ranks]:
    """Join the other ranks where torchrun started this process, and leave them at the end.

    A group that is there already is used and left as it is.
    """
    device = find_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, **_rendezvous())
    try:
        if dist.is_initialized():
            yield Ranks(dist.get_rank(), dist.get_world_size(), device, degrees, _make_axes(device.type, degrees))
        else:
            yield Ranks(0, 1, device)
    finally:
        if joined:
            dist.destroy_process_group()


def _rendezvous() -> dict[str, Any]:
    """Return where torchrun's ranks meet, apart from what those of an earlier life left there; else nothing.

    torchrun serves the store and restarts the ranks beside it: torch 2.13 would connect to addresses of dead ones.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    store = dist.PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
    return {"store": store, "rank": rank, "world_size": size}


def _make_axes(device_type: str, degrees: Degrees) -> dict[str, DeviceMesh]:
    """Return a mesh for every axis with more than one rank, and for those that are one axis to FSDP2.

    Copies, and experts, need an axis to be sharded over even where that has a single rank.
    """
    needs_shard = degrees.dp_replicate > 1 or degrees.ep > 1
    names = tuple(axis for axis in AXES if degrees.of(axis) > 1 or (axis == "dp_shard" and needs_shard))
    if not names:
        return {}
    world = init_device_mesh(device_type, tuple(map(degrees.of, names)), mesh_dim_names=names)
    axes = {name: world[name] for name in names}
    for flat, parts in FLAT.items():
        if present := tuple(axis for axis in parts if axis in names):
            # the only way there is to make one axis of several
            axes[flat] = axes[present[0]] if len(present) == 1 else world[present]._flatten(flat)  # noqa: SLF001
    return axes
