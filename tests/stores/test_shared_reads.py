"""Ranks ask a bucket once for what several of them want, by the server's own count."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.test_shared_reads import load, truth
from tests.run_folder import RunFolder
from tests.stores import servers
from tests.stores.conftest import place_in
from tests.stores.servers import Server
from tests.world import Run, misplaced, same, write_hf
from titan_ckpt.config import ResumeConfig, StoreConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.reading import shared
from titan_ckpt.stores.bucket import open_location
from titan_ckpt.stores.object_reader import HEAD_BYTES
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


def asked_twice(ranges: list[tuple[str, int, int]]) -> list[Any]:
    return [b for a, b in itertools.pairwise(ranges) if a[0] == b[0] and a[2] > b[1]]


def whole_run() -> Run:
    torch.manual_seed(0)
    return Run(torch.nn.Linear(1024, 2048, bias=False), is_laid_out=True)


@distributed(nproc=4)
def save(folder: RunFolder) -> None:
    """Save a step that every rank holds whole: 8 MB of weights and 16 MB of moments."""
    run = whole_run()
    with run.manager(folder, async_mode="disabled") as manager:
        run.step(torch.ones(1, 1024))
        manager.save(1)
    if dist.get_rank() == 0:
        torch.save(run.state(), folder.base / "truth.pt")


@distributed(nproc=4)
def resume(folder: RunFolder, is_on: bool) -> None:
    run = whole_run()
    with run.manager(folder, resume=ResumeConfig(share_reads=is_on)) as manager:
        assert manager.load().step == 1
    assert same(run.state(), torch.load(folder.base / "truth.pt"))


def test_a_step_that_four_ranks_hold_whole_is_asked_for_once(s3: Server, tmp_path: Path) -> None:
    """Without it four times; on without a setting."""
    with Counting(s3.endpoint) as proxy:
        place = place_in(s3)
        folder = RunFolder(tmp_path, f"{s3.url}/{place.key}", StoreConfig(endpoint=proxy.endpoint, retry_seconds=5.0))
        save(folder)
        proxy.take()
        resume(folder, True)
        once, heads = proxy.take()
        resume(folder, False)
        four_times, same_heads = proxy.take()
    assert not asked_twice(once)
    num_bytes = sum(stop - start for _, start, stop in once)
    assert sum(stop - start for _, start, stop in four_times) == 4 * num_bytes > 4 * 19e6
    assert heads == same_heads


@distributed(nproc=4)
def read(folder: Path, url: str, store: StoreConfig, part: str) -> None:
    """Write a folder, or load it on four ranks."""
    line, values = Coordinator.current(60.0), truth()
    place: Any = open_location(url, settings=store)
    if part == "hf":
        write_hf(place, values, line=line)
        return
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    with patch.object(shared, "LEAST_RUN_BYTES", 0):
        load(state, place, line)
    assert not misplaced(state, values)


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_folder_of_others_is_asked_for_once(form: str, s3: Server, tmp_path: Path) -> None:
    """Of Hugging Face files and of DCP files, no byte beside the head is asked for twice, and all are."""
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
        read(tmp_path, url, store, "load")
        ranges, _ = proxy.take()
    assert not asked_twice(ranges)
    assert sum(stop - start for _, start, stop in ranges) > 11e6
