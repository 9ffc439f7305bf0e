"""DCP folders of several ranks: what torch.distributed.checkpoint saved from DTensors, and what is written here."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import world
from tests.world import Value, convert, manager, on_ranks, same, whole
from titan_ckpt import ExportConfig, InitialLoadConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError, LoadMismatchError, PeerError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.testing import distributed


class Net(nn.Module):
    """Rows that 2 and 4 ranks do not divide, a weight of one row, a name that starts as Hugging Face's do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"up": nn.Linear(3, 7), "one": nn.Linear(4, 1, bias=False)})
        self.register_buffer("count", torch.tensor(seed + 5))
        self.small = nn.Parameter(torch.randn(5, 2).bfloat16())


def shard(net: Net) -> Net:
    """Rows of everything with rows over all ranks; one rank's part of the single row is all, the others' is empty."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)))
    return net


def assert_is(net: Net, other: Net) -> None:
    assert same(whole(dict(net.state_dict())), dict(other.state_dict()))


def load(net: Net, source: Path, folder: Path, **settings: Any) -> None:
    world.load(manager(folder, net, initial_load=(InitialLoadConfig(str(source), **settings),), save=None))


def dcp_load(into: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp in one process, as meant here
        dcp.load(into, checkpoint_id=folder)


@distributed(nproc=2)
def save_with_torch(folder: Path, prefix: str) -> None:
    """As torchtitan does: the model under `model.` or at the top, the rest of the run beside it."""
    net = shard(Net())
    optimizer = {f"optimizer.state.{name}.exp_avg": p.detach() for name, p in net.named_parameters()}
    state = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    dcp.save(
        {**state, **optimizer, "lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}},
        checkpoint_id=folder,
    )


def load_anew(source: Path, folder: Path) -> None:
    """Load into other values, on one rank or in shards of several."""
    net = Net(seed=9)
    load(shard(net) if dist.is_initialized() else net, source, folder)
    assert_is(net, Net())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_torchtitan_folder_of_two_ranks_opens_on_one_and_on_four(tmp_path: Path, prefix: str) -> None:
    """Only the model is taken, wherever it lies, though its own names begin with `model.` too."""
    save_with_torch(tmp_path / "dcp", prefix)
    for nproc in (1, 4):
        on_ranks(nproc, load_anew, tmp_path / "dcp", tmp_path / str(nproc))
    wide = Net(seed=9).double()
    with pytest.raises(LoadMismatchError, match=r"set cast = true"):
        load(wide, tmp_path / "dcp", tmp_path / "no")
    load(wide, tmp_path / "dcp", tmp_path / "cast", cast=True)
    assert torch.equal(wide.small, Net().small.double())


@distributed(nproc=2)
def export_here(folder: Path) -> None:
    net = shard(Net())
    mesh = init_device_mesh("cpu", (2,))
    big = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1))
    net.copies = nn.Parameter(distribute_tensor(big, mesh, [Replicate()], src_data_rank=None))
    world.save(manager(folder, net, export=(ExportConfig("dcp"),), save=None), 1, last_step=True)


def test_an_export_of_two_ranks_holds_everything_once_and_opens_with_dcp_load(tmp_path: Path) -> None:
    """Replicas are written by one rank; plain dcp.load in one process reads the same values."""
    export_here(tmp_path)
    folder = tmp_path / "exports" / "step-1"
    assert sum(p.stat().st_size for p in folder.glob("*.distcp")) < 300 * 1000 * 4 + 20_000
    net = Net()
    loaded: dict[str, Any] = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    loaded["copies"] = torch.zeros(300, 1000)
    dcp_load(loaded, folder)
    copies = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1))
    assert same(loaded, {**net.state_dict(), "copies": copies})


@distributed(nproc=2)
def export_long_names(folder: Path) -> None:
    names = [f"{number:06d}" * 400 for number in range(2000)]  # 10 MB of lists, as of a large model
    DcpExport({name: torch.full((1,), float(number)) for number, name in enumerate(names)}).write(
        folder, Coordinator.current()
    )


def test_lists_of_more_than_a_store_takes_at_once_are_exported(tmp_path: Path) -> None:
    """The ranks' lists of tensors are larger than the 8 MiB at which a TCPStore closes the connection."""
    export_long_names(tmp_path / "dcp")
    with DcpReader(tmp_path / "dcp") as reader:
        assert len(reader.tensors) == 2000


