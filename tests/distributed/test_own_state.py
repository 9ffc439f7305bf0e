"""State that modules make themselves on several ranks: collective hooks under FSDP2 and tensor parallelism."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from tests.own_state_models import DIM, KINDS, FusedGate, FusedHeads, add_hooks
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.errors import PeerError, ReplicaMismatchError
from titan_ckpt.testing import distributed
from titan_ckpt.weights import own_state
from titan_ckpt.weights.wrapper import ModelWrapper


class Run:
    """A model in a layout, AdamW, and batches that depend on the step alone."""

    def __init__(self, kind: str, layout: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        fused = nn.Sequential(FusedHeads(), FusedGate())
        self.net = nn.Sequential(nn.Linear(DIM, DIM), fused if kind == "fused" else KINDS[kind](), nn.Linear(DIM, 3))
        if layout == "fsdp":
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(self.net[1], mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        elif layout == "tensor parallel":
            plan = {"1.0.wqkv": ColwiseParallel(), "1.0.wo": RowwiseParallel()}
            parallelize_module(self.net, init_device_mesh("cpu", (2,)), plan)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=False)

    def manager(self, folder: Path) -> CheckpointManager:
        config = CheckpointConfig(save=SaveConfig(interval=1, timeout_seconds=30))
        return CheckpointManager(config, model_parts=[self.net], optimizers=[self.optimizer], base_folder=folder)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            mse_loss(self.net(x), x[:, :3]).backward()
            self.optimizer.step()

    def result(self) -> dict[str, Any]:
        """Return every parameter and buffer, whole."""
        named = [*self.net.named_parameters(), *self.net.named_buffers()]
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in named}


def assert_equal(result: dict[str, Any], expected: dict[str, Any], kind: str) -> None:
    assert list(result) == list(expected)
    for name, value in result.items():
        assert torch.equal(value, expected[name]), (kind, name)


@distributed(nproc=2)
def test_every_kind_of_module_resumes_exactly_when_it_is_sharded(tmp_path: Path) -> None:
    """Under FSDP2: two steps, a resume into other weights and two more are four steps, on both ranks."""
    for number, kind in enumerate(KINDS):
        whole, first, second = Run(kind, "fsdp"), Run(kind, "fsdp"), Run(kind, "fsdp", seed=1)
        whole.train(1, 4)
        with first.manager(tmp_path / str(number)) as m:
            m.load()
            first.train(1, 2)
            m.save(2)
        with second.manager(tmp_path / str(number)) as m:
            assert m.load().step == 2
            second.train(3, 4)
        assert_equal(second.result(), whole.result(), kind)


@distributed(nproc=2)
def test_fused_weights_go_from_one_layout_to_another(tmp_path: Path) -> None:
    """Saved by FSDP2, tensor parallel and plain ranks, loaded by each of them: the same bits, in parts or not."""
    layouts = ("fsdp", "tensor parallel", "plain")
    for saved in layouts:
        own_state.GATHERED_BYTES = 0 if saved == "fsdp" else 1 << 20  # of a large tensor, ranks keep their parts
        run = Run("fused", saved)
        run.train(1, 2)
        returned = ModelWrapper([run.net]).state_dict()["1.0.wq.weight"]
        assert not isinstance(returned, DTensor) or (returned.placements == (Shard(0),)) is (saved == "fsdp")
        with run.manager(tmp_path / saved) as m:
            m.save(2)
        for loaded in layouts:
            other = Run("fused", loaded, seed=1)
            with other.manager(tmp_path / saved) as m:
                assert m.load().step == 2
            assert_equal(other.result(), run.result(), f"{saved} to {loaded}")


@distributed(nproc=2)
def test_hooks_run_on_the_caller_s_thread_in_one_order(tmp_path: Path) -> None:
    """They may be collective, so that a writer must not call them, and ranks must not differ."""
    calls: list[str] = []
    run = Run("nested", "fsdp")
    for name, module in run.net.named_modules():

        def record(*_: object, name: str = name) -> None:
            assert threading.current_thread() is threading.main_thread()
            calls.append(name)

        if isinstance(module, FusedHeads | FusedGate):
            add_hooks(module, record, record)
    with run.manager(tmp_path) as m:
        m.load()
        for step in (1, 2):
            run.train(step, step)
            m.save(step)
        m.load()
    of_ranks: list[list[str]] = [[], []]
    dist.all_gather_object(of_ranks, calls)
    assert of_ranks[0] == of_ranks[1]
    assert len(calls) > 10


@distributed(nproc=2)
def test_a_moving_average_of_a_sharded_model_is_exact(tmp_path: Path) -> None:
    """The average is sharded like the model, fused weights included."""

    def build(seed: int) -> tuple[Run, AveragedModel]:
        run = Run("fused", "fsdp", seed)
        averaged = Run("fused", "plain", seed).net
        average = AveragedModel(averaged)
        fully_shard(average.module, mesh=init_device_mesh("cpu", (2,)))
        return run, average

    def manager(run: Run, average: AveragedModel) -> CheckpointManager:
        return CheckpointManager(
            CheckpointConfig(save=SaveConfig(interval=1, timeout_seconds=30)),
            model_parts=[run.net],
            optimizers=[run.optimizer],
            states={"average": average},
            base_folder=tmp_path,
        )

    run, average = build(0)
    with manager(run, average) as m:
        m.load()
        run.train(1, 1)
        average.update_parameters(run.net)
        run.train(2, 2)
        average.update_parameters(run.net)
        m.save(2)
    other, other_average = build(1)
    with manager(other, other_average) as m:
        assert m.load().step == 2
    assert_equal(other.result(), run.result(), "model")
    for value, expected in zip(other_average.state_dict().values(), average.state_dict().values(), strict=True):
        assert torch.equal(*((v.full_tensor() if isinstance(v, DTensor) else v) for v in (value, expected)))


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
    config = CheckpointConfig(save=SaveConfig(interval=1, timeout_seconds=30))
    with CheckpointManager(config, model_parts=[net], base_folder=tmp_path) as m:
        m.load()
        with pytest.raises((ReplicaMismatchError, PeerError), match=r"0\.weight"):
            m.save(1)
