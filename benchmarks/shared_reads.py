"""Load what every rank holds, read together and by each: python -m benchmarks.shared_reads --nproc 4 [--gb N].

A store gives 200 MB/s to a host, whose ranks share them, or to each of as many hosts as there are ranks. Hosts have
processors of their own, and these ranks do not, so a limit says what the machine gives: ranks that read each byte once
and broadcast it, and do nothing else. Then the same load from the page cache, where nothing is shared.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Options, PeakMemory, StateDict, alternate, clean_folder, local_bytes, parse, report, run
from benchmarks.load import spoil
from titan_ckpt.directory.names import rank_file_name
from titan_ckpt.disk.files import NUM_WORKERS, FileReader
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.reading.shared import _PIECE_BYTES, share_reads
from titan_ckpt.geometry.chunks import Block, Chunk

HOST_RATE = 200e6
"""Bytes per second that a host gets of the store."""
LIMIT = "limit"
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
            requests = [Block(Chunk.whole(value.shape), value, name) for name, value in state.items()]
            (fill,) = share_reads("read", [reader.plan(requests)], line, is_on=is_on)
            line.together("filled", fill)
            line.peers.discard()

    def slowly(act: Callable[[], None], rate: float) -> None:
        with throttled(rate):
            act()

    together, alone = partial(load, is_on=True), partial(load, is_on=False)
    limit = partial(_only_send, local_bytes(state), line, folder)
    acts = {"read together": together, "by each rank": alone, LIMIT: limit}
    hosts = {
        f"1 host of 200 MB/s with {options.nproc} ranks": HOST_RATE / options.nproc,
        f"{options.nproc} hosts of 200 MB/s each": HOST_RATE,
    }
    cases: dict[str, Callable[[], None]] = {
        f"{host}: {way}": partial(slowly, act, rate) for host, rate in hosts.items() for way, act in acts.items()
    }
    cases |= {CACHED: together, CACHED_ALONE: alone}
    times = alternate(cases, options.pairs, lambda _: spoil(state), after=lambda case: _prove(case, state, one))
    report(f"loads of {options.nproc} ranks that hold all", times, local_bytes(state))
    peaks = {}
    for way in ("read together", "by each rank"):
        line.barrier("measured")
        with PeakMemory() as peak:
            slowly(acts[way], HOST_RATE)
        peaks[way] = peak.mib
    median = {case: statistics.median(seconds) for case, seconds in times.items()}

    def shares(way: str) -> dict[str, float]:
        return {host: round(median[f"{host}: {way}"] / median[f"{host}: read together"], 2) for host in hosts}

    return {
        "times_faster": shares("by each rank"),
        "share_of_limit": shares(LIMIT),
        "share_of_time_cached": round(median[CACHED] / median[CACHED_ALONE], 3),
        "extra_peak_mib": peaks,
        "seconds": {case: round(seconds, 4) for case, seconds in median.items()},
        "bytes": local_bytes(state),
        "pairs": options.pairs,
    }


def _only_send(num_bytes: int, line: Coordinator, folder: Path) -> None:
    """Read so many bytes, each on one rank, and broadcast them in pieces as large as a load's: no digest, no copy."""
    ranks = tuple(range(line.world_size))
    line.peers.connect(line, lambda: [ranks])
    with contextlib.closing(FileReader(folder / rank_file_name(0))) as file, ThreadPoolExecutor(NUM_WORKERS) as pool:
        size = min(_PIECE_BYTES[1], file.num_bytes)
        own = iter(range(line.rank, num_bytes // size, len(ranks)))

        def read() -> torch.Tensor:
            memory = Buffer.allocate(size)
            file.read_into([memory.view], 0)
            return memory.tensor

        ahead = deque(pool.submit(read) for _ in itertools.islice(own, NUM_WORKERS))
        received = torch.empty(2 * len(ranks), size, dtype=torch.uint8)
        under_way: deque[Any] = deque()
        for number in range(num_bytes // size):
            memory = received[number % len(received)]
            if number % len(ranks) == line.rank:
                memory = ahead.popleft().result()
                ahead.extend(pool.submit(read) for _ in itertools.islice(own, 1))
            if len(under_way) == len(received):
                under_way.popleft().wait()
            under_way.append(line.peers.broadcast(ranks, number % len(ranks), memory, 60.0))
        for work in under_way:
            work.wait()
    line.peers.discard()


def _prove(case: str, state: StateDict, one: torch.Tensor) -> None:
    assert LIMIT in case or all(torch.equal(value, one + i) for i, value in enumerate(state.values()))


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
