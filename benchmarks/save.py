"""A synchronous save of a training state, durable when it returns: python -m benchmarks.save [--gb N]."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    alternate,
    clean_folder,
    folder_bytes,
    local,
    local_bytes,
    measures,
    parse,
    rank,
    report,
    run,
    say,
    training_state,
    world_size,
)
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native import sealed_file
from titan_ckpt.formats.native.writer import WritePlan

OURS, DCP, LIMIT = "titan_ckpt", "dcp.save (torchtitan's settings)", "limit: O_DIRECT write"
UNHASHED = "titan_ckpt without digests"


def main(options: Options) -> dict[str, Any]:
    """Compare; every case writes into an emptied folder and fsyncs."""
    state = training_state(options.gb)
    folder = Path(options.folder)
    coordinator = Coordinator.current()
    plan = WritePlan.of(state, coordinator)
    best_planner = DefaultSavePlanner(enable_plan_caching=True)
    buffers = raw.make_buffers()
    here = local_bytes(state)

    def ours() -> None:
        WritePlan.of(state, coordinator, plan).write(folder, state)
        coordinator.barrier("written")
        if rank() == 0:
            posix.fsync_folder(folder)

    def unhashed() -> None:
        with _no_digests():
            ours()

    def dcp_best() -> None:
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder, thread_count=2), planner=best_planner)

    def torch_save() -> None:
        path = folder / f"{rank()}.pt"
        torch.save({fqn: local(tensor) for fqn, tensor in state.items()}, path)
        _fsync(path)

    def safetensors_save() -> None:
        path = folder / f"{rank()}.safetensors"
        safetensors.torch.save_file({fqn: local(tensor) for fqn, tensor in state.items()}, path)
        _fsync(path)

    cases: dict[str, Case] = {
        OURS: ours,
        UNHASHED: unhashed,
        DCP: lambda: dcp.save(dict(state), checkpoint_id=folder),
        "dcp.save, 2 threads, plan cached": dcp_best,
        "torch.save + fsync, a file per rank": torch_save,
        "safetensors + fsync, a file per rank": safetensors_save,
        LIMIT: lambda: raw.write_direct(folder / f"{rank()}.raw", here, buffers),
    }
    times = alternate(cases, options.pairs, lambda _: clean_folder(folder))
    report(f"sync save, {here * world_size() / 1e9:.2f} GB, {world_size()} rank(s), fsync", times, here * world_size())
    clean_folder(folder)
    with PeakMemory() as peak:
        ours()
    written = folder_bytes(folder)
    peers = [name for name in cases if name not in (OURS, UNHASHED, LIMIT)]
    overhead = _overhead({name: cases[name] for name in (OURS, UNHASHED)}, folder, 3 * options.pairs)
    found = measures(times, OURS, DCP, peers, LIMIT, bytes_written=written, extra_peak_mib=peak.mib)
    return found | {"integrity_overhead": round(overhead, 4)}


def _overhead(cases: dict[str, Case], folder: Path, pairs: int) -> float:
    """Return what digests add, as the median over turns of their own: the disk's spread hides it in a few."""
    hashed, plain = alternate(cases, pairs, lambda _: clean_folder(folder)).values()
    overhead = statistics.median(mine / other for mine, other in zip(hashed, plain, strict=True)) - 1
    say(f"  digests take {overhead:.1%} of the time, the median of {pairs} turns")
    return overhead


@contextmanager
def _no_digests() -> Iterator[None]:
    """Let the writer hash nothing, to see what hashing costs; what it writes meanwhile is no checkpoint."""
    names = vars(sealed_file)
    real = names["xxhash"]

    class Unhashed:
        def update(self, piece: object) -> None: ...

        def reset(self) -> None: ...

        def hexdigest(self) -> str:
            return "0" * 32

    names["xxhash"] = SimpleNamespace(xxh3_128=Unhashed, xxh3_128_hexdigest=lambda _: Unhashed().hexdigest())
    try:
        yield
    finally:
        names["xxhash"] = real


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    run(parse("a synchronous save of a training state"), main)
