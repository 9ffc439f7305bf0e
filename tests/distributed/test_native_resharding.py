"""A checkpoint saved in one layout loads in every other, bit for bit: real FSDP2, HSDP, TP and mixtures on gloo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.layouts import LAYOUTS, assert_true_values, true_values, zeroed
from tests.world import gathered, on_ranks, same, whole
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import PeerError, StateEncodingError
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.geometry.chunks import Block, blocks_of
from titan_ckpt.testing import distributed


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> WritePlan:
    """Write every rank's file, from live memory."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = WritePlan.of(tensors, Coordinator.current())
    plan.write(folder, tensors)
    dist.barrier()
    return plan


def load(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors' own memory."""
    with NativeReader(folder) as reader:
        reader.read([Block(b.chunk, b.data, fqn) for fqn, v in tensors.items() for b in blocks_of(v)])


def every_layout_into_every_other(root: Path) -> None:
    held = {name: make() for name, make in LAYOUTS.items()}
    for name, tensors in held.items():
        assert_true_values(tensors)  # the geometry of tensors.py against torch's own sharding
        sizes = gathered(save(root / name, tensors).layout.num_bytes)
        assert max(sizes) < 1.2 * sum(sizes) / len(sizes), f"{name}: ranks write {sizes} bytes"
        with NativeReader(root / name) as reader:
            reader.verify()
    for name in LAYOUTS:
        for tensors in held.values():
            target = zeroed(tensors)
            load(root / name, target)
            assert_true_values(target)


@pytest.mark.parametrize("nproc", [2, 4])
def test_any_layout_loads_into_any_other_bit_for_bit(nproc: int, tmp_path: Path) -> None:
    """Every pair of layouts, with uneven and empty shards, 0-d, fp8, bool and complex tensors."""
    on_ranks(nproc, every_layout_into_every_other, tmp_path)


@distributed(nproc=2)
def load_all_layouts(root: Path) -> None:
    for make in LAYOUTS.values():
        target = zeroed(make())
        load(root, target)
        assert_true_values(target)


def test_two_ranks_read_what_one_process_wrote(tmp_path: Path) -> None:
    """Into every layout."""
    tensors = true_values()
    WritePlan.of(tensors, Coordinator.current()).write(tmp_path, tensors)
    load_all_layouts(tmp_path)


def on_mesh(mesh: DeviceMesh, value: torch.Tensor) -> DTensor:
    rank, size = mesh.get_local_rank(), mesh.size()
    rows = value.chunk(size)[rank].clone()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())


@distributed(nproc=4)
def test_pipeline_stages_and_copies_on_other_meshes_are_stored_once(tmp_path: Path) -> None:
    """Rank 0 names every tensor of the checkpoint, also those of other stages.

    Stage 0 on ranks 0 and 1, stage 1 on 2 and 3; `shared` sharded on each stage; `copied` plain on ranks 1, 2, 3.
    """
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stage, mesh = meshes["pipeline"].get_local_rank(), meshes["shard"]
    shared, copied = torch.arange(60.0).view(12, 5), torch.arange(7)
    tensors: dict[str, torch.Tensor] = {
        f"stage{stage}.weight": on_mesh(mesh, torch.full((6, 3), 1.0 + stage)),
        "shared": on_mesh(mesh, shared),
    }
    if dist.get_rank():
        tensors["copied"] = copied.clone()
    writer = save(tmp_path, tensors)
    with NativeReader(tmp_path) as reader:
        reader.verify()
        assert set(reader.tensors) == {"stage0.weight", "stage1.weight", "shared", "copied"}
    sizes = gathered(writer.layout.num_bytes - writer.layout.num_bytes % 4096)
    assert len(set(sizes)) == 1, "the copies of `shared` are written once"
    target = zeroed(tensors)
    load(tmp_path, target)
    assert same(whole(tensors), whole(target))


@distributed(nproc=2)
def test_replicas_share_the_work_equally(tmp_path: Path) -> None:
    """Large ones by rows, small ones in turn, plain or DTensor."""
    large, small = torch.randn(4096, 1024), {f"small.{i}": torch.randn(100) for i in range(40)}
    replica = DTensor.from_local(large, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    writer = save(tmp_path, {"plain": large, "replica": replica, **small})
    with NativeReader(tmp_path) as reader:
        reader.verify()
    sizes = gathered(writer.layout.num_bytes)
    assert abs(sizes[0] - sizes[1]) < 8192


@distributed(nproc=2)
def test_a_change_on_one_rank_makes_all_plan_anew(tmp_path: Path) -> None:
    """The plan is kept while nothing changes anywhere, and never by some ranks only."""
    coordinator = Coordinator.current()
    rank = dist.get_rank()
    tensors = {f"only.{rank}": torch.full((3,), float(rank)), "a": torch.ones(3)}  # of one kind, and held differently
    plan = WritePlan.of(tensors, coordinator)
    assert WritePlan.of(tensors, coordinator, plan) is plan
    if rank:
        tensors["new"] = torch.randn(2000)
    again = WritePlan.of(tensors, coordinator, plan)
    assert again is not plan
    assert (again.layout.num_bytes != plan.layout.num_bytes) == bool(rank)
    again.write(tmp_path, tensors)
    dist.barrier()
    with NativeReader(tmp_path) as reader:
        assert set(reader.tensors) == {"a", "only.0", "only.1", "new"}
        reader.verify()


@distributed(nproc=2)
def test_ranks_that_disagree_about_a_tensor_fail_together() -> None:
    """Other shapes under one name, a tensor that one rank cannot store, a shard that one rank does not list."""
    rank = dist.get_rank()
    coordinator = Coordinator.current()
    with pytest.raises((StateEncodingError, PeerError), match=r"disagree.*\bw\b"):
        WritePlan.of({"w": torch.ones(3 + rank)}, coordinator)
    with pytest.raises((StateEncodingError, PeerError), match="meta"):
        WritePlan.of({"w": torch.ones(3, device="meta" if rank else "cpu")}, coordinator)
    mesh = init_device_mesh("cpu", (2,))
    listed = {} if rank else {"w": on_mesh(mesh, torch.ones(4, 4))}
    with pytest.raises((StateEncodingError, PeerError), match="bytes"):
        WritePlan.of(listed, coordinator)
    shards = {"v": torch.ones(3), "w": DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)}
    both_write_the_same_rows = patch.object(DeviceMesh, "get_coordinate", lambda self: [0])
    with both_write_the_same_rows, pytest.raises((StateEncodingError, PeerError), match="overlap"):
        WritePlan.of(shards, coordinator)
    WritePlan.of(shards, coordinator)


@distributed(nproc=2)
def test_a_sum_that_ranks_have_not_made_is_refused_by_name() -> None:
    """A mean of a sharded gradient, as optimizers of one's own keep it."""
    mesh = init_device_mesh("cpu", (2,))
    mean = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]).mean()
    assert isinstance(mean, DTensor) and mean.placements[0].is_partial()
    with pytest.raises(StateEncodingError, match=r"optimizer\.a\.mean: ranks have not reduced it yet.*full_tensor"):
        WritePlan.of({"optimizer.a.mean": mean}, Coordinator.current())
