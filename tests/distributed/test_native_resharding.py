"""A checkpoint saved in one layout loads in every other, bit for bit: real FSDP2, HSDP, TP and mixtures on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.layouts import LAYOUTS, assert_true_values, zeroed
from tests.distributed.ranks import run_on_ranks
from titan_ckpt.distributed import Coordinator
from titan_ckpt.storage.base import ReadRequest
from titan_ckpt.storage.native import NativeReader, NativeWriter
from titan_ckpt.tensors import blocks_of


def _load(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with NativeReader(folder) as reader:
        reader.read([ReadRequest(fqn, b.chunk, b.data) for fqn, v in tensors.items() for b in blocks_of(v)])


def _every_layout_into_every_other(root: Path) -> list[int]:
    sizes = []
    for saved, make in LAYOUTS.items():
        tensors = make()
        assert_true_values(tensors)
        folder = root / saved
        folder.mkdir(exist_ok=True)
        dist.barrier()
        writer = NativeWriter()
        writer.plan(tensors, Coordinator.current())
        writer.write(folder, tensors)
        sizes.append(writer.num_bytes)
        dist.barrier()
        with NativeReader(folder) as reader:
            reader.verify()
    for saved in LAYOUTS:
        for make in LAYOUTS.values():
            target = zeroed(make())
            _load(root / saved, target)
            assert_true_values(target)
    return sizes


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_layout_loads_into_any_other_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    """Every pair of layouts, with uneven and empty shards, 0-d, fp8, bool and complex tensors."""
    sizes = run_on_ranks(world_size, _every_layout_into_every_other, tmp_path)
    for of_layout in zip(*sizes, strict=True):
        assert max(of_layout) < 1.2 * sum(of_layout) / world_size, "ranks write about equal bytes"


def _load_on_fewer(root: Path) -> None:
    for saved in LAYOUTS:
        target = zeroed(LAYOUTS["fsdp"]())
        _load(root / saved, target)
        assert_true_values(target)
