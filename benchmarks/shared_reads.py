"""Load what every rank holds, read together and by each: python -m benchmarks.shared_reads --nproc 4 [--gb N].

Every rank stands for a host that gets so many MB/s of a store. Sending takes processors, which hosts do not share and
these ranks do: at 50 MB/s four ranks on two processors have what hosts would have at 200 MB/s or more. Then the same
from the page cache, where nothing is shared.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
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

RATES = (50, 200)
"""MB/s that a host gets of the store."""
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

    def slowly(rate: int, *, is_on: bool) -> None:
        with throttled(rate * 1e6):
            load(is_on=is_on)

    slow = {(rate, is_on): _named(rate, is_on=is_on) for rate in RATES for is_on in (True, False)}
    cases = {name: partial(slowly, rate, is_on=is_on) for (rate, is_on), name in slow.items()} | {
        CACHED: lambda: load(is_on=True),
        CACHED_ALONE: lambda: load(is_on=False),
    }
    times = alternate(cases, options.pairs, lambda _: spoil(state), after=lambda _: _prove(state, one))
    report(f"loads of {options.nproc} ranks that hold all", times, local_bytes(state))
    peaks = {}
    for is_on in (True, False):
        line.barrier("measured")
        with PeakMemory() as peak:
            slowly(RATES[-1], is_on=is_on)
        peaks[is_on] = peak.mib
    median = {case: statistics.median(seconds) for case, seconds in times.items()}
    return {
        "times_faster": {rate: round(median[slow[rate, False]] / median[slow[rate, True]], 2) for rate in RATES},
        "share_of_time_cached": round(median[CACHED] / median[CACHED_ALONE], 3),
        "extra_peak_mib": {"read together": peaks[True], "by each rank": peaks[False]},
        "seconds": {case: round(seconds, 4) for case, seconds in median.items()},
        "bytes": local_bytes(state),
        "pairs": options.pairs,
    }


def _named(rate: int, *, is_on: bool) -> str:
    return f"{rate} MB/s a host, {'read together' if is_on else 'by each rank'}"


def _prove(state: StateDict, one: torch.Tensor) -> None:
    assert all(torch.equal(value, one + i) for i, value in enumerate(state.values()))


@contextlib.contextmanager
def throttled(rate: float) -> Iterator[None]:
    """Let this rank's reads take as long as by a network that its threads share, and let the page cache be unknown."""
    lock, free_at = threading.Lock(), time.monotonic()
    read_into = FileReader.read_into

    def wait(num_bytes: int) -> None:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic()) + num_bytes / rate
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
    run(parse("ranks that want the same bytes", gb=0.2, nproc=4, pairs=5), main)
