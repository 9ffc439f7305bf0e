"""Replicas: each byte is written once, evenly over all ranks, and copies that have drifted apart are named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests import world
from tests.world import Value, heard, manager
from titan_ckpt.components import snapshot
from titan_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadMismatchError,
    ReplicaMismatchError,
    SaveError,
)
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.geometry.nested import take_tensors
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


class Counted(nn.Module):
    """Statistics of each rank in buffers that are DTensors, one whole and one in shards, and in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(4)), 0
        mesh, rank = init_device_mesh("cpu", (2,)), float(dist.get_rank())
        for name, placement in (("mean", Replicate()), ("parts", Shard(0))):
            value = DTensor.from_local(torch.full((3,), rank), mesh, [placement], run_check=False)
            self.register_buffer(name, value)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.full((2,), self.count)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["seen"].tolist() == [state["count"]] * 2
        self.count = state["count"]


class Showing(nn.Module):
    """Returns a copy of its buffer as its state, and takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), float(dist.get_rank())))
        self.register_state_dict_post_hook(_copy_mean)  # type: ignore[no-untyped-call]


def _copy_mean(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    state[f"{prefix}mean"] = state[f"{prefix}mean"].clone()


@distributed(nproc=4)
def test_buffers_of_a_stage_go_to_no_rank_that_has_another_one(tmp_path: Path) -> None:
    """Two stages on two ranks each: the ranks of the one load the other's, and have the buffers of its lowest rank."""
    rank = dist.get_rank()
    for swapped in (0, 1):
        model = nn.ModuleDict({f"stage{rank // 2 ^ swapped}": nn.BatchNorm1d(4)})
        statistic = next(value for name, value in model.named_buffers() if name.endswith("running_mean"))
        if not swapped:
            statistic.fill_(rank)
            with manager(tmp_path, model, async_mode="disabled") as m:
                m.save(1)
            continue
        with manager(tmp_path, model, save=None) as m:
            m.load()
        assert statistic.tolist() == [2.0 * (1 - rank // 2)] * 4


@distributed(nproc=2)
def test_sharded_buffers_and_extra_state_that_differ_are_each_rank_s_own(tmp_path: Path) -> None:
    """Buffers that are DTensors by the part that a rank holds; those that the model's own code makes are refused."""
    model, rank = Counted(), dist.get_rank()
    model.count = 5 + rank
    with manager(tmp_path / "own", model, async_mode="disabled") as m:
        m.save(1)
    other = Counted()
    for value in other.buffers():
        local_tensor(value).fill_(9)
    with manager(tmp_path / "own", other, save=None) as m:
        m.load()
    assert other.count == 5 + rank
    assert [local_tensor(value).tolist() for value in other.buffers()] == [[float(rank)] * 3] * 2
    stored = load_file(tmp_path / "own/checkpoints/step-1/rank-00000.safetensors")
    assert stored["model.mean"].tolist() == [0.0] * 3, "the lowest rank's"
    assert {name for name in stored if name.startswith("states.")} == {
        "states.own buffers.rank-0.mean", "states.own buffers.rank-0._extra_state.seen"
    }  # fmt: skip
    with (
        manager(tmp_path / "made", Showing(), async_mode="disabled") as m,
        pytest.raises(SaveError, match=r"mean: rank \d of 2 ranks.*returns it as it is"),
    ):
        m.save(1)


class Shown(nn.Module):
    """A statistic in shards along one dim of a mesh, whose copies along the other dim differ."""

    def __init__(self, *placements: Placement) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2))
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", DTensor.from_local(torch.zeros(2), mesh, placements, run_check=False))


@distributed(nproc=4)
def test_a_part_of_a_buffer_goes_to_no_rank_that_holds_another_part(tmp_path: Path) -> None:
    """Ranks 1 and 2 hold each other's part at the resume, and keep the values of the lowest rank that had theirs."""
    rank = dist.get_rank()
    model, other = Shown(Replicate(), Shard(0)), Shown(Shard(0), Replicate())
    local_tensor(model.get_buffer("mean")).fill_(10 * (rank % 2) + rank // 2)
    with manager(tmp_path, model, async_mode="disabled") as m:
        m.save(1)
    for resumed, value in ((model, 10 * (rank % 2) + rank // 2), (other, (0, 0, 10, 11)[rank])):
        local_tensor(resumed.get_buffer("mean")).fill_(-1)
        with manager(tmp_path, resumed, save=None) as m:
            m.load()
        assert local_tensor(resumed.get_buffer("mean")).tolist() == [value] * 2


class Telling(nn.Module):
    """Returns a number as part of its state, and takes it back."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(2)), number

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}number"] = self.number

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.number = state_dict.pop(f"{prefix}number")
        super()._load_from_state_dict(state_dict, prefix, *args)


@distributed(nproc=2)
def test_numbers_of_a_state_dict_that_differ_are_refused_and_a_step_that_lacks_a_rank_s_own_buffer(
    tmp_path: Path,
) -> None:
    """A step has one number for all ranks; a buffer that it names and does not hold is no buffer of rank 0."""
    rank = dist.get_rank()
    telling = Telling(rank)
    with manager(tmp_path / "numbers", telling, async_mode="disabled") as m:
        with pytest.raises(CheckpointError, match=r"are not equal on all ranks: number\. .*get_extra_state"):
            m.save(1)
        telling.number = 7
        m.save(2)
    again = Telling(rank)
    with manager(tmp_path / "numbers", again, save=None) as m:
        m.load()
    assert again.number == 7

    model = Net()
    model.get_buffer("mean").add_(rank)
    forgetful = mock.patch.object(snapshot, "take_tensors", lambda value, key, tensors: take_tensors(value, key, {}))
    with forgetful, manager(tmp_path / "buffers", model, async_mode="disabled") as m:
        m.save(1)
    world.load_fails(
        manager(tmp_path / "buffers", Net(), save=None),
        CorruptCheckpointError,
        rf"'own buffers': its tensors states\.own buffers\.rank-{rank}\.mean are not stored",
    )


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
