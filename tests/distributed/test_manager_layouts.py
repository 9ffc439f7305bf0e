"""CheckpointManager in every layout, one to another: weights and AdamW state bit for bit, and stages that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tests.world as kit
from tests.run_folder import RunFolder
from tests.world import Bare, Value, differing, on_ranks, same, shard, step_on, weights_and_moments, whole
from tests.world import manager as build
from titan_ckpt import CheckpointManager, ExportConfig
from titan_ckpt.errors import BaseMismatchError, CheckpointError, LoadMismatchError, SaveError
from titan_ckpt.testing import distributed

RATES = (0.5, 0.25)
SEED = 3


class Layer(nn.Linear):
    """A linear layer that keeps something beside its tensors."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """Two layers, which a pipeline cuts in two stages; sizes that 2 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Layer(6, 9), "1": Layer(9, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def single() -> list[nn.Module]:
    return [Net()]


def ddp() -> list[nn.Module]:
    """Compiled from outside, so that two wrappers lie around the model."""
    return [torch.compile(DistributedDataParallel(Net()), backend="eager")]  # type: ignore[list-item]


def fsdp() -> list[nn.Module]:
    return [shard(Net())]


def pipeline() -> list[nn.Module]:
    """Rank 0 and 1 have one layer each, further ranks none at all."""
    net = Net()
    for name in [name for name in net.layers if name != str(dist.get_rank())]:
        del net.layers[name]
    return [net]


# tests/distributed/trainer_layouts.py has the layouts that titan-ckpt train makes itself
LAYOUTS: dict[str, tuple[int, Callable[[], list[nn.Module]]]] = {
    "single": (1, single),
    "ddp": (2, ddp),
    "fsdp": (2, fsdp),
    "pipeline": (2, pipeline),
    "pipeline_and_idle_rank": (3, pipeline),
}


class Run:
    """A model in a layout, with AdamW in two groups whose gradients depend on names alone: every layout agrees."""

    def __init__(self, layout: str) -> None:
        self.parts = LAYOUTS[layout][1]()
        wrapped: Any = self.parts[0]
        self.nets: list[nn.Module] = [wrapped._orig_mod.module] if layout == "ddp" else self.parts
        named = list(self.nets[0].named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in named if p.dim() > 1], "lr": 9.0, "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "lr": 9.0, "weight_decay": 0.0},
        ]
        self.optimizers = [torch.optim.AdamW(groups)] if named else []

    def train(self, steps: int) -> None:
        for optimizer in self.optimizers:
            for group, rate in zip(optimizer.param_groups, RATES, strict=True):
                group["lr"] = rate
        for name, module in self.nets[0].named_modules():
            if isinstance(module, Layer):
                module.seen = 10 + int(name[-1])
        with torch.no_grad():
            for name, p in self.nets[0].named_parameters():
                p.copy_(_like(p, _values(name, 0, p)))
        for step in range(1, steps + 1):
            for name, p in self.nets[0].named_parameters():
                p.grad = _like(p, _values(name, step, p))
            for optimizer in self.optimizers:
                optimizer.step()

    def manager(self, folder: Path, **settings: Any) -> CheckpointManager:
        states = settings.pop("states", None)
        return build(folder, *self.parts, *self.optimizers, **settings, states=states)

    def whole(self) -> dict[str, Any]:
        """Everything this rank has, gathered."""
        out = weights_and_moments(self.nets[0], *self.optimizers)
        out |= {f"{name}.seen": layer.seen for name, layer in self.nets[0].named_modules() if isinstance(layer, Layer)}
        for optimizer in self.optimizers:
            out["rates"] = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        return out


def _values(name: str, step: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + step + sum(map(ord, name)))
    return torch.randn(like.shape, generator=generator)


