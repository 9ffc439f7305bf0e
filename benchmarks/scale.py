"""The time of planning, headers and manifests at 1,024 and 10,000 ranks, by running one rank's part of it for real.

python -m benchmarks.scale [--json]

Every rank does the same work at the same time, so one rank's time is everybody's. What others would have posted is made
here from the same rules: ranks of one pipeline stage list the same tensors on the same mesh.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import sub
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import parse
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.distributed import sharing as ownership
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.dcp.writer import gather_tables
from titan_ckpt.formats.native.header import parse_header
from titan_ckpt.formats.native.rank_file import lay_out
from titan_ckpt.formats.native.sealed_file import BLOCK_BYTES, with_digests
from titan_ckpt.geometry.chunks import Chunk, TensorInfo

Shapes = dict[str, tuple[tuple[int, ...], list[Placement]]]


@dataclass(frozen=True)
class Run:
    """One job: its ranks as pipeline stages of a (replicate, shard, tensor-parallel) mesh."""

    name: str
    stages: int
    mesh: tuple[int, int, int]
    tensors_of_stage: Callable[[int, int], Shapes]

    @property
    def world_size(self) -> int:
        return self.stages * prod(self.mesh)


def dense_405b(stage: int, stages: int) -> Shapes:
    """126 layers of width 16,384; FSDP over rows, tensor parallelism over rows or columns."""
    rows, columns, copied = (
        [Replicate(), Shard(0), Shard(0)],
        [Replicate(), Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
    )
    found: Shapes = {}
    for i in range(stage * 126 // stages, (stage + 1) * 126 // stages):
        for name, shape, placements in (
            ("attention.wq", (16384, 16384), rows),
            ("attention.wk", (1024, 16384), rows),
            ("attention.wv", (1024, 16384), rows),
            ("attention.wo", (16384, 16384), columns),
            ("feed_forward.w1", (53248, 16384), rows),
            ("feed_forward.w2", (16384, 53248), columns),
            ("feed_forward.w3", (53248, 16384), rows),
            ("attention_norm", (16384,), [*copied, Replicate()]),
            ("ffn_norm", (16384,), [*copied, Replicate()]),
        ):
            found[f"layers.{i}.{name}.weight"] = (shape, list(placements))
    if stage == 0:
        found["tok_embeddings.weight"] = ((128256, 16384), rows)
    if stage == stages - 1:
        found["output.weight"] = ((128256, 16384), rows)
    return found


def mixture_1t(stage: int, stages: int) -> Shapes:
    """61 layers of 384 experts, each expert a tensor of its own: 1.04 T parameters."""
    found: Shapes = {}
    sharded: list[Placement] = [Replicate(), Shard(0), Replicate()]
    for i in range(stage * 61 // stages, (stage + 1) * 61 // stages):
        for expert in range(384):
            for name, shape in (("w1", (2048, 7168)), ("w2", (7168, 2048)), ("w3", (2048, 7168))):
                found[f"layers.{i}.moe.experts.{expert}.{name}.weight"] = (shape, sharded)
        found[f"layers.{i}.attention.wqkv.weight"] = ((24576, 7168), sharded)
    return found


RUNS = (
    Run("405 B dense", 1, (1, 128, 8), dense_405b),
    Run("405 B dense, 16 stages", 16, (1, 80, 8), dense_405b),
    Run("1 T mixture, 16 stages", 16, (1, 64, 1), mixture_1t),
    Run("1 T mixture, 16 stages", 16, (5, 125, 1), mixture_1t),
)


class _Gathered(Coordinator):
    """Answers rank 0 as the others would."""

    def __init__(self, run: Run) -> None:
        super().__init__(0, run.world_size, None, "", 1.0)
        self.exchanged_bytes: dict[str, int] = {}
        """Exchange -> bytes that rank 0 reads from the store and writes to it: all posts, and the verdict."""
        self._of = run
        per_stage = prod(run.mesh)
        self._stage = [rank // per_stage for rank in range(run.world_size)]
        self._lists = [_describe(run, stage) for stage in range(run.stages)]
        infos = [
            (name, TensorInfo(tuple(one["kinds"][kind][1]), torch.float32))
            for one in self._lists
            for name, kind in zip(one["names"], one["kind_of"], strict=True)
        ]
        self._whole = ownership.tally((name, info, Chunk.whole(info.shape)) for name, info in infos)

    def gather(
        self, tag: str, value: Any, error: BaseException | None = None, timeout_seconds: float | None = None
    ) -> list[Any]:
        if error is not None:
            raise error
        name = tag.removesuffix("/digests")
        if name != tag:
            (key,) = value
            answer: list[Any] = [value if stage == 0 else {key: f"{stage:032x}"} for stage in self._stage]
        elif tag == "plan/lists":
            answer = self._of_stages(value, [{"list": listed} for listed in self._lists])
        elif tag == "load-plan":
            answer = self._of_stages(value, [{"0": [[], self.strangers(stage)]} for stage in range(self._of.stages)])
        elif tag in ("dcp-chunks", "dcp-places"):
            answer = self._of_stages(value, [{"rows": [one["names"], one["kind_of"]]} for one in self._lists])
        elif tag.endswith("/kinds"):
            answer = [self.facts(rank, tag.removesuffix("/kinds")) for rank in range(self.world_size)]
        elif tag == "written":
            files = [(record["name"].replace("00000", "{:05d}"), record) for record in value]
            answer = [
                [{**record, "name": name.format(rank), "digest": token_hex(16)} for name, record in files]
                for rank in range(self.world_size)
            ]
        else:
            answer = [value, [*map(sub, self._whole, value)], *[[0, 0]] * (self.world_size - 2)]
        sizes: dict[int, int] = {}
        num_bytes = _compressed(answer)
        for post in answer:
            if id(post) not in sizes:
                sizes[id(post)] = _compressed(post)
            num_bytes += sizes[id(post)]
        self.exchanged_bytes[name] = self.exchanged_bytes.get(name, 0) + num_bytes
        return answer

    def _of_stages(self, own: Any, posts: list[Any]) -> list[Any]:
        """Return what all ranks post: the lowest rank of each stage its list, the others nothing."""
        answer = [own, *[{}] * (self.world_size - 1)]
        for stage in range(1, self._of.stages):
            answer[self._stage.index(stage)] = posts[stage]
        return answer

    @property
    def names_and_kinds(self) -> tuple[list[str], list[int]]:
        """Return the tensors of rank 0's stage."""
        return self._lists[0]["names"], self._lists[0]["kind_of"]

    def strangers(self, stage: int) -> list[str]:
        """Return the tensors of a checkpoint that a rank of this stage has no use for: those of all other stages."""
        return [name for other, listed in enumerate(self._lists) if other != stage for name in listed["names"]]

    def facts(self, rank: int, tag: str) -> list[Any]:
        """Return what a rank posts in a DCP export: for each kind of tensor its chunks, or the places of them."""
        places = [
            _chunk_at(tuple(shape), placements, self._of.mesh, rank % prod(self._of.mesh))
            for _, shape, _, placements in self._lists[self._stage[rank]]["kinds"]
        ]
        return places if tag == "dcp-places" else [[offsets] for offsets, _, _ in places]