def load_with_dcp_on_rank_1() -> None:
    if dist.get_rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"w": torch.zeros(2)}, checkpoint_id="not/there", no_dist=True)


def fill_with_dcp_on_rank_1(event: ExternalLoad) -> None:
    load_with_dcp_on_rank_1()
    event.mark(event.tensors)


class LoadsWhenItIsSaved:
    """A user's state."""

    def state_dict(self) -> dict[str, Any]:
        load_with_dcp_on_rank_1()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@distributed(nproc=2)
def test_a_tensor_of_a_state_that_differs_between_ranks_is_not_exported(tmp_path: Path) -> None:
    """A DCP folder has one place for it; the error names it, and what ranks have alike is exported."""
    export = (ExportConfig("torchtitan"),)
    for step, value in ((1, torch.ones(3)), (2, torch.ones(3) * dist.get_rank())):
        refused = pytest.raises(ExportError, match=r"1 value differs between ranks.*own\.value")
        run = manager(tmp_path, Net(), states={"own": Value(value)}, export=export, save=None)
        with run, refused if step == 2 else nullcontext():
            run.export(step, last_step=True)
        assert (tmp_path / "exports" / f"step-{step}").exists() == (step == 1)


@distributed(nproc=2)
def test_an_error_of_dcp_in_a_users_code_is_told_to_all_ranks(tmp_path: Path) -> None:
    """torch's CheckpointException is no Exception: caught as one it would leave the other ranks to wait in vain."""
    told = pytest.raises(PeerError, match=r"(?s)rank 1 failed: CheckpointException: .*not/there")
    own = pytest.raises(CheckpointException)
    for given in (
        {"components": ("optimizer",), "external_weights": fill_with_dcp_on_rank_1},
        {"states": {"s": LoadsWhenItIsSaved()}},  # every state is asked for when the manager is made
    ):
        with own if dist.get_rank() else told, manager(tmp_path, Net(), **given) as m:
            m.load()


@distributed(nproc=2)
def test_an_interrupt_on_one_rank_leaves_the_other_in_no_collective_of_an_export(tmp_path: Path) -> None:
    """Tensors that ranks compute together are computed after it, too, so the training's group can be used."""

    def summed(name: str) -> LazyTensor:
        def blocks() -> list[Block]:
            value = torch.ones(4)
            dist.all_reduce(value)
            if name == "a" and dist.get_rank() == 1:
                raise KeyboardInterrupt("by hand")
            return [Block(Chunk.whole((4,)), value)]

        info = TensorInfo((4,), torch.float32)
        return LazyTensor(info, blocks, collective=True, like=torch.empty(4, device="meta"))

    with pytest.raises((PeerError, KeyboardInterrupt), match="by hand"):
        DcpExport({name: summed(name) for name in "ab"}, {}).write(tmp_path / "out", Coordinator.current(20.0))
    value = torch.ones(())
    dist.all_reduce(value)
    assert value == 2


@distributed(nproc=2)
def export_adapted(folder: Path) -> None:
    net = Net()
    converters = convert(net, {"kind": "lora", "target_modules": ["up"], "rank": 2})
    with torch.no_grad():
        net.get_parameter("model.up.lora_b.weight").fill_(0.5)
    shard(net)
    world.save(
        manager(folder, net, model_converters=converters, export=(ExportConfig("dcp"),), save=None), 1, last_step=True
    )


def test_merged_weights_are_tensors_to_dcp_load(tmp_path: Path) -> None:
    """A weight that is computed when it is written is no pickled object in the folder, and has the merged values."""
    export_adapted(tmp_path)
    net = Net()
    convert(net, {"kind": "lora", "target_modules": ["up"], "rank": 2})
    up: Any = net.get_submodule("model.up")
    expected = Net().state_dict()
    expected["model.up.weight"] = up.weight + 8.0 * torch.full((7, 2), 0.5) @ up.lora_a.weight
    loaded: dict[str, Any] = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp_load(loaded, tmp_path / "exports/step-1")
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-6, atol=1e-6)