def _like(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def assert_is_the_run_that_was_saved(run: Run) -> None:
    single, held = Run("single"), run.whole()
    single.train(3)
    expected = single.whole()
    assert not (found := differing(held, {name: expected[name] for name in held})), found


def assert_has_the_weights(run: Run) -> None:
    single, held = Run("single"), whole(dict(run.nets[0].named_parameters()))
    single.train(3)
    expected = dict(single.nets[0].named_parameters())
    assert not (found := differing(held, {name: whole(expected[name]) for name in held})), found


def layouts_here() -> list[str]:
    """Return the layouts that this number of ranks has."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return [layout for layout, (nproc, _) in LAYOUTS.items() if nproc == world]


def save_everywhere(root: Path) -> None:
    for layout in layouts_here():
        run = Run(layout)
        run.train(3)
        kit.save(run.manager(root / layout, export=(ExportConfig("dcp"),)), 3, last_step=True)


def load_everywhere(root: Path) -> None:
    """Resume a step of another layout, a single process that of each, and start another run from its export."""
    names = [*LAYOUTS]
    for layout in layouts_here():
        for saved in names if layout == "single" else [names[names.index(layout) - 1]]:
            run = Run(layout)
            assert kit.load(run.manager(root / saved)).step == 3
            assert_is_the_run_that_was_saved(run)
            other = Run(layout)
            assert kit.load(other.manager(root / "b", initial_load=[root / saved / "exports/step-3"])).step == 0
            assert_has_the_weights(other)


def test_each_layout_takes_what_any_other_one_saves_and_exports(tmp_path: Path) -> None:
    """Weights, moments, counts, hyperparameters and extra state: the same bits, there and in a single process.

    A DCP export of stages and of shards gives each of them the weights.
    """
    for act in (save_everywhere, load_everywhere):
        for nproc in (1, 2, 3):
            on_ranks(nproc, act, tmp_path)


class State(Value):
    """A state that is its value; an exception is raised when it is loaded."""

    def state_dict(self) -> Any:
        return None if isinstance(self.value, Exception) else self.value

    def load_state_dict(self, state_dict: Any) -> None:
        if isinstance(self.value, Exception):
            raise self.value
        self.value = state_dict


@distributed(nproc=2)
def test_a_stage_gets_its_own_state_back(tmp_path: Path) -> None:
    """An average of a stage's weights has other names and values on each rank; what all have alike is stored once."""
    rank = dist.get_rank()
    own = {"count": rank, "average": {f"layers.{rank}.weight": torch.full((2, 2), float(rank))}}
    kit.save(Run("pipeline").manager(tmp_path, states={"ema": State(own), "train": State({"tokens": 5})}))
    found = {"ema": State({}), "train": State({})}
    kit.load(Run("pipeline").manager(tmp_path, states=found))
    assert found["ema"].value["count"] == rank
    assert torch.equal(found["ema"].value["average"][f"layers.{rank}.weight"], torch.full((2, 2), float(rank)))
    assert found["train"].value == {"tokens": 5}
    assert '"tokens"' in (tmp_path / "checkpoints/step-1/state.json").read_text()


@distributed(nproc=2)
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """Whatever a state raises while it is saved or loaded: nobody waits, both ranks know, and the next one works."""
    run = Run("ddp")
    state = State({"a": 1})
    with run.manager(tmp_path, states={"it": state}) as manager:
        state.value = object() if dist.get_rank() == 1 else {"a": 1}
        with pytest.raises(CheckpointError, match=r"states\.it"):
            manager.save(1)
        state.value = {"a": 1}
        manager.save(2)
        if dist.get_rank() == 1:
            state.value = RuntimeError("no room for it")
        with pytest.raises((RuntimeError, CheckpointError), match="no room for it"):
            manager.load()
        state.value = None
        assert manager.load().step == 2


@distributed(nproc=2)
def test_ranks_that_save_different_steps_are_stopped(tmp_path: Path) -> None:
    """One rank that counts otherwise would make a step of two."""
    with pytest.raises(SaveError, match="every rank must call save"):
        kit.save(Run("ddp").manager(tmp_path), 1 + dist.get_rank())


@distributed(nproc=2)
def test_a_missing_source_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """A path that only one machine has: both ranks stop at once."""
    there = tmp_path / f"rank-{dist.get_rank()}"
    if dist.get_rank() == 0:
        there.mkdir()
        save_file({n: p.detach() for n, p in Net().named_parameters()}, there / "model.safetensors")
    kit.load_fails(Run("ddp").manager(tmp_path, initial_load=[there]), CheckpointError, "is not there")


@distributed(nproc=2)
def test_state_of_parameters_that_no_stage_trains_is_named_on_every_rank(tmp_path: Path) -> None:
    """Another stage's parameters are no strangers; those that nobody trains are."""
    run = Run("pipeline")
    run.train(1)
    kit.save(run.manager(tmp_path))
    other = Run("pipeline")
    if dist.get_rank() == 1:
        other.optimizers = []
    kit.load_fails(other.manager(tmp_path), LoadMismatchError, r"2 trained there.*layers\.1\.bias")


@distributed(nproc=2)
def test_gathered_parameters_after_an_evaluation_do_not_hide_the_shards(tmp_path: Path) -> None:
    """FSDP2 keeps the root's parameters gathered after a forward without a backward: names and ties still hold."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[2].weight = net[0].weight
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    run = kit.Run(net, is_laid_out=True)
    train = partial(step_on, net, run.optimizer, torch.ones(1, 4))

    def evaluate() -> None:
        with torch.no_grad():
            net(torch.ones(1, 4))

    train()
    evaluate()
    with run.manager(tmp_path) as manager:
        evaluate()
        manager.save(1)
        wanted = run.state()
        train()
        evaluate()
        manager.load()
        assert same(run.state(), wanted)


class Adapters(Bare):
    """Owns the parameters called `lora`, which only the first stage has."""

    def key_filter(self, fqn: str) -> bool:
        return fqn.endswith("lora")


def adapted(base: Path, folder: RunFolder) -> tuple[Net, CheckpointManager]:
    [net] = pipeline()
    assert isinstance(net, Net)
    net.requires_grad_(requires_grad=False)  # a base that is trained would be saved
    if dist.get_rank() == 0:
        net.layers["0"].register_parameter("lora", nn.Parameter(torch.zeros(3)))
    return net, build(folder, net, initial_load=[base], model_converters=Adapters())


@distributed(nproc=2)
def adapt_a_stage(base: Path, other: Path, folder: RunFolder) -> None:
    net, manager = adapted(base, folder)
    with manager:
        assert manager.load().step == 0
        if dist.get_rank() == 0:
            nn.init.constant_(net.get_parameter("layers.0.lora"), 7.0)
        manager.save(1)
    again, manager = adapted(base, folder)
    assert kit.load(manager).step == 1
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))
    _, manager = adapted(other, folder)
    kit.load_fails(manager, BaseMismatchError, "trained on another base")


def test_a_stage_without_adapters_takes_part_in_those_of_another(run_folder: RunFolder) -> None:
    """The base's digest spans all stages, the save holds the adapter alone, and another base is named on each rank."""
    for name, rate in (("base", 0.1), ("other", 0.2)):
        net = Net()
        nn.init.constant_(net.layers["1"].bias, rate)  # type: ignore[arg-type]
        kit.save(build(run_folder.base / name, net))
    base, other = (run_folder.base / name / "checkpoints" / "step-1" for name in ("base", "other"))
    adapt_a_stage(base, other, run_folder)
    stored = [load(run_folder.read(1, f"rank-{rank:05d}.safetensors")) for rank in range(2)]
    assert [name for tensors in stored for name in tensors] == ["model.layers.0.lora"]