def _chunk_at(shape: tuple[int, ...], placements: list[str], mesh: tuple[int, ...], position: int) -> list[Any]:
    """Return offsets, sizes and bytes in a DCP file of the chunk that the rank at a position of a mesh holds."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if "Shard" in placement:
            dim = int(placement[-2])
            index = position // prod(mesh[axis + 1 :]) % mesh[axis]
            size = -(-sizes[dim] // mesh[axis])
            begin = min(index * size, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + begin, min(size, sizes[dim] - begin)
    return [offsets, sizes, prod(sizes) * 4 + 1344]


def _compressed(value: Any) -> int:
    """Return the bytes of a value in the store, as titan_ckpt/distributed/coordinator.py makes them."""
    return len(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))


def _ranks(run: Run, stage: int) -> torch.Tensor:
    per_stage = prod(run.mesh)
    return torch.arange(stage * per_stage, (stage + 1) * per_stage).view(run.mesh)


def _describe(run: Run, stage: int) -> dict[str, Any]:
    """List a stage's tensors as distributed/sharing.py does."""
    listed = _with_moments(run.tensors_of_stage(stage, run.stages))
    kinds: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    kind_of = [
        kinds.setdefault((shape, tuple(map(repr, placements))), len(kinds)) for shape, placements in listed.values()
    ]
    rows = [["float32", list(shape), 0, list(placements)] for shape, placements in kinds]
    meshes = [[list(run.mesh), _ranks(run, stage).flatten().tolist()]]
    return {"meshes": meshes, "kinds": rows, "names": list(listed), "kind_of": kind_of}


