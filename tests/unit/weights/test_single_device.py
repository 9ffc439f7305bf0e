"""An init_weights written for one device, on a model whose tensors are DTensors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.world import same, whole
from titan_ckpt.testing import distributed
from titan_ckpt.weights.initialize import single_device
from titan_ckpt.weights.single_device import ValuesGoneError, WholeTensors, named_tensors


class Inner(nn.Module):
    """Several parameters and buffers, which are filled in different ways."""

    mask: torch.Tensor

    def __init__(self, scale_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(6, 5))
        self.vector = nn.Parameter(torch.zeros(7))
        self.scale = nn.Parameter(torch.zeros(scale_shape))
        self.register_buffer("mask", torch.zeros(4, 6))

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.matrix, std=0.5)
        self.vector = nn.Parameter(torch.linspace(0, 1, 7) + torch.rand(7))
        nn.init.constant_(self.scale, 2.0)
        self.mask = torch.rand(4, 6).triu()


class Model(nn.Module):
    """Every way of initializing that single-device code knows."""

    table: torch.Tensor
    running: torch.Tensor

    def __init__(self, scale_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.ModuleDict({"a": Inner(scale_shape), "b": Inner(scale_shape)})
        self.orthogonal = nn.Parameter(torch.zeros(5, 5))
        self.copied = nn.Parameter(torch.zeros(5, 5))
        self.by_rows = nn.Parameter(torch.zeros(6, 3))
        self.views = nn.ParameterList([nn.Parameter(torch.zeros(4, 3)) for _ in range(2)])
        self.register_buffer("table", torch.zeros(9))
        self.register_buffer("running", torch.zeros(3))
        self.inner.register_buffer("shared", self.running)

    @torch.no_grad()
    def init_weights(self) -> None:
        self.embedding.reset_parameters()
        self.embedding.weight.data.mul_(0.5)
        for inner in self.inner.values():
            assert isinstance(inner, Inner)
            inner.init_weights()
        nn.init.orthogonal_(self.orthogonal)
        self.copied.copy_(self.orthogonal.T * 2)
        self.by_rows.uniform_(-1, 1)
        self.by_rows[1:3] = torch.arange(6.0).view(2, 3)
        self.by_rows.data[4] += 1
        first, second = (view.data for view in self.views)
        second.normal_(std=1 / math.sqrt(self.views[0].shape[1]))
        first.normal_()
        second.add_(first)
        self.table = torch.rand(9) ** 2
        self.running.fill_(4)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make every tensor a DTensor: parameters by the first or the last dim, every other buffer too; aliases stay."""
    made: dict[int, Any] = {}
    for i, (_, (module, name), value) in enumerate([*named_tensors(model)]):
        placement = Replicate() if value.dim() == 0 or i % 5 == 4 else Shard((i % 2) * (value.dim() - 1))
        if id(value) not in made:
            sharded = distribute_tensor(torch.full_like(value, 77).detach(), mesh, [placement])
            made[id(value)] = nn.Parameter(sharded) if isinstance(value, nn.Parameter) else sharded
        table = module._parameters if isinstance(value, nn.Parameter) else module._buffers
        table[name] = made[id(value)]
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = whole({fqn: value for fqn, _, value in named_tensors(model)})
    return found


def expected_of(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model.init_weights()
    return values(model)


def initialized(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    with single_device(model):
        model.init_weights()
    return values(model)


@distributed(nproc=2)
def test_e1_an_init_for_one_device_initializes_a_sharded_model() -> None:
    """Fills, assignments, views, copies, aliases, nested modules: the values of one device, under FSDP2."""
    mesh = init_device_mesh("cpu", (2,))
    fsdp: Any = Model(scale_shape=(1,))  # FSDP2 refuses a parameter without a dim
    expected = expected_of(Model(scale_shape=(1,)))
    for inner in fsdp.inner.values():
        fully_shard(inner, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    objects = dict(fsdp.named_parameters())
    assert all(isinstance(value, DTensor) for value in objects.values())
    with pytest.warns(UserWarning, match="which is sharded"):
        assert same(initialized(fsdp), expected)
    assert all(objects[name] is value for name, value in fsdp.named_parameters()), "FSDP2 gathers these very objects"
    fsdp.unshard()
    for inner in fsdp.inner.values():
        inner.unshard()
    unsharded = {name: value.detach() for name, value in fsdp.named_parameters()}
    assert not any(isinstance(value, DTensor) for value in unsharded.values())
    assert same(unsharded, {name: expected[name] for name in unsharded})


@distributed(nproc=2)
def test_e2_assigned_values_keep_the_placement_and_what_would_be_lost_is_refused() -> None:
    """Objects and placements stay, so that an optimizer may hold them; one warning, whatever is assigned.

    Random values are those of one device; `.data =` and other shapes are errors that leave the model as it was.
    """
    expected = expected_of(Model())
    mesh = init_device_mesh("cpu", (2,))
    model = shard(Model(), mesh)
    before = {fqn: (value, value.placements) for fqn, _, value in named_tensors(model) if isinstance(value, DTensor)}
    assert {places for _, places in before.values()} == {(Replicate(),), (Shard(0),), (Shard(1),)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = initialized(model)
    assert same(found, expected)
    after = {fqn: value for fqn, _, value in named_tensors(model)}
    assert all(after[fqn] is value and value.placements == places for fqn, (value, places) in before.items())
    assert after.keys() == before.keys(), "buffers too"
    assert after["head.weight"] is after["embedding.weight"] and after["inner.shared"] is after["running"]
    ours = [str(w.message) for w in caught if "initialization assigns a whole tensor" in str(w.message)]
    assert len(ours) == 1 and "which is sharded" in ours[0]

    refused: Any = shard(Model(), mesh)
    lost = r"by_rows\.data = \.\.\. on a sharded tensor would be lost"
    with pytest.raises(RuntimeError, match=lost), single_device(refused):
        refused.by_rows.data = torch.ones(6, 3)
    with pytest.raises(ValueError, match=r"by_rows: initialization assigns shape \[2\]"), single_device(refused):
        refused.by_rows = nn.Parameter(torch.ones(2))
    assert isinstance(refused.by_rows, DTensor) and type(refused._parameters) is dict, "the model is as it was"


def test_e2_one_rank_and_no_mesh_give_the_same_values() -> None:
    """Plain tensors take the same path and keep their objects; without the context torch does the same."""
    expected = expected_of(Model())
    model = Model()
    objects = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(initialized(model), expected)
    assert all(objects[name] is value for name, value in model.named_parameters())


def test_e2_only_one_tensor_is_whole_at_a_time() -> None:
    """Wholes that nothing refers to are put away before the next one; a view that is held keeps its own."""
    model = nn.ModuleList([nn.Linear(3, 3, device="meta") for _ in range(4)])
    mode = WholeTensors(torch.device("cpu"))
    most = 0
    with torch.no_grad(), mode:
        mode.watch(model, lambda fqn, place: ((), False))
        for linear in model:
            assert isinstance(linear, nn.Linear)
            nn.init.trunc_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
            most = max(most, len(mode._open))
        assert most == 1
        first, second, third, _ = (value for name, value in model.named_parameters() if "weight" in name)
        first.zero_()
        held = first[0]
        second.zero_()
        assert len(mode._open) == 2
        del held
        third.zero_()
        assert len(mode._open) == 1
        with pytest.raises(ValuesGoneError, match=r"0\.weight: its values are read"):
            first.add_(1)
