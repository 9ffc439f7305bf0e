"""A GPU: page-locking, copies, saves beside training, loads and exports, and torchtitan's own way: docs/gpu.md.

python -m benchmarks.gpu [--json] [--folder FOLDER] [--parts NAME ...] [--dry-run]

Each part is a process of its own that ends after a minute, and adds its measures to FOLDER/gpu.jsonl as they come.
Beyond torch it needs numpy, xxhash, rich and tomli. `--dry-run` is on the CPU, tiny, in one process, and measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim import AdamW

from benchmarks import raw
from benchmarks.common import drop_from_page_cache
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, SaveConfig
from titan_ckpt.disk import cuda
from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.arena import Arena
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan, lay_end_to_end
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.weights.transforms import StateDictTransforms

PART_SECONDS = 55
"""A part begins no further turn after this."""
KILLED_AFTER_SECONDS = 70
"""A part that still runs then, with what it takes to start, is killed; what it has measured is kept."""

Measures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The device and the size of one part of the benchmark."""

    results: Path
    folder: Path
    """For checkpoints, on a disk and not in memory; it is emptied at the end."""
    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def bytes(self, gb: float) -> int:
        return 1 << 20 if self.dry else int(gb * 2**30)

    def note(self, part: str, **measures: Any) -> None:
        """Add measures to the results, at once and for good."""
        line = json.dumps({"part": part, **measures})
        with self.results.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, flush=True)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object]) -> float:
        """Return how long it takes, all work on the device included."""
        self.synchronize()
        begin = time.perf_counter()
        act()
        self.synchronize()
        return time.perf_counter() - begin

    def turns(self, most: int) -> Iterator[int]:
        """Yield numbers of turns while there is time; one in a dry run."""
        begin = time.perf_counter()
        for turn in range(1 if self.dry else most):
            if turn and time.perf_counter() - begin > PART_SECONDS * turn / (turn + 1):
                return
            yield turn

    def tensors(self, num_bytes: int) -> dict[str, torch.Tensor]:
        """Return tensors of 64 MiB, and a thousand small ones, on the device."""
        size = max(num_bytes // 16, 1 << 10) if self.dry else 64 << 20
        large = {f"large.{i}": torch.randn(size // 4, device=self.device) for i in range(max(1, num_bytes // size))}
        return large | {f"small.{i}": torch.randn(1024, device=self.device) for i in range(16 if self.dry else 1000)}


def num_bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def pin(bench: Bench) -> None:
    """Page-locking: seconds per GB by size, of memory touched before, beside torch's own allocation."""
    for gb in (0.25, 1.0, 4.0, 16.0):
        size = bench.bytes(gb)
        memory = Buffer.allocate(size)

        def touch(start: int, memory: Buffer = memory) -> None:
            memory.tensor[start : start + IO_BYTES].zero_()

        spent = {"touch": bench.seconds(partial(run_workers, range(0, size, IO_BYTES), touch))}
        if not bench.dry:
            spent["pin"] = bench.seconds(partial(cuda.pin, memory))
            spent["unpin"] = bench.seconds(partial(cuda.unpin, memory))
            spent["torch"] = bench.seconds(partial(torch.empty, size, dtype=torch.uint8, pin_memory=True))
        rates = {name: seconds / (size / 1e9) for name, seconds in spent.items()}
        bench.note("pin", gb=size / 1e9, **rates, unit="seconds per GB")
        if bench.dry:
            return


def link(bench: Bench) -> dict[str, float]:
    """Return the link's limit in GB/s each way: one copy of 1 GiB between the device and page-locked memory."""
    there = torch.empty(bench.bytes(1), dtype=torch.uint8, device=bench.device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=not bench.dry)
    rates: dict[str, list[float]] = {"device_to_host": [], "host_to_device": []}
    for _ in range(6):
        for name, (to, of) in {"device_to_host": (here, there), "host_to_device": (there, here)}.items():
            rates[name].append(there.nbytes / 1e9 / bench.seconds(partial(to.copy_, of, non_blocking=True)))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def copy(bench: Bench) -> None:
    """Copies from the device to the arena: alone, and beside a loop of matmuls, against the link's limit."""
    limit = link(bench)
    bench.note("link", **limit, unit="GB/s")
    tensors = list(bench.tensors(bench.bytes(8)).values())
    places = lay_end_to_end([(t.dtype, t.shape) for t in tensors])
    size = sum(places[1])
    arena = Arena(size, pinned=not bench.dry)
    bench.note("arena", seconds=bench.seconds(lambda: arena.buffer), gb=size / 1e9)
    matrix = torch.randn(64 if bench.dry else 8192, 64 if bench.dry else 8192, device=bench.device).bfloat16()
    count = 2 if bench.dry else 400

    def multiply() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    rates: dict[str, list[float]] = {"alone": [], "beside": [], "matmuls": [], "matmuls_beside": []}
    for _ in bench.turns(5):
        rates["alone"].append(size / 1e9 / bench.seconds(lambda: arena.stage(places, tensors).finish()))
        rates["matmuls"].append(bench.seconds(multiply))
        bench.synchronize()
        begin = time.perf_counter()
        handle = arena.stage(places, tensors)
        multiply()
        handle.finish()
        rates["beside"].append(size / 1e9 / (time.perf_counter() - begin))
        bench.synchronize()
        rates["matmuls_beside"].append(time.perf_counter() - begin)
    median = {name: statistics.median(values) for name, values in rates.items()}
    fraction = median["alone"] / limit["device_to_host"]
    slower = median["matmuls_beside"] / median["matmuls"]
    bench.note("copy", gb=size / 1e9, alone=median["alone"], beside_matmuls=median["beside"], unit="GB/s",
               fraction_of_link=fraction, matmuls_slower=slower)  # fmt: skip
    arena.close()


class Training:
    """A model of 1 B parameters in fp32 with AdamW under bf16 autocast, and its manager."""

    def __init__(self, bench: Bench, name: str) -> None:
        shape = replace(FLAVORS["debug-0.5m" if bench.dry else "1B"], max_seq_len=64 if bench.dry else 1024)
        with bench.device:
            self.model = Llama3(shape)
        self.optimizer = AdamW(self.model.parameters(), fused=True)
        self.bench = bench
        memory = 0 if bench.dry else torch.cuda.get_device_properties(0).total_memory
        self.tokens = torch.randint(
            0, shape.vocab_size, (8 if memory > 70e9 else 2, shape.max_seq_len), device=bench.device
        )
        save = SaveConfig(interval=1 << 30, async_mode="thread")
        config = CheckpointConfig(save=save, export=(ExportConfig("hf", dtype="bfloat16"),))
        self.folder = bench.folder / name
        transforms = StateDictTransforms(self.model.key_map(), self.model.hf_config())
        self.manager = CheckpointManager(
            config,
            model_parts=[self.model],
            optimizers=[self.optimizer],
            sd_transforms=transforms,
            base_folder=self.folder,
        )
        self.manager.load()
        self.number = 0

    def step(self, save: str = "") -> dict[str, float]:
        """Save first, where that is asked for, and train a step; return the seconds of both, and of the save's call.

        `save`: "waited", for the copy at once; "overlapped", with the forward and backward.
        """
        self.number += 1
        self.bench.synchronize()
        begin = time.perf_counter()
        found = {}
        if save:
            self.manager.save(self.number, force=True, export=False)
            if save == "waited":
                self.manager.maybe_wait_for_staging()
                self.bench.synchronize()
            found["blocking"] = time.perf_counter() - begin
        with torch.autocast(self.bench.device.type, torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bench.synchronize()
        return found | {"step": time.perf_counter() - begin}

    def close(self) -> None:
        self.manager.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def train(bench: Bench) -> None:
    """Time steps alone, beside a save that overlaps, and with one that is waited for; the export; loads come last."""
    training = Training(bench, "train")
    for _ in range(1 if bench.dry else 5):
        training.step()
    training.manager.save(training.number)  # not due: makes the memory ready, as the first step of a run does
    alone = [training.step()["step"] for _ in range(1 if bench.dry else 10)]
    size = training.manager.completed.expected_bytes() / 1e9
    bench.note("step", seconds=statistics.median(alone), gb=size, copy_at_link=size / link(bench)["device_to_host"])
    for turn in bench.turns(3):
        for way in ("overlapped", "waited"):
            begin = time.perf_counter()
            found = training.step(way)
            copied_by = time.perf_counter() - begin
            during = [training.step()["step"] for _ in range(1 if bench.dry else 3)]
            training.manager.wait()
            bench.note("save", way=way, turn=turn, **found, next_steps=statistics.median(during),
                       slower=(found["step"] + sum(during)) / (statistics.median(alone) * (1 + len(during))),
                       step_ended=copied_by, committed=time.perf_counter() - begin)  # fmt: skip
    training.close()


def export(bench: Bench) -> None:
    """Export a Hugging Face folder in bf16, proved and durable, from the device."""
    training = Training(bench, "export")
    for turn in bench.turns(3):
        training.number += 1
        seconds = bench.seconds(lambda: training.manager.export(training.number, last_step=True))
        size = sum(f.stat().st_size for f in (training.folder / "exports").rglob("*.safetensors")) / (turn + 1)
        bench.note("export", gb=size / 1e9, seconds=seconds, rate=size / 1e9 / seconds, unit="GB/s")
    training.close()


def load(bench: Bench) -> None:
    """Load into the device's memory, verified, warm and cold, against the slower of link and disk."""
    limit = link(bench)["host_to_device"]
    tensors = bench.tensors(bench.bytes(8))
    folder = bench.folder / "load"
    folder.mkdir()
    record = WritePlan.of(tensors, Coordinator.current()).write(folder, tensors)
    buffers = raw.make_buffers()
    for turn in bench.turns(4):
        rates = {}
        for cache in ("warm", "cold"):
            if cache == "cold":
                drop_from_page_cache(folder)
            with NativeReader(folder) as reader:
                wanted = [Block(Chunk.whole(value.shape), value, fqn) for fqn, value in tensors.items()]
                rates[cache] = num_bytes_of(tensors) / 1e9 / bench.seconds(partial(reader.read, wanted))
        drop_from_page_cache(folder)
        disk = num_bytes_of(tensors) / 1e9 / bench.seconds(lambda: raw.read(folder / record.name, buffers, True))
        bench.note("load", turn=turn, **rates, disk=disk, link=limit, unit="GB/s",
                   cold_fraction=rates["cold"] / min(disk, limit))  # fmt: skip
    shutil.rmtree(folder)


def dcp(bench: Bench) -> None:
    """Save as torchtitan does with async_with_pinned_mem: staged to page-locked shared memory, written by a process."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore() if bench.dry else dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    pinned = not bench.dry
    stager = DefaultStager(StagingOptions(pinned, pinned, pinned, pinned))
    kind = AsyncCheckpointerType.PROCESS if pinned else AsyncCheckpointerType.THREAD
    state = bench.tensors(bench.bytes(12))
    for turn in bench.turns(3):
        begin = time.perf_counter()
        saving: Any = dcp.async_save(
            dict(state), checkpoint_id=bench.folder / "dcp", async_stager=stager, async_checkpointer_type=kind
        )
        returned = time.perf_counter() - begin
        getattr(saving, "staging_completion", saving).result()
        staged = time.perf_counter() - begin
        getattr(saving, "upload_completion", saving).result()
        bench.note("dcp", turn=turn, gb=num_bytes_of(state) / 1e9, returned=returned, staged=staged,
                   committed=time.perf_counter() - begin)  # fmt: skip
    stager.close()
    dist.destroy_process_group()
    shutil.rmtree(bench.folder / "dcp")


PARTS: dict[str, Callable[[Bench], None]] = {
    "copy": copy,
    "train": train,
    "load": load,
    "pin": pin,
    "export": export,
    "dcp": dcp,
}
"""In the order of their worth, should the machine be taken away."""


def main() -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description="measure checkpoints on a GPU")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of all results on the last line")
    parser.add_argument("--folder", help="where gpu.jsonl is written; default: $OUT, or outputs/")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny; measures nothing")
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        why = f"torch {torch.__version__} finds no CUDA device; --dry-run runs it on the CPU"
        print(f"benchmarks.gpu: {why}", file=sys.stderr)
        return 1
    Path("outputs").mkdir(exist_ok=True)  # which git does not see
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="gpu-", dir=Path("outputs").resolve()))
    results = Path(options.folder or os.environ.get("OUT") or "outputs") / "gpu.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(results, scratch, options.dry_run)
    if options.scratch:
        PARTS[options.parts[0]](bench)
        return 0
    results.unlink(missing_ok=True)
    name = "CPU, dry run" if bench.dry else torch.cuda.get_device_name(0)
    bench.note("machine", device=name, torch=torch.__version__, cuda=torch.version.cuda, cpus=os.cpu_count())
    try:
        failed = [part for part in options.parts if not _run(part, bench)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if failed:
        bench.note("failed", parts=failed)
    if options.json:
        print(json.dumps([json.loads(line) for line in results.read_text().splitlines()]))
    return 1 if failed else 0


def _run(part: str, bench: Bench) -> bool:
    """Run a part in a process of its own, or here in a dry run; return whether it has ended well."""
    if bench.dry:
        PARTS[part](bench)
        return True
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", part]
    command += ["--folder", str(bench.results.parent), "--scratch", str(bench.folder)]
    try:
        return subprocess.run(command, timeout=KILLED_AFTER_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        bench.note("timeout", of=part)
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir()
        return False


if __name__ == "__main__":
    sys.exit(main())
