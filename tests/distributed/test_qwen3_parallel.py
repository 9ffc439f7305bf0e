"""Qwen3-MoE in every layout: the same files. It and Qwen3 compute the same under tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.layouts import split_heads
from tests.distributed.test_hf_parallel import (
    Layout,
    columns,
    fsdp,
    fsdp_and_tensor_parallel,
    pipeline,
    tensor_parallel,
    write_and_load,
)
from tests.world import on_ranks
from titan_ckpt.models import qwen3, qwen3_moe
from titan_ckpt.models.qwen3 import Qwen3
from titan_ckpt.models.qwen3_moe import Qwen3Moe
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict

DENSE = replace(
    qwen3.FLAVORS["debug-0.5m"], vocab_size=161, max_seq_len=64, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=18
)
"""54 rows of keys: on 2 ranks and on 4 a shard begins inside a head."""
SPARSE = replace(
    qwen3_moe.FLAVORS["debug-1m"], vocab_size=161, max_seq_len=64, num_layers=2, num_experts=5, expert_dim=27
)
"""One dense layer, and one of five experts of 27 rows: neither divides."""
EVEN_DENSE = replace(DENSE, num_heads=4, num_kv_heads=2)

Model = Qwen3 | Qwen3Moe


def sparse() -> Model:
    return _initialised(Qwen3Moe(SPARSE))


def _initialised(model: Model) -> Model:
    """The same values on every rank."""
    torch.manual_seed(3)
    model.init_weights()
    return model


def experts_and_rows(model: Model) -> StateDict:
    """Experts over one axis of ranks, the rows of each over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return {
        k: distribute_tensor(v, mesh, [Shard(0), Shard(1) if v.dim() > 1 else Replicate()])
        for k, v in model.state_dict().items()
    }


@pytest.mark.parametrize(
    ("nproc", "layouts"),
    [(2, [fsdp, tensor_parallel, pipeline, columns]), (4, [fsdp_and_tensor_parallel, experts_and_rows, columns])],
    ids=["two", "four"],
)
def test_ranks_write_and_load_the_same_folder_in_every_layout(
    tmp_path: Path, nproc: int, layouts: list[Layout]
) -> None:
    """FSDP2, tensor parallel, stages, columns, and experts cut by rows: the same bytes as of one rank, and back."""
    on_ranks(nproc, write_and_load, tmp_path, layouts, sparse)


@distributed(nproc=2)
def test_tensor_parallel_computes_and_differentiates_like_one_rank() -> None:
    """Logits and every gradient, those of the per-head norms too, are the whole model's."""
    tokens = torch.randint(0, 161, (2, 20), generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (2,))
    for config in (EVEN_DENSE, SPARSE):
        whole, split = (
            _initialised(Qwen3(config) if isinstance(config, qwen3.Qwen3Config) else Qwen3Moe(config)) for _ in range(2)
        )
        for layer in split.layers.values():
            split_heads(layer, mesh)
        for model in (whole, split):
            model(tokens).square().sum().backward()
        with torch.no_grad():
            assert (whole(tokens) - split(tokens)).abs().max() <= 1e-5
        expected = {fqn: p.grad for fqn, p in whole.named_parameters()}
        for fqn, parameter in split.named_parameters():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            truth = expected[fqn]
            assert found is not None, fqn
            assert truth is not None, fqn
            assert (found - truth).abs().max() <= 1e-4 * truth.abs().max(), fqn
