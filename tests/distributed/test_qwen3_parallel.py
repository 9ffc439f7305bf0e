"""Qwen3 and Qwen3-MoE in every layout: the same files, and under tensor parallelism the same logits and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.world import assert_same_bytes
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk, blocks_of, info_of
from titan_ckpt.models import qwen3, qwen3_moe
from titan_ckpt.models.layers import FeedForward
from titan_ckpt.models.qwen3 import Qwen3
from titan_ckpt.models.qwen3_moe import Qwen3Moe
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict
from titan_ckpt.weights.digest import logical_digests
from titan_ckpt.weights.transforms import StateDictTransforms

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


def dense() -> Model:
    return _initialised(Qwen3(DENSE))


def sparse() -> Model:
    return _initialised(Qwen3Moe(SPARSE))


def _initialised(model: Model) -> Model:
    """The same values on every rank."""
    torch.manual_seed(3)
    model.init_weights()
    return model


def split_heads(block: nn.Module, mesh: DeviceMesh) -> None:
    """Lay a block out over tensor-parallel ranks: heads and hidden rows are dealt out, experts are on every rank."""
    parallelize_module(block, mesh, {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        # Each rank normalises its own heads, so the gradients of the weights are to be summed: dim 2 counts heads.
        "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.wo": RowwiseParallel(),
    })  # fmt: skip
    if isinstance(block.get_submodule("feed_forward"), FeedForward):
        parallelize_module(block, mesh, {
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        })  # fmt: skip


def fsdp(model: Model) -> StateDict:
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return dict(model.state_dict())


def tensor_parallel(model: Model) -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        split_heads(layer, mesh)
    return dict(model.state_dict())


def fsdp_and_tensor_parallel(model: Model) -> StateDict:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("shard", "tensor"))
    for layer in model.layers.values():
        split_heads(layer, mesh["tensor"])
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return dict(model.state_dict())


def pipeline(model: Model) -> StateDict:
    """The first layer with the embedding on one rank, the second with the rest on another."""
    first = ("tok_embeddings.", "layers.0.")
    return {k: v for k, v in model.state_dict().items() if k.startswith(first) == (dist.get_rank() == 0)}


def columns(model: Model) -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {k: distribute_tensor(v, mesh, [Shard(v.dim() - 1)]) for k, v in model.state_dict().items()}


def experts_and_rows(model: Model) -> StateDict:
    """Experts over one axis of ranks, the rows of each over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return {
        k: distribute_tensor(v, mesh, [Shard(0), Shard(1) if v.dim() > 1 else Replicate()])
        for k, v in model.state_dict().items()
    }


def _export(model: Model, state: StateDict, folder: Path) -> StateDictTransforms:
    transforms = StateDictTransforms(model.key_map())
    groups = transforms.to_file(state, None, None)
    coordinator = Coordinator.current()
    export_huggingface(
        folder, groups, config=model.hf_config(), assets=None, max_shard_bytes=200_000, coordinator=coordinator
    )
    return transforms


def _all_write_and_load(root: Path, layouts: Sequence[Callable[[Model], StateDict]]) -> None:
    """Compare each layout's export with that of whole tensors; then load it back into emptied shards."""
    for make in (dense, sparse):
        truth = dict(make().state_dict())
        digests = logical_digests(truth, Coordinator(0, 1, None, "", 60.0))
        _export(make(), truth, root / make.__name__ / "whole")
        for layout in layouts:
            model = make()
            state = layout(model)
            folder = root / make.__name__ / layout.__name__
            transforms = _export(model, state, folder)
            assert_same_bytes(root / make.__name__ / "whole", folder)
            for value in state.values():
                (value.to_local() if isinstance(value, DTensor) else value).detach().zero_()
            with open_reader(folder) as reader:
                plan = transforms.from_file(state, reader.tensors, None, cast=False)
                assert not plan.report.missing
                assert not plan.report.mismatched
                reader.read(plan.requests)
            assert logical_digests(state, Coordinator.current()) == digests
            for fqn, value in state.items():
                for block in blocks_of(value):
                    expected = truth[fqn][block.chunk.within(Chunk.whole(info_of(value).shape))]
                    assert torch.equal(block.data, expected), fqn
            dist.barrier()


@distributed(nproc=2)
def test_two_ranks_write_and_load_the_same_folder_in_every_layout(tmp_path: Path) -> None:
    """FSDP2, tensor parallel, pipeline stages and column shards of both models: the same bytes, and back."""
    _all_write_and_load(tmp_path, [fsdp, tensor_parallel, pipeline, columns])


@distributed(nproc=4)
def test_four_ranks_write_and_load_the_same_folder_in_every_layout(tmp_path: Path) -> None:
    """FSDP2 with tensor parallel, experts spread over ranks and cut by rows, and columns: the same bytes, and back."""
    _all_write_and_load(tmp_path, [fsdp_and_tensor_parallel, experts_and_rows, columns])


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
