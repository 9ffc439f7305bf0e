"""One model in every layout that training uses, with its true values known: what saves and loads are tested on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from tests.world import misplaced
from titan_ckpt.converters.parallel import converted_plan
from titan_ckpt.geometry.chunks import blocks_of, local_tensor
from titan_ckpt.models.layers import FeedForward

Tensors = dict[str, torch.Tensor]

mesh_of = cache(init_device_mesh)
"""A mesh of this process, made once: its process groups take long."""
WIDTH, HIDDEN = 10, 103
"""Neither divides by 4; the 3 rows of the table leave one of 4 ranks with nothing."""


class Block(nn.Module):
    """A small model with rows that divide unevenly, a table of 3 rows, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.table = nn.Parameter(torch.empty(3, 7))
        self.norm = nn.Parameter(torch.empty(WIDTH))


def true_values() -> Tensors:
    """Return every tensor's whole value, the same on every rank, in memory of the caller's own."""
    return {name: value.clone() for name, value in _truth().items()}


@cache
def _truth() -> Tensors:
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in sorted(Block().named_parameters())}
    return values | {
        "large": torch.randn(1200, 1024, generator=generator),
        "wide.bf16": torch.randn(6, 50, 9, generator=generator).bfloat16(),
        "bytes.fp8": torch.randn(11, 6, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, 4, dtype=torch.complex128, generator=generator),
        "mask": torch.rand(9, 5, generator=generator) > 0.5,
        "step": torch.tensor(41.0, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }


def _distributed(mesh: DeviceMesh, *placements: Placement) -> Tensors:
    """Hold every tensor as a DTensor, with placements that name dims it lacks replaced by Replicate."""
    tensors: Tensors = {}
    for name, value in true_values().items():
        fitting = [Replicate() if isinstance(p, Shard) and p.dim >= value.dim() else p for p in placements]
        tensors[name] = _place(value, mesh, fitting)
    return tensors


def _place(value: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Distribute without communication, which lacks some dtypes on gloo."""
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _parallel(mesh: DeviceMesh, sharded: DeviceMesh, tensor_parallel: DeviceMesh | None) -> Tensors:
    """Hold the model as FSDP2 (and tensor parallelism before it) leaves it, the other tensors as Shard(0)."""
    values = true_values()
    model = Block()
    model.load_state_dict({name: values[name] for name, _ in model.named_parameters()})
    if tensor_parallel is not None:
        parallelize_module(model, tensor_parallel, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=sharded)
    tensors: Tensors = {name: p.detach() for name, p in model.named_parameters()}
    rest = {name: value for name, value in values.items() if name not in tensors}
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for name, value in rest.items():
        tensors[name] = _place(value, mesh, placements if value.dim() else [Replicate()] * mesh.ndim)
    return tensors


def fsdp() -> Tensors:
    ranks = mesh_of("cpu", (_world(),))
    return _parallel(ranks, ranks, None)


def hsdp() -> Tensors:
    ranks = mesh_of("cpu", (2, _world() // 2), mesh_dim_names=("replicate", "shard"))
    return _parallel(ranks, ranks, None)


def fsdp_and_tensor_parallel() -> Tensors:
    ranks = mesh_of("cpu", (2, _world() // 2), mesh_dim_names=("shard", "tensor"))
    return _parallel(ranks, ranks["shard"], ranks["tensor"])


def columns() -> Tensors:
    return _distributed(mesh_of("cpu", (_world(),)), Shard(1))


def rows_and_columns() -> Tensors:
    return _distributed(mesh_of("cpu", (2, _world() // 2)), Shard(1), Shard(0))


def rows_twice() -> Tensors:
    return _distributed(mesh_of("cpu", (2, _world() // 2)), Shard(0), Shard(0))


def replicated() -> Tensors:
    return _distributed(mesh_of("cpu", (_world(),)), Replicate())


def plain() -> Tensors:
    return true_values()


LAYOUTS: dict[str, Callable[[], Tensors]] = {
    f.__name__: f
    for f in (fsdp, hsdp, fsdp_and_tensor_parallel, columns, rows_and_columns, rows_twice, replicated, plain)
}


def _world() -> int:
    return torch.distributed.get_world_size()


ENDS: dict[str, ParallelStyle] = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "output": ColwiseParallel(output_layouts=Replicate()),
}


def split_heads(block: nn.Module, mesh: DeviceMesh, changed: Callable[[Any], Any] = dict) -> None:
    """Lay a block of a model of ours out over tensor-parallel ranks; experts are on every rank."""
    plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan["attention.wo"] = RowwiseParallel()
    if isinstance(getattr(block.get_submodule("attention"), "q_norm", None), nn.Module):
        # Each rank normalises its own heads, so the gradients of the weights are to be summed: dim 2 counts heads.
        norms = ("attention.q_norm", "attention.k_norm")
        plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in norms}
    if isinstance(block.get_submodule("feed_forward"), FeedForward):
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan["feed_forward.w2"] = RowwiseParallel()
    parallelize_module(block, mesh, changed(plan))


def split_converted(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay a converted model of ours out over tensor-parallel ranks, table and head too."""
    parallelize_module(model, mesh, converted_plan(ENDS))
    for layer in model.get_submodule("layers").children():
        split_heads(layer, mesh, converted_plan)


def zeroed(tensors: Tensors) -> Tensors:
    """Return the same layouts over memory of their own, all zero bytes."""
    out: Tensors = {}
    for name, value in tensors.items():
        local = local_tensor(value)
        clean = torch.zeros(local.nbytes, dtype=torch.uint8).view(local.dtype).view(local.shape)
        if isinstance(value, DTensor):
            spec = (value.device_mesh, value.placements)
            out[name] = DTensor.from_local(clean, *spec, run_check=False, shape=value.shape, stride=value.stride())
        else:
            out[name] = clean
    return out


def assert_true_values(tensors: Tensors) -> None:
    """Fail unless every value this rank holds is, bit for bit, the true one at its place."""
    assert misplaced(tensors, _truth()) == []
    for name, value in tensors.items():
        assert sum(block.chunk.numel for block in blocks_of(value)) == local_tensor(value).numel(), name
