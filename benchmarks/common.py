"""Shared parts of every benchmark: the state, ranks, fair repetition, memory and page-cache control, and the report.

Owns how a comparison is made: all cases in turn, A B A B, in one run, because a machine's speed drifts by two; medians
of at least 5 turns; every rank waits for the others, and the slowest counts. Knows no case.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

Case = Callable[[], object]
Times = dict[str, list[float]]
StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    gb: float
    """10^9 bytes of state, over all ranks."""
    nproc: int
    pairs: int
    json: bool
    folder: str
    tensors: int
    server: str = "juicefs"


def parse(description: str, gb: float = 3.7, nproc: int = 1, pairs: int = 5) -> Options:
    """Read the command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gb", type=float, default=gb, help="10^9 bytes of state over all ranks")
    parser.add_argument("--nproc", type=int, default=nproc, help="ranks, on this machine, over gloo")
    parser.add_argument("--pairs", type=int, default=pairs, help="turns of every case")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--folder", default=None, help="where to measure; default: a new folder in outputs/")
    parser.add_argument("--tensors", type=int, default=50_000, help="many_tensors: how many")
    parser.add_argument(
        "--server", choices=("juicefs", "snailmail", "moto"), default="juicefs", help="store: which one"
    )
    options = vars(parser.parse_args())
    if not options["folder"]:
        Path("outputs").mkdir(exist_ok=True)  # which git does not see
        options["folder"] = tempfile.mkdtemp(prefix="benchmark-", dir=Path("outputs").resolve())
    return Options(**options)


def run(options: Options, main: Callable[[Options], dict[str, Any] | None], keep: bool = False) -> None:
    """Run `main` on every rank; print what rank 0 returns as JSON where that is asked for; remove the folder."""
    try:
        if options.nproc == 1:
            _rank(0, options, 0, main)
        else:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            mp.start_processes(_rank, (options, store.port, main), nprocs=options.nproc, start_method="spawn")
    finally:
        if not keep:
            shutil.rmtree(options.folder, ignore_errors=True)


