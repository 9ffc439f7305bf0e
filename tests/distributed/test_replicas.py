"""Replicas: each byte is written once, evenly over all ranks, and copies that have drifted apart are named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import world
from tests.world import Value, heard, manager
from titan_ckpt.errors import LoadMismatchError, ReplicaMismatchError, SaveError
from titan_ckpt.testing import distributed


class Net(nn.Module):
    """Uneven rows on two shards, one large plain tensor's worth, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 5003, bias=False)
        self.flat = nn.Parameter(torch.randn(2, 600_000))  # fewer rows than ranks
        self.odd = nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(4))


def sizes(step: Path) -> list[int]:
    return [(step / f"rank-{rank:05d}.safetensors").stat().st_size for rank in range(4)]


@distributed(nproc=4)
def test_replicas_share_the_bytes_and_drifted_ones_are_named(tmp_path: Path) -> None:
    """DDP and HSDP: bytes once and evenly; a rank's own value of a parameter stops the save."""
    torch.manual_seed(0)
    whole = Net()
    total = sum(p.nbytes for p in whole.parameters())
    sharded = Net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    run = partial(manager, async_mode="disabled")
    for name, net in (("ddp", whole), ("hsdp", sharded)):
        world.save(run(tmp_path / name, net))
        of_ranks = sizes(tmp_path / name / "checkpoints/step-1")
        assert total < sum(of_ranks) < total + 4 * 16384, "headers apart, each byte is there once"
        assert max(of_ranks) - min(of_ranks) < 32768, of_ranks

    weight = sharded.odd.weight
    assert isinstance(weight, DTensor)
    if dist.get_rank() == 3:
        with torch.no_grad():
            weight.to_local().add_(1e-3)
    with pytest.raises(ReplicaMismatchError, match=r"odd\.weight: rank \d of 2 ranks") as caught:
        world.save(run(tmp_path / "drifted", sharded))
    assert caught.value.tensors == ("model.odd.weight",)
    assert not (tmp_path / "drifted/checkpoints/step-1").exists()

    if dist.get_rank() == 2:
        with torch.no_grad():
            whole.wide.weight[4000, 17] += 1
    with pytest.raises(SaveError, match=r"wide\.weight: rank 2 of 4"):
        world.save(run(tmp_path / "full", whole, check_replicas="full"))
    assert world.save(run(tmp_path / "off", whole, check_replicas="off"))
    with run(tmp_path / "sampled", whole) as m:
        found = None
        for step in range(1, 60):  # a lone value is found when its turn comes
            try:
                m.save(step)
            except ReplicaMismatchError as error:
                found = error.tensors
                break
        assert found == ("model.wide.weight",)


@distributed(nproc=2)
def test_buffers_that_differ_are_each_rank_s_own(tmp_path: Path) -> None:
    """A resume gives each rank its own; they are stored beside those of rank 0, and what is alike is stored once."""
    torch.manual_seed(0)
    model = Net()
    model.get_buffer("mean").add_(dist.get_rank())
    with heard("titan_ckpt.distributed.replicas") as lines, manager(tmp_path, model, async_mode="disabled") as m:
        assert m.save(1)
        model.get_buffer("mean").fill_(7)
        assert m.save(2)
    assert lines == []
    for step, mean in ((1, float(dist.get_rank())), (2, 7.0)):
        other = Net()
        with manager(tmp_path, other, save=None) as m:
            m.load(step)
        assert other.get_buffer("mean").tolist() == [mean] * 4
    files = [load_file(tmp_path / f"checkpoints/step-{step}/rank-00000.safetensors") for step in (1, 2)]
    assert files[0]["model.mean"].tolist() == [0.0] * 4
    assert [{name for name in file if name.startswith("states.")} for file in files] == [
        {"states.own buffers.rank-0.mean"}, set()
    ]  # fmt: skip


def statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


@distributed(nproc=2)
def states_and_statistics(root: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = fully_shard(statistics(), mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(8, 6) + rank)
    generator = torch.Generator().manual_seed(rank)
    own = Value({"generator": generator.get_state(), "queue": torch.arange(9.0)})
    alike = Value({"average": torch.ones(700_000), "steps": 4})
    expected = torch.rand(5, generator=generator)
    with manager(root, model, states={"own": own, "alike": alike}) as m:
        m.save(1)
        assert m.save(2)  # by the same plan
    for step in (1, 2):
        found = {"own": Value({}), "alike": Value({})}
        other: Any = fully_shard(statistics(), mesh=init_device_mesh("cpu", (2,)))
        with manager(root, other, states=found) as m:
            assert m.load(step).step == step
        generator.set_state(found["own"].value["generator"])
        assert torch.equal(torch.rand(5, generator=generator), expected)
        assert torch.equal(found["own"].value["queue"], torch.arange(9.0))
        assert torch.equal(found["alike"].value["average"], torch.ones(700_000))
        assert [b.tolist() for b in other.buffers()] == [b.tolist() for b in model.buffers()]


def test_what_differs_in_states_and_statistics_is_each_rank_s_own(tmp_path: Path) -> None:
    """Generators and statistics go on as each rank's; what is alike is stored once; other ranks are refused by name.

    Another number of ranks gets the statistics of rank 0.
    """
    states_and_statistics(tmp_path)
    step = tmp_path / "checkpoints" / "step-1"
    names = [name for rank in (0, 1) for name in load_file(step / f"rank-{rank:05d}.safetensors")]
    own = {f"states.own.rank-{rank}.value.{path}" for rank in (0, 1) for path in ("generator", "queue")}
    own |= {f"states.own buffers.rank-{rank}.{name}.running_mean" for rank in (0, 1) for name in (1, 3)}
    expected = {"states.alike.value.average", *own}
    assert {name for name in names if name.startswith("states.") and "running_var" not in name} == expected
    states = {"own": Value({"queue": None}), "alike": Value({})}
    refused = pytest.raises(LoadMismatchError, match=r"no state for: states \('own'\).*number of ranks.*exclude")
    with manager(tmp_path, statistics(), states=states, save=None) as m, refused:
        m.load()
    assert world.load(manager(tmp_path, statistics(), states={"alike": states["alike"]}, save=None)).step == 2
    assert torch.equal(states["alike"].value["average"], torch.ones(700_000))