def _with_moments(shapes: Shapes) -> Shapes:
    return {f"{prefix}{fqn}": value for prefix in ("", "exp_avg.", "exp_avg_sq.") for fqn, value in shapes.items()}


def measure(run: Run) -> dict[str, Any]:
    """Plan as rank 0 of a job, lay its file out, read it back, and write the manifest."""
    dist.init_process_group("fake", rank=0, world_size=run.world_size, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", _ranks(run, 0), _init_backend=False)
        state = {fqn: _shard(mesh, *spec) for fqn, spec in _with_moments(run.tensors_of_stage(0, run.stages)).items()}
        gathered = _Gathered(run)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _memory("VmRSS")
        begin = time.perf_counter()
        shares, infos, _ = ownership.divide(state, gathered)
        here = {share.name for share in shares}
        chunks = [share[:3] for share in shares]
        chunks.sort(key=lambda chunk: -chunk[1].dtype.itemsize)
        elsewhere = {fqn: info for fqn, info in infos.items() if fqn not in here}
        layout = lay_out(chunks, 0, run.world_size, elsewhere)
        planned = time.perf_counter()
        gathered.gather_distinct("load-plan", lambda: {"0": [[], gathered.strangers(0)]})
        names_of_files = ("rank-00000.safetensors", "rank-00000.json")
        gathered.gather("written", [{"name": n, "num_bytes": 10**10, "digest": token_hex(16)} for n in names_of_files])
        of_stage = gathered.facts(0, "dcp-places")
        for tag in ("dcp-chunks", "dcp-places"):  # also of replicas, which write less
            rows = [(name, of_stage[kind]) for name, kind in zip(*gathered.names_and_kinds, strict=True)]
            gather_tables(gathered, tag, lambda rows=rows: {"rows": rows})  # type: ignore[misc]
        exchanged = time.perf_counter()
        header, _ = with_digests(layout.header, ["0" * 32] * -(-(layout.num_bytes - len(layout.header)) // BLOCK_BYTES))
        begin_open = time.perf_counter()
        parsed = parse_header(header, layout.num_bytes, "rank-00000.safetensors")
        names = len({**parsed.infos(), **parsed.elsewhere})
        opened = time.perf_counter()
        records = tuple(FileRecord(f"rank-{r:05d}.safetensors", 10**10, f"{r:032x}") for r in range(run.world_size))
        manifest = Manifest(1, "full", "0" * 32, run.world_size, 1.0, ("model",), [], None, None, records).to_bytes()
        return {
            "ranks": run.world_size,
            "tensors": names,
            "tensors_here": len(state),
            "plan_seconds": round(planned - begin, 3),
            "exchanged_mib": {name: round(n / 2**20, 2) for name, n in gathered.exchanged_bytes.items()},
            "exchange_seconds": round(exchanged - planned, 3),
            "header_mib": round(len(header) / 2**20, 2),
            "file_gib": round(layout.num_bytes / 2**30, 2),
            "open_seconds": round(opened - begin_open, 3),
            "manifest_mib": round(len(manifest) / 2**20, 2),
            "manifest_seconds": round(time.perf_counter() - opened, 3),
            "peak_mib": round(_memory("VmHWM") - before),
        }
    finally:
        dist.destroy_process_group()


def _memory(field: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def _shard(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Placement]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    local = list(shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    values = torch.empty(local, device="meta")
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def main() -> None:
    """Print one line per job."""
    options = parse("planning at scale")
    measured = {}
    for run in RUNS:
        found = measure(run)
        measured[f"{run.name}, {run.world_size} ranks"] = found
        print(f"{run.name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    if options.json:
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
