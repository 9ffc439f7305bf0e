"""This process among the ranks: the process group, and the meshes of all axes.

Owns the lifetime of the process group. Knows no model, no training loop and no checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.parallel.degrees import AXES, FLAT, Degrees

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all ranks, and its place on each axis."""

    rank: int
    size: int
    device: torch.device
    degrees: Degrees = field(default_factory=Degrees)
    axes: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """The mesh of each axis with more than one rank, and of the axes in degrees.FLAT; see `mesh`."""
    run: int = 0
    """How many runs of this process came before; the store of a process group may outlive a run."""

    def mesh(self, *axes: str) -> DeviceMesh:
        """Return the mesh of some axes, each from degrees.AXES or degrees.FLAT, outermost first."""
        meshes = [self.axes[axis] for axis in axes]
        return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)  # noqa: SLF001 - as FSDP2 does

    @property
    def place(self) -> Degrees:
        """Return the index of this rank on each axis."""
        return self.degrees.place(self.rank)

    @property
    def data_rank(self) -> int:
        """Return this rank's number among the ranks that see different sequences."""
        return self.degrees.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Return how many ranks see different sequences."""
        return self.degrees.data_size

    def sum(self, values: torch.Tensor, *, over_data: bool = False) -> torch.Tensor:
        """Return the sum over all ranks; with `over_data` over one rank of each group with equal data. Collective."""
        if self.size > 1:
            place = self.place  # only the first of the ranks that read the same data counts
            repeated = over_data and not place.tp == place.pp == place.cp == 0
            values = torch.zeros_like(values) if repeated else values.clone()
            dist.all_reduce(values)
        return values

    def is_first(self, text: str) -> bool:
        """Return whether no other rank of this host has asked this of the same text in this run. Not collective."""
        if self.size == 1:
            return True
        key = f"titan_ckpt/first/{hashlib.sha256(f'{self.run} {platform.node()} {text}'.encode()).hexdigest()}"
        try:
            return bool(_get_default_store().add(key, 1) == 1)
        except (RuntimeError, ValueError):  # the process that serves the store has ended, or the group was left
            return True

    def of_first(self, value: Any) -> Any:
        """Return what rank 0 has. Collective."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


def find_device(wanted: Device) -> torch.device:
    """Return the device of this process: the one with its number on this host, or the only one that it can see.

    Raises: ConfigError if CUDA is requested and not available, and if there are fewer devices than ranks.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(['training.device: "cuda" is asked for and there is none; use "auto" or "cpu"'])
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1:  # a launcher may show each rank its own device alone
        return torch.device("cuda", 0)
    if number >= count:
        problem = f"rank {number} of this host has no CUDA device of its own, {count} are visible"
        raise ConfigError([f"training.device: {problem}; start at most {count} ranks (--nproc-per-node {count})"])
    return torch.device("cuda", number)


def world_size() -> int:
    """Return the number of ranks of this run; also before they have joined."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


_runs = itertools.count()


@contextmanager
def process_group(wanted: Device, degrees: Degrees, backend: str | None = None) -> Iterator[Ranks]:
    """Join the process group if torchrun started this process, and leave it at the end.

    An existing process group is used and left as it is. `backend`: parallel.backend.
    Raises: ConfigError for a device or a backend that is not there.
    """
    device = find_device(wanted)
    backends = find_backends(device.type, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group(backends, **_rendezvous())
    try:
        if dist.is_initialized():
            axes = _make_axes(device.type, degrees)
            yield Ranks(dist.get_rank(), dist.get_world_size(), device, degrees, axes, next(_runs))
        else:
            yield Ranks(0, 1, device)
    finally:
        if joined:
            dist.destroy_process_group()


def find_backends(device_type: str, wanted: str | None) -> str:
    """Return the backends of torch.distributed by device type, such as "cpu:gloo,cuda:nccl".

    Raises: ConfigError for a backend that this torch lacks, that does not serve the device, or that is not the one of
        a process group that is there already.
    """
    name = (wanted or {"cuda": "nccl"}.get(device_type, "gloo")).lower()
    backends = name if device_type == "cpu" else f"cpu:gloo,{device_type}:{name}"
    if wanted is None:
        return backends
    usable = [
        known
        for known in dist.Backend.backend_list
        if known not in _NOT_REAL
        and device_type in dist.Backend.backend_capability.get(known, [device_type])
        and dist.is_backend_available(known)
    ]
    if name not in usable:
        problem = f"{wanted!r} is no backend of this torch for {device_type}; there are {', '.join(usable)}"
        raise ConfigError([f"parallel.backend: {problem}"])
    if dist.is_initialized():
        used = dict(part.split(":") for part in dist.get_backend_config().split(",")).get(device_type)
        if used != name:
            problem = f"{wanted!r} is asked for, and the process group that is there already uses {used}; leave it out"
            raise ConfigError([f"parallel.backend: {problem}"])
    return backends


_NOT_REAL = ("undefined", "fake")
"""Names in torch's list that exchange nothing."""


def _rendezvous() -> dict[str, Any]:
    """Return arguments for init_process_group under torchrun's agent store, which it keeps over restarts; else none.

    They select a key prefix for each restart: otherwise torch 2.13 would connect to addresses of dead ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    store = dist.PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
    return {"store": store, "rank": rank, "world_size": size}


def _make_axes(device_type: str, degrees: Degrees) -> dict[str, DeviceMesh]:
    """Return a mesh for every axis with more than one rank, and for the axes in degrees.FLAT.

    Replicas and experts need an axis to be sharded over, even if it has a single rank.
    """
    needs_shard = degrees.dp_replicate > 1 or degrees.ep > 1
    names = tuple(axis for axis in AXES if degrees.of(axis) > 1 or (axis == "dp_shard" and needs_shard))
    if not names:
        return {}
    world = init_device_mesh(device_type, tuple(map(degrees.of, names)), mesh_dim_names=names)
    axes = {name: world[name] for name in names}
    for flat, parts in FLAT.items():
        if present := tuple(axis for axis in parts if axis in names):
            # there is no public way to flatten several axes into one
            axes[flat] = axes[present[0]] if len(present) == 1 else world[present]._flatten(flat)  # noqa: SLF001
    return axes
