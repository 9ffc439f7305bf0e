"""torchao's quantized optimizer state and weights on two ranks: exact if blocks align, else refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import Float8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from tests import world
from tests.unit.weights.test_inner_tensors import Run as Frozen
from tests.world import manager as build
from tests.zoo.optimizer_runs import comparable
from titan_ckpt import CheckpointManager
from titan_ckpt.components.quantized_state import parts
from titan_ckpt.errors import LoadMismatchError, StateEncodingError
from titan_ckpt.geometry.chunks import is_made_of_others, local_tensor
from titan_ckpt.testing.ranks import distributed

KINDS = {"8 bit": torchao.optim.AdamW8bit, "4 bit": torchao.optim.AdamW4bit, "fp8": torchao.optim.AdamWFp8}
NAMES = ("exp_avg", "exp_avg_sq")


class Run:
    """A model whose blocks lie within rows, span rows, or are none, and an optimizer that quantizes its state."""

    def __init__(self, folder: Path, kind: str, *shapes: tuple[int, int]) -> None:
        torch.manual_seed(dist.get_world_size() if dist.is_initialized() else 1)
        self.model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = KINDS[kind](self.model.parameters(), lr=0.1)
        self.manager = build(folder, self.model, self.optimizer, async_mode="disabled")

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 0.3
        with torch.compiler.set_stance("force_eager"):
            self.optimizer.step()

    def inner(self) -> dict[str, torch.Tensor]:
        """Return the bytes of the tensors inside the state, whole."""
        out: dict[str, torch.Tensor] = {}
        for i, parameter in enumerate(self.model.parameters()):
            for name in NAMES:
                value: Any = self.optimizer.state[parameter][name]
                own = parts(value, name) if is_made_of_others(value) else {"": value}
                out |= {f"{i}.{name}.{part}": whole_bytes(tensor) for part, tensor in own.items()}
        return out

    def resumed(self) -> dict[str, torch.Tensor]:
        """Load, and return the tensors inside the state; the optimizer can step on them."""
        assert world.load(self.manager).step == 1
        inner = self.inner()
        self.step()
        return inner

    def saved(self, folder: Path) -> None:
        """Take a step, save it, and put the tensors inside the state beside it."""
        with self.manager as manager:
            manager.load()
            self.step()
            manager.save(1)
        inner = self.inner()
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(inner, folder / "inner.pt")


def whole_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor or of all its shards, which are of one size."""
    local = local_tensor(value).detach().clone().view(torch.uint8)
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(local, value.device_mesh, value.placements).full_tensor()


SHAPES = (32, 512), (128, 64), (8, 8)


@distributed(nproc=2)
def save_on_two_ranks(folder: Path) -> None:
    """Save a step of every kind; refuse a matrix of which one rank's part would be quantized."""
    for kind in KINDS:
        Run(folder / kind, kind, *SHAPES).saved(folder / kind)
    world.load_fails(
        Run(folder, "8 bit", (41, 320)).manager,
        StateEncodingError,
        r"AdamW8bit: it quantizes .*\[41, 320\] on some ranks",
    )


@distributed(nproc=2)
def load_on_two_ranks(folder: Path) -> None:
    """Load the steps of one rank, and compare; refuse a matrix whose parts are too small to be quantized."""
    for kind in KINDS:
        assert_same(Run(folder / kind, kind, *SHAPES).resumed(), torch.load(folder / kind / "inner.pt"))
    _share_a_frozen_weight(folder / "frozen")
    _shard_frozen_weights(folder / "sharded")
    with Run(folder, "8 bit", (64, 64)).manager as manager, pytest.raises(LoadMismatchError) as caught:
        manager.load()
    assert "optimizer.0.exp_avg was stored as OptimState8bit" in str(caught.value)
    assert "2048 of its 4096 elements" in str(caught.value)


def _share_a_frozen_weight(folder: Path) -> None:
    """Save a frozen int8 weight that both ranks hold, and load it beside a head that they share."""
    first, second = Frozen(folder, "int8", 0), Frozen(folder, "int8", 1)
    with first.manager as manager:
        manager.load()
        first.step()
        manager.save(1)
    fully_shard(second.model.head)
    second.optimizer.param_groups[0]["params"] = list(second.model.head.parameters())
    assert world.load(second.manager).step == 1
    assert comparable(dict(first.model.base.state_dict())) == comparable(dict(second.model.base.state_dict()))


class Base(nn.Module):
    """A frozen weight of torchao, sharded by FSDP2 or by rows or columns with scales of each shard; and a head."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.head = nn.Linear(256, 256, bias=False), nn.Linear(256, 4)
        mesh = init_device_mesh("cpu", (2,))
        if kind == "int8 of FSDP2":
            quantize_(self.base, int8_weight_only_quantized_training())
        elif kind == "nf4 of FSDP2":
            self.base.weight = nn.Parameter(to_nf4(self.base.weight.detach()))
        else:
            dim = int(kind == "float8 columns")
            part = nn.Linear(*((256, 128) if dim == 0 else (128, 256)), bias=False)
            quantize_(part, Float8WeightOnlyConfig())
            shards = DTensor.from_local(part.weight.detach(), mesh, [Shard(dim)], run_check=False)
            self.base.weight = nn.Parameter(shards)
        self.base.requires_grad_(False)
        if "FSDP2" in kind:
            fully_shard(self.base, mesh=mesh)
        fully_shard(self.head, mesh=mesh)


def _shard_frozen_weights(folder: Path) -> None:
    """Save and load weights that are sharded by rows, each row with its scale; refuse others by name."""

    def manager(kind: str, model: Base) -> CheckpointManager:
        return build(folder / kind, model, async_mode="disabled")

    for kind in ("int8 of FSDP2", "float8 rows"):
        first, second = Base(kind, dist.get_rank()), Base(kind, 2 + dist.get_rank())
        for model in (first, second):
            with manager(kind, model) as m:
                assert m.load().step == (1 if model is second else 0)
                m.save(1)
        assert comparable(dict(first.state_dict())) == comparable(dict(second.state_dict())), kind
    for kind, name in (("nf4 of FSDP2", "NF4Tensor.quantized_data"), ("float8 columns", "Float8Tensor.scale")):
        message = rf"base\.weight\.{name}: .* cannot be saved\. Shard rows"
        world.load_fails(manager(kind, Base(kind, 0)), StateEncodingError, message)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 8
    assert not [name for name, value in a.items() if not torch.equal(value, b[name])]


def folders(root: Path) -> Path:
    for kind in KINDS:
        (root / kind).mkdir(parents=True)
    return root


def test_quantized_state_resumes_in_another_layout_or_is_refused(tmp_path: Path) -> None:
    """From two ranks to one and back, codes, scales and tables are the same bits; what does not fit is named."""
    two, one = folders(tmp_path / "two"), folders(tmp_path / "one")
    save_on_two_ranks(two)
    for kind in KINDS:
        assert_same(Run(two / kind, kind, *SHAPES).resumed(), torch.load(two / kind / "inner.pt"))
        Run(one / kind, kind, *SHAPES).saved(one / kind)
    Run(one, "8 bit", (64, 64)).saved(one)
    load_on_two_ranks(one)
