"""Chunks, blocks and layouts: the place of each value of a tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.geometry.chunks import Chunk, blocks_of


def test_a_process_that_becomes_another_rank_holds_other_rows() -> None:
    """Meshes of the same ranks are equal, so nothing may be remembered by mesh alone: ranks fork, or join anew."""
    for rank in (0, 1):
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
            assert [block.chunk for block in blocks_of(value)] == [Chunk((2 * rank, 0), (2, 3))]
        finally:
            dist.destroy_process_group()
