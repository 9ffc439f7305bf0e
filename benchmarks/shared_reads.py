"""Load what every rank holds, read together and by each: python -m benchmarks.shared_reads --nproc 4 [--gb N].

Every rank stands for a host that gets 200 MB/s of a store. Then the same from the page cache, where nothing is shared.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Options, PeakMemory, StateDict, alternate, clean_folder, local_bytes, parse, report, run
from benchmarks.load import spoil
from titan_ckpt.disk.direct import FileReader
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.reading.shared import share_reads
from titan_ckpt.geometry.chunks import Chunk
from titan_ckpt.geometry.requests import FilePart

BYTES_PER_SECOND = 200e6
SLOW, SLOW_ALONE = "200 MB/s a host, read together", "200 MB/s a host, by each rank"
CACHED, CACHED_ALONE = "page cache, asked whether to share", "page cache, share_reads = false"


def main(options: Options) -> dict[str, Any]:
    """Compare loads of a state of `gb` * 10^9 bytes that every rank holds whole."""
    line, folder = Coordinator.current(60.0), Path(options.folder)
    one = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    state = {f"t{i}": one + i for i in range(max(1, int(options.gb * 1e9) // one.nbytes))}
    clean_folder(folder)
    WritePlan.of(state, line).write(folder, state)
    line.barrier("written")

    def load(*, is_on: bool) -> None:
        with NativeReader(folder) as reader:
            requests = [FilePart(name, Chunk.whole(value.shape), value) for name, value in state.items()]
            (fill,) = share_reads("read", [reader.plan(requests)], line, is_on=is_on)
            line.together("filled", fill)
            line.peers.discard()

    def slowly(*, is_on: bool) -> None:
        with throttled():
            load(is_on=is_on)

    cases = {
        SLOW: lambda: slowly(is_on=True),
        SLOW_ALONE: lambda: slowly(is_on=False),
        CACHED: lambda: load(is_on=True),
        CACHED_ALONE: lambda: load(is_on=False),
    }
    times = alternate(cases, options.pairs, lambda _: spoil(state), after=lambda _: _prove(state, one))
    report(f"loads of {options.nproc} ranks that hold all", times, local_bytes(state))
    peaks = {}
    for is_on in (True, False):
        line.barrier("measured")
        with PeakMemory() as peak:
            slowly(is_on=is_on)
        peaks[is_on] = peak.mib
    median = {case: statistics.median(seconds) for case, seconds in times.items()}
    return {
        "times_faster_where_slow": round(median[SLOW_ALONE] / median[SLOW], 2),
        "share_of_time_cached": round(median[CACHED] / median[CACHED_ALONE], 3),
        "extra_peak_mib": {"read together": peaks[True], "by each rank": peaks[False]},
        "seconds": {case: round(seconds, 4) for case, seconds in median.items()},
        "bytes": local_bytes(state),
        "pairs": options.pairs,
    }


def _prove(state: StateDict, one: torch.Tensor) -> None:
    assert all(torch.equal(value, one + i) for i, value in enumerate(state.values()))


@contextlib.contextmanager
def throttled() -> Iterator[None]:
    """Let this rank's reads take as long as by a network that its threads share, and let the page cache be unknown."""
    lock, free_at = threading.Lock(), time.monotonic()
    read_into = FileReader.read_into

    def wait(num_bytes: int) -> None:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic()) + num_bytes / BYTES_PER_SECOND
            seconds = free_at - time.monotonic()
        time.sleep(max(0.0, seconds))

    def into(self: FileReader, views: list[memoryview], offset: int) -> None:
        wait(sum(map(len, views)))
        read_into(self, views, offset)

    def aligned(self: FileReader, buffer: memoryview, offset: int, num_bytes: int) -> None:
        wait(num_bytes)
        read_into(self, [buffer[:num_bytes]], offset)

    network: dict[str, Any] = {"is_networked": property(lambda _: True), "cached_bytes": lambda *_: 0}
    with patch.multiple(FileReader, read_into=into, read_aligned=aligned, **network):
        yield


if __name__ == "__main__":
    run(parse("ranks that want the same bytes", gb=0.4, nproc=4, pairs=5), main)
