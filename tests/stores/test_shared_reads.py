"""Ranks ask a bucket once for what several of them want, by the server's own count."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import world
from tests.distributed.test_shared_reads import empty, load, truth
from tests.run_folder import RunFolder
from tests.stores import servers
from tests.stores.conftest import place_in
from tests.stores.servers import Server
from tests.world import Run, misplaced, same, write_hf
from titan_ckpt.config import ResumeConfig, StoreConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.reading import shared
from titan_ckpt.stores.object_files import HEAD_BYTES
from titan_ckpt.stores.store import open_location
from titan_ckpt.testing import distributed


class Counting(servers.Proxy):
    """A proxy that keeps the ranges that are asked for of each file of tensors."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, lambda *_: None)
        self.ranges: list[tuple[str, int, int]] = []

    async def _forward(self, head: str, body: bytes) -> bytes:
        path = head.split(" ", 2)[1].partition("?")[0]
        asked = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", head) if head.startswith("GET") else None
        if asked and path.endswith((".safetensors", ".distcp")):
            self.ranges.append((path, int(asked[1]), int(asked[2]) + 1))
        return await super()._forward(head, body)

    def take(self) -> tuple[list[tuple[str, int, int]], int]:
        """Return what was asked for beside the heads, which each rank reads of each file, and their number."""
        ranges, self.ranges = self.ranges, []
        beside = [each for each in ranges if each[1:] != (0, HEAD_BYTES)]
        return sorted(beside), len(ranges) - len(beside)


def asked_twice(ranges: list[tuple[str, int, int]]) -> int:
    """Return how many bytes are asked for beside those that each was asked for first."""
    twice, reach = 0, {path: 0 for path, _, _ in ranges}
    for path, start, stop in ranges:
        twice += max(0, min(stop, reach[path]) - start)
        reach[path] = max(stop, reach[path])
    return twice


def run_of(layout: str) -> Run:
    """Return a run that every rank holds whole, or of which two pairs of ranks hold a half each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(768, 2048, bias=False)
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    return Run(model, is_laid_out=True)


@distributed(nproc=4)
def save(folder: RunFolder, layout: str) -> None:
    """Save a step of 6 MB of weights and 12 MB of moments: half of it is more than the least that is shared."""
    run = run_of(layout)
    with run.manager(folder, async_mode="disabled") as manager:
        run.step(torch.ones(1, 768))
        manager.save(1)
    state = run.state()
    if dist.get_rank() == 0:
        torch.save(state, folder.base / "truth.pt")


@distributed(nproc=4)
def resume(folder: RunFolder, layout: str, is_on: bool) -> None:
    run = run_of(layout)
    assert world.load(run.manager(folder, resume=ResumeConfig(share_reads=is_on))).step == 1
    assert same(run.state(), torch.load(folder.base / "truth.pt"))


@pytest.mark.parametrize(
    ("layout", "num_ranks", "copies"), [("whole", 2, 2), ("whole", 3, 3), ("whole", 4, 4), ("hsdp", 4, 2)]
)
def test_a_step_that_ranks_hold_alike_is_asked_for_once(
    layout: str, num_ranks: int, copies: int, s3: Server, tmp_path: Path
) -> None:
    """Without it as often as there are replicas; on without a setting. Scalars that all hold are read by each."""
    on_ranks = distributed(num_ranks)
    with Counting(s3.endpoint) as proxy:
        place = place_in(s3)
        folder = RunFolder(tmp_path, f"{s3.url}/{place.key}", StoreConfig(endpoint=proxy.endpoint, retry_seconds=5.0))
        on_ranks(inspect.unwrap(save))(folder, layout)
        proxy.take()
        on_ranks(inspect.unwrap(resume))(folder, layout, True)
        once, heads = proxy.take()
        on_ranks(inspect.unwrap(resume))(folder, layout, False)
        by_each, same_heads = proxy.take()
    asked, asked_by_each = (sum(stop - start for _, start, stop in ranges) for ranges in (once, by_each))
    assert asked > 14e6 and asked_twice(once) < 0.001 * asked
    assert asked_by_each == pytest.approx(copies * asked, rel=0.001)
    assert heads == same_heads


@distributed(nproc=4)
def read(folder: Path, url: str, store: StoreConfig, part: str) -> None:
    """Write a folder, or load it on four ranks."""
    line, values = Coordinator.current(60.0), truth()
    place: Any = open_location(url, settings=store)
    if part == "hf":
        write_hf(place, values, line=line)
        return
    state = empty("tp" if part == "tp" else "replicated", values)
    with patch.multiple(shared, LEAST_BYTES=0, LEAST_RUN_BYTES=0):
        load(state, place, line)
    assert not misplaced(state, values)


@pytest.mark.parametrize("part", ["load", "tp"])
@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_folder_of_others_is_asked_for_once(form: str, part: str, s3: Server, tmp_path: Path) -> None:
    """Of Hugging Face files and of DCP files, no byte beside the head is asked for twice, and all are.

    Also of columns that two replicas hold: their ranks want the same rows of the file.
    """
    place = place_in(s3)
    url = f"{s3.url}/{place.key}"
    with Counting(s3.endpoint) as proxy:
        store = StoreConfig(endpoint=proxy.endpoint, retry_seconds=5.0)
        if form == "hf":
            read(tmp_path, url, store, "hf")
        else:
            with warnings.catch_warnings(action="ignore"):  # that this is one process
                dcp.save(dict(truth()), checkpoint_id=tmp_path / "dcp")
            for path in (tmp_path / "dcp").iterdir():
                place.bucket.create(f"{place.key}/{path.name}", path.read_bytes())
        proxy.take()
        read(tmp_path, url, store, part)
        ranges, _ = proxy.take()
    assert not asked_twice(ranges)
    assert sum(stop - start for _, start, stop in ranges) > 2.8e6
