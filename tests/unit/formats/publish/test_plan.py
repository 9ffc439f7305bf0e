"""The plan of an export: which rank writes which part of a tensor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.formats.publish.plan import pack_model_files, plan_export
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.weights.transforms import StateDictTransforms


def test_a_shard_that_one_rank_exports_alone_is_refused() -> None:
    """The rows of the other ranks would be zeros in the file, which no digest of what was written can see."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        half = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        alone = Coordinator(0, 1, None, "", 1.0)
        groups = StateDictTransforms().to_file({"w": half}, None, None)
        with pytest.raises(StateEncodingError, match="shards of all ranks hold 24 bytes, their tensors 48"):
            plan_export(groups, lambda infos: pack_model_files(infos, 256), lambda *_: {}, alone)
    finally:
        dist.destroy_process_group()


def test_buffers_are_exported_from_the_lowest_rank() -> None:
    """Each rank has statistics of its own, and the mean and variance of two ranks do not fit together."""
    store, names = dist.HashStore(), [f"{i}.norm.running_{kind}" for i in range(4) for kind in ("mean", "var")]
    written: list[list[str]] = [[], []]

    def plan(rank: int) -> None:
        groups = StateDictTransforms().to_file({name: torch.full((3,), rank) for name in names}, None, None)
        line = Coordinator(rank, 2, store, "plan", 60.0)
        made = plan_export(groups, lambda infos: pack_model_files(infos, 256), lambda *_: {}, line, names)
        written[rank] = [group.fqns[0] for group in groups if made.writes(group)]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(plan, range(2))]
    assert (sorted(written[0]), written[1]) == (sorted(names), [])


def test_a_name_with_a_digit_that_is_no_number_is_packed() -> None:
    """Numbers in names are compared as such, and a superscript after one is not one of them."""
    names = ["x1²", "x10", "x2"]
    packed = pack_model_files(dict.fromkeys(names, TensorInfo((2,), torch.float32)), 1 << 20)
    assert packed == {"model.safetensors": ["x1²", "x2", "x10"]}
