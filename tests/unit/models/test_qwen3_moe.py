"""Qwen3-MoE without any other library: routing, gradients, what is counted, table, sharded experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.world import shard
from titan_ckpt.errors import ConfigError
from titan_ckpt.geometry.chunks import Chunk, TensorInfo, blocks_of, info_of
from titan_ckpt.models.qwen3_moe import FLAVORS, MixtureOfExperts, Qwen3Moe, Qwen3MoeConfig, imbalance
from titan_ckpt.testing import distributed
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper

TINY = replace(FLAVORS["debug-1m"], num_layers=2, vocab_size=64, max_seq_len=32, num_experts=5, expert_dim=6)
"""Five experts do not divide by two ranks."""


def initialized(config: Qwen3MoeConfig, seed: int = 0) -> Qwen3Moe:
    torch.manual_seed(seed)
    model = Qwen3Moe(config)
    model.init_weights()
    return model


def mixture(num_experts: int, per_token: int) -> MixtureOfExperts:
    config = replace(TINY, num_experts=num_experts, experts_per_token=per_token)
    made = MixtureOfExperts(config)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def one_by_one(moe: MixtureOfExperts, token: torch.Tensor) -> torch.Tensor:
    """Compute one token the obvious way."""
    probabilities = (moe.router.weight @ token).softmax(-1)
    best = probabilities.argsort(descending=True)[: moe.router.experts_per_token]
    total = probabilities[best].sum()
    out = torch.zeros_like(token)
    for e in best.tolist():
        hidden = F.silu(moe.experts.w1[e] @ token) * (moe.experts.w3[e] @ token)
        out += probabilities[e] / total * (moe.experts.w2[e] @ hidden)
    return out


def test_every_sparse_layer_has_a_router() -> None:
    """In the shape that was published it is every layer."""
    with torch.device("meta"):
        assert len(Qwen3Moe(FLAVORS["30B-A3B"]).routers()) == 48


def test_gradients_are_those_of_computing_token_by_token() -> None:
    """Router, chosen experts and input get the same gradients either way; an expert nobody chose gets zeros."""
    moe = mixture(16, 2)
    x = torch.randn(1, 4, 96, requires_grad=True)
    wanted = [x, *moe.parameters()]
    mine = torch.autograd.grad(moe(x).square().sum(), wanted)
    one_after_another = torch.stack([one_by_one(moe, token) for token in x[0]])
    obvious = torch.autograd.grad(one_after_another.square().sum(), wanted)
    for a, b in zip(mine, obvious, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
    assert any(bool((expert == 0).all()) for expert in mine[2])


def test_a_router_counts_what_it_gave_to_whom_while_training() -> None:
    """Counts add up over forward passes, stop outside training, start again on reset, and are in no state dict."""
    model = initialized(TINY)
    (router,) = model.routers().values()
    for _ in range(2):
        model(torch.randint(0, 64, (3, 10)))
    load = router.tokens.clone()
    assert load.sum() == 2 * 30 * TINY.experts_per_token
    assert 1 <= imbalance(load) <= TINY.num_experts
    model.eval()(torch.randint(0, 64, (3, 10)))
    assert torch.equal(router.tokens, load)
    model.reset_buffers()
    assert router.tokens.sum() == 0
    assert load.sum() > 0
    assert not [key for key in model.state_dict() if "tokens" in key.split(".")[-1]]


def test_counts_survive_casting_and_materializing() -> None:
    """`.to(bfloat16)` leaves what is counted exact; meta -> to_empty starts at zero."""
    model = initialized(TINY)
    model(torch.randint(0, 64, (3, 10)))
    (router,) = model.routers().values()
    before = router.tokens.clone()
    model.to(torch.bfloat16)
    assert torch.equal(router.tokens, before)
    with torch.device("meta"):
        empty = Qwen3Moe(TINY)
    empty.to_empty(device="cpu")
    (router,) = empty.routers().values()
    assert router.tokens.tolist() == [0] * TINY.num_experts


def test_a_shape_that_cannot_be_routed_is_refused() -> None:
    """More experts per token than there are, or a step of no layers, is an error with all reasons."""
    with pytest.raises(ConfigError) as caught:
        replace(TINY, experts_per_token=9, sparse_step=0)
    assert {p.split(":")[0] for p in caught.value.problems} == {"experts_per_token", "sparse_step"}


def numbered(config: Qwen3MoeConfig) -> dict[str, torch.Tensor]:
    """Whole native tensors in which every value is different, in the order of the model."""
    start, made = 0, {}
    with torch.device("meta"):
        shapes = {fqn: value.shape for fqn, value in Qwen3Moe(config).state_dict().items()}
    for fqn, shape in shapes.items():
        made[fqn] = torch.arange(start, start + shape.numel(), dtype=torch.float64).view(shape)
        start += shape.numel()
    return made


def file_tensors(natives: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the folder's tensors the obvious way, on whole tensors."""
    table = Qwen3Moe(TINY).key_map()
    made: dict[str, torch.Tensor] = {}
    for fqn, value in natives.items():
        keys = table.group_of_fqn(fqn).keys
        made |= dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
    return made


@distributed(nproc=2)
def test_two_ranks_of_fsdp_fill_and_write_five_experts() -> None:
    """Rank 0 holds three experts and rank 1 two: each reads just those, and together they write the folder's tensors.

    Then the sharded model takes a training step, and both ranks see the same loss as an unsharded one.
    """
    natives = numbered(TINY)
    files = file_tensors(natives)
    model = Qwen3Moe(TINY).double()
    shard(model)
    transforms = StateDictTransforms(model.key_map())
    infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in files.items()}
    plan = transforms.from_file(ModelWrapper([model]).state_dict(), infos, None, cast=False)
    assert not (plan.report.missing or plan.report.unexpected or plan.report.mismatched)
    for request in plan.requests:
        source = files[request.key]
        request.data.copy_(source[request.chunk.within(Chunk.whole(source.shape))].reshape(request.data.shape))
    for fqn, value in ModelWrapper([model]).state_dict().items():
        for block in blocks_of(value):
            assert torch.equal(block.data, natives[fqn][block.chunk.within(Chunk.whole(info_of(value).shape))])
    touched = {request.key for request in plan.requests if ".experts." in request.key}
    experts = {int(key.split(".experts.")[1].split(".")[0]) for key in touched}
    assert experts == ({0, 1, 2} if torch.distributed.get_rank() == 0 else {3, 4})
    for group in transforms.to_file(ModelWrapper([model]).state_dict(), None, None):
        for piece in (p for index, block in group.blocks() for p in group.cut(index, block)):
            expected = files[piece.key][piece.chunk.within(Chunk.whole(files[piece.key].shape))]
            assert torch.equal(piece.data.reshape(expected.shape), expected)

    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = initialized(TINY)
    with torch.no_grad():
        for fqn, value in ModelWrapper([model]).state_dict().items():
            for block in blocks_of(value):
                block.data.copy_(whole.state_dict()[fqn][block.chunk.within(Chunk.whole(info_of(value).shape))])
    losses = []
    for one in (model, whole.double()):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(2):
            loss = F.cross_entropy(one(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-9)
    assert losses[1] < losses[0]
