"""State that modules make themselves on several ranks: collective hooks under FSDP2 and tensor parallelism."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from tests import world
from tests.own_state_models import DIM, KINDS, FusedGate, FusedHeads, add_hooks
from tests.world import Run, gathered, manager, same, whole
from titan_ckpt.errors import PeerError, ReplicaMismatchError
from titan_ckpt.testing import distributed
from titan_ckpt.weights import own_state
from titan_ckpt.weights.wrapper import ModelWrapper


def run(kind: str, layout: str, seed: int = 0) -> Run:
    """Return a model in a layout, with AdamW."""
    torch.manual_seed(seed)
    fused = nn.Sequential(FusedHeads(), FusedGate())
    net = nn.Sequential(nn.Linear(DIM, DIM), fused if kind == "fused" else KINDS[kind](), nn.Linear(DIM, 3))
    mesh = init_device_mesh("cpu", (2,))
    if layout == "fsdp":
        fully_shard(net[1], mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif layout == "tensor parallel":
        parallelize_module(net, mesh, {"1.0.wqkv": ColwiseParallel(), "1.0.wo": RowwiseParallel()})
    return Run(net, is_laid_out=True, foreach=False)


def train(run: Run, first: int, last: int) -> None:
    """Train on batches that depend on the step alone."""
    for step in range(first, last + 1):
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
        run.optimizer.zero_grad()
        mse_loss(run.model(x), x[:, :3]).backward()
        run.optimizer.step()


@distributed(nproc=2)
def test_every_kind_of_module_resumes_exactly_when_it_is_sharded(tmp_path: Path) -> None:
    """Under FSDP2: two steps, a resume into other weights and two more are four steps, on both ranks."""
    for number, kind in enumerate(KINDS):
        whole, first, second = run(kind, "fsdp"), run(kind, "fsdp"), run(kind, "fsdp", seed=1)
        train(whole, 1, 4)
        with first.manager(tmp_path / str(number)) as m:
            m.load()
            train(first, 1, 2)
            m.save(2)
        with second.manager(tmp_path / str(number)) as m:
            assert m.load().step == 2
            train(second, 3, 4)
        assert same(second.state(), whole.state()), kind


@distributed(nproc=2)
def test_fused_weights_go_from_one_layout_to_another(tmp_path: Path) -> None:
    """Saved by FSDP2, tensor parallel and plain ranks, loaded by each of them: the same bits, in parts or not."""
    layouts = ("fsdp", "tensor parallel", "plain")
    for saved in layouts:
        own_state.GATHERED_BYTES = 0 if saved == "fsdp" else 1 << 20  # of a large tensor, ranks keep their parts
        first = run("fused", saved)
        train(first, 1, 2)
        returned = ModelWrapper([first.model]).state_dict()["1.0.wq.weight"]
        assert not isinstance(returned, DTensor) or (returned.placements == (Shard(0),)) is (saved == "fsdp")
        world.save(first.manager(tmp_path / saved), 2)
        for loaded in layouts:
            other = run("fused", loaded, seed=1)
            assert world.load(other.manager(tmp_path / saved)).step == 2
            assert same(other.state(), first.state()), f"{saved} to {loaded}"


@distributed(nproc=2)
def test_hooks_run_on_the_caller_s_thread_in_one_order(tmp_path: Path) -> None:
    """They may be collective, so that a writer must not call them, and ranks must not differ."""
    calls: list[str] = []
    nested = run("nested", "fsdp")
    for name, module in nested.model.named_modules():

        def record(*_: object, name: str = name) -> None:
            assert threading.current_thread() is threading.main_thread()
            calls.append(name)

        if isinstance(module, FusedHeads | FusedGate):
            add_hooks(module, record, record)
    with nested.manager(tmp_path) as m:
        m.load()
        for step in (1, 2):
            train(nested, step, step)
            m.save(step)
        m.load()
    assert gathered(calls) == [calls] * 2
    assert len(calls) > 10


@distributed(nproc=2)
def test_a_moving_average_of_a_sharded_model_is_exact(tmp_path: Path) -> None:
    """The average is sharded like the model, fused weights included."""

    def build(seed: int) -> tuple[Run, AveragedModel]:
        average = AveragedModel(run("fused", "plain", seed).model)
        fully_shard(average.module, mesh=init_device_mesh("cpu", (2,)))
        return run("fused", "fsdp", seed), average

    first, average = build(0)
    with first.manager(tmp_path, states={"average": average}) as m:
        m.load()
        for step in (1, 2):
            train(first, step, step)
            average.update_parameters(first.model)
        m.save(2)
    other, other_average = build(1)
    assert world.load(other.manager(tmp_path, states={"average": other_average})).step == 2
    assert same(other.state(), first.state())
    assert same(whole(dict(other_average.state_dict())), whole(dict(average.state_dict())))


@distributed(nproc=2)
def test_shards_that_a_hook_returns_as_plain_tensors_are_refused(tmp_path: Path) -> None:
    """They look like copies of each other and are not: the error says so, and nothing is saved."""

    def localise(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].to_local().clone()

    def globalise(module: nn.Linear, state: dict[str, Any], prefix: str, *_: Any) -> None:
        like = module.weight
        assert isinstance(like, DTensor)
        state[f"{prefix}weight"] = DTensor.from_local(state[f"{prefix}weight"], like.device_mesh, like.placements)

    net = nn.Sequential(nn.Linear(DIM, DIM))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    add_hooks(net[0], localise, globalise)
    with manager(tmp_path, net) as m:
        m.load()
        with pytest.raises((ReplicaMismatchError, PeerError), match=r"0\.weight"):
            m.save(1)