def _rank(rank: int, options: Options, port: int, main: Callable[[Options], dict[str, Any] | None]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.nproc))
    if options.nproc > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(options.nproc), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(options.nproc)
        )
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=options.nproc)
    measures = main(options)
    if measures is not None and options.json and rank == 0:
        print(json.dumps(measures), flush=True)
    if options.nproc > 1:
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def say(text: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(text, flush=True)


def training_state(gb: float, placement: Placement | None = None) -> StateDict:
    """Return a Llama-shaped model in fp32 with both AdamW moments, of about `gb` * 10^9 bytes over all ranks.

    Sharded over all ranks along dim 0 (or as `placement` says) as FSDP2 does it, plain for one rank.
    """
    layers = 12 if gb < 3 else 16
    vocabulary, width = _vocabulary_and_width(gb * 1e9 / 12, layers)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, width)}
    for i in range(layers):
        for name, rows, columns in (
            ("attention.wq", width, width),
            ("attention.wk", width // 4, width),
            ("attention.wv", width // 4, width),
            ("attention.wo", width, width),
            ("feed_forward.w1", 4 * width, width),
            ("feed_forward.w2", width, 4 * width),
            ("feed_forward.w3", 4 * width, width),
        ):
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
        shapes[f"layers.{i}.attention_norm.weight"] = (width,)
        shapes[f"layers.{i}.ffn_norm.weight"] = (width,)
    shapes["output.weight"] = (vocabulary, width)
    mesh = init_device_mesh("cpu", (world_size(),)) if world_size() > 1 else None
    state: StateDict = {}
    for prefix in ("model", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            state[f"{prefix}.{name}"] = _filled(shape, mesh, placement or Shard(0))
    return state


def _vocabulary_and_width(parameters: float, layers: int) -> tuple[int, int]:
    """Return a vocabulary of 32,000 and the width that comes nearest from below; small models have a small one.

    A real vocabulary matters: its embeddings are above the 32 MiB from where on malloc maps memory anew every time.
    """
    per_layer = 14.5 * layers  # parameters of all layers: this times width^2
    width = int((math.sqrt(64_000**2 + 4 * per_layer * parameters) - 64_000) / (2 * per_layer)) // 64 * 64
    if width >= 256:
        return 32_000, width
    width = max(64, int(math.sqrt(parameters / (per_layer + 8))) // 64 * 64)
    return 4 * width, width


_noise: list[torch.Tensor] = []


def _filled(shape: tuple[int, ...], mesh: Any, placement: Placement) -> torch.Tensor:
    """Return a tensor of values that do not compress, or its shard."""
    if mesh is None:
        return _noisy(torch.empty(shape))
    dim = min(getattr(placement, "dim", 0), len(shape) - 1)
    local = list(shape)
    step = -(-shape[dim] // world_size())
    local[dim] = max(0, min(step, shape[dim] - rank() * step))
    stride = torch.empty(shape, device="meta").stride()
    values = _noisy(torch.empty(local))
    return DTensor.from_local(values, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def _noisy(tensor: torch.Tensor) -> torch.Tensor:
    if not _noise:
        _noise.append(torch.randn(1 << 21))
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), 1 << 21):
        part = flat[start : start + (1 << 21)]
        part.copy_(_noise[0][: part.numel()])
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def local_bytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in state.values())


def alternate(
    cases: Mapping[str, Case],
    pairs: int,
    before: Callable[[str], object] | None = None,
    steady: Collection[str] = (),
    after: Callable[[str], object] | None = None,
) -> Times:
    """Run every case in turn, `pairs` times, after one turn that does not count; return seconds per case.

    `before(case)` prepares a turn, and `after(case)` examines what it did, outside the clock. The order is turned round
    every other time. `steady` cases, which take long and are not faster a second time, have no turn that does not
    count.
    """
    return alternate_in_two(cases, pairs, before, steady, after)[0]


def alternate_in_two(
    cases: Mapping[str, Case],
    pairs: int,
    before: Callable[[str], object] | None = None,
    steady: Collection[str] = (),
    after: Callable[[str], object] | None = None,
) -> tuple[Times, Times]:
    """Do the same for cases that return what waits for their end: seconds until they return, and until their end."""
    returned: Times = {name: [] for name in cases}
    ended: Times = {name: [] for name in cases}
    for turn in range(pairs + 1):
        for name in list(cases) if turn % 2 else list(cases)[::-1]:
            if not turn and name in steady:
                continue
            if before is not None:
                before(name)
            gc.collect()
            barrier()
            begin = time.perf_counter()
            wait = cases[name]()
            barrier()
            middle = time.perf_counter()
            if callable(wait):
                wait()
                barrier()
            if turn:
                returned[name].append(middle - begin)
                ended[name].append(time.perf_counter() - begin)
            if after is not None:
                after(name)
    return returned, ended


def report(title: str, times: Times, num_bytes: int) -> None:
    """Print a table of medians, with the rates that `num_bytes` gives."""
    say(title)
    for name, seconds in times.items():
        rate = num_bytes / 1e9 / statistics.median(seconds)
        spread = f"{min(seconds):8.3f} to {max(seconds):.3f}"
        say(f"  {name:44s} {statistics.median(seconds):8.3f} s {spread:>20s} {rate:8.2f} GB/s")


def measures(
    times: Times, ours: str, dcp: str, peers: list[str], limit: str, *, bytes_written: int, extra_peak_mib: float
) -> dict[str, Any]:
    """Return the JSON keys that every benchmark has; a ratio above 1 means that ours is faster.

    A ratio is that of two medians. Its quartiles, under the same name with `_quartiles`, are those of the ratios of all
    turns; within a turn both cases met the same machine.
    """
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    best = min(peers, key=median.__getitem__)
    ratios = {"ratio_vs_dcp": dcp, "ratio_vs_best_peer": best, "fraction_of_limit": limit}
    return {
        **{key: round(median[other] / median[ours], 3) for key, other in ratios.items()},
        **{f"{key}_quartiles": quartiles(times[other], times[ours]) for key, other in ratios.items()},
        "seconds": round(median[ours], 4),
        "bytes_written": bytes_written,
        "extra_peak_mib": round(extra_peak_mib, 1),
        "pairs": min(len(seconds) for seconds in times.values()),
    }


def quartiles(others: list[float], ours: list[float]) -> list[float]:
    """Return the first and the third quartile of the ratios of all turns."""
    ratios = [other / own for other, own in zip(others, ours, strict=True)]
    if len(ratios) < 2:
        return [round(ratio, 3) for ratio in ratios * 2]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(first, 3), round(third, 3)]


def clean_folder(folder: Path) -> Path:
    """Empty a folder, once for all ranks."""
    barrier()
    if rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    barrier()
    return folder


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def drop_from_page_cache(folder: Path) -> None:
    """Make the next read of every file in the folder come from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def bring_into_page_cache(folder: Path) -> None:
    """Make the next read of every file in the folder come from memory."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(8 << 20):
                    pass


def touch_free_memory(num_bytes: int) -> None:
    """Take and give back memory, so that what the next case allocates is backed by the host already.

    A virtual machine that gives freed pages back to its host pays for them again at the first touch. This favours the
    peers, which allocate; ours reuses.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(pages, dtype=torch.uint8)[::4096] = 1
    pages.close()


_SAMPLER = """
import select, sys
peak = 0
while True:
    try:
        lines = open(f"/proc/{sys.argv[1]}/status").read().splitlines()
    except OSError:
        break
    peak = max([peak] + [int(line.split()[1]) for line in lines if line.startswith("VmRSS")])
    if select.select([sys.stdin], [], [], 0.003)[0]:
        break
print(peak)
"""


class PeakMemory:
    """`with PeakMemory() as peak: ...; peak.mib` is how far this process's resident memory rose, in MiB."""

    def __enter__(self) -> Self:
        self.mib = 0.0
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._resident()
        command = [sys.executable, "-S", "-c", _SAMPLER, str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        time.sleep(0.1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        output, _ = self._sampler.communicate("stop\n")
        self.mib = (int(output) - self._before) / 1024

    @staticmethod
    def _resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
