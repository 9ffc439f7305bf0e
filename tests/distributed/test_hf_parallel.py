"""Hugging Face folders under parallelism: every layout writes the same files, and loads them."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from tests.faults.shim import FailAt, intercepted
from titan_ckpt.disk import kernel, posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import PeerGroups, Ranks
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish import columns as export_columns_module
from titan_ckpt.formats.publish import write as export_writer
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, blocks_of, info_of
from titan_ckpt.geometry.keymap import KeyMap, KeyRule, PermuteRotary, Tie
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict
from titan_ckpt.weights.digest import logical_digests
from titan_ckpt.weights.transforms import StateDictTransforms

CONFIG = replace(
    FLAVORS["debug-0.5m"], vocab_size=161, num_layers=2, max_seq_len=64, tie_embeddings=False,
    num_heads=6, num_kv_heads=3, head_dim=18,
)  # fmt: skip
"""54 rows of keys: on 2 ranks and on 4 a shard begins inside a head, at an odd row. 161 rows divide by nothing."""

TENSOR_PARALLEL = {
    "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(), "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}  # fmt: skip


def model() -> Llama3:
    """The same model on every rank."""
    torch.manual_seed(3)
    made = Llama3(CONFIG)
    made.init_weights()
    return made


def state_of(made: torch.nn.Module) -> StateDict:
    return dict(made.state_dict())


def single() -> StateDict:
    return state_of(model())


def fsdp() -> StateDict:
    made = model()
    for layer in made.layers.values():
        fully_shard(layer)
    fully_shard(made)
    return state_of(made)


def hsdp() -> StateDict:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    made = model()
    fully_shard(made, mesh=mesh)
    return state_of(made)


def tensor_parallel() -> StateDict:
    made = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made.layers.values():
        parallelize_module(layer, mesh, TENSOR_PARALLEL)
    return state_of(made)


def fsdp_and_tensor_parallel() -> StateDict:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("shard", "tensor"))
    made = model()
    for layer in made.layers.values():
        parallelize_module(layer, mesh["tensor"], TENSOR_PARALLEL)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(made, mesh=mesh["shard"])
    return state_of(made)


def replicated_tensor_parallel() -> StateDict:
    """DDP around tensor parallelism: every tensor is on several meshes that know nothing of each other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "tensor"))
    made = model()
    for layer in made.layers.values():
        parallelize_module(layer, mesh["tensor"], TENSOR_PARALLEL)
    return state_of(made)


def columns() -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {k: distribute_tensor(v, mesh, [Shard(v.dim() - 1)]) for k, v in single().items()}


def rows_and_columns() -> StateDict:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))

    def placements(value: torch.Tensor) -> list[Placement]:
        return [Shard(1), Shard(0)] if value.dim() > 1 else [Replicate(), Shard(0)]

    return {k: distribute_tensor(v, mesh, placements(v)) for k, v in single().items()}


def pipeline() -> StateDict:
    """One layer on each of the first two ranks, the rest on the last; of four ranks one has nothing."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    owner = {"tok_embeddings": 0, "layers.0": 0, "layers.1": 1, "norm": last, "output": last}
    return {k: v for k, v in single().items() if any(k.startswith(f"{p}.") and rank == r for p, r in owner.items())}


def pipeline_and_fsdp() -> StateDict:
    """Two stages of half the ranks each, sharded within the stage."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "shard"))
    stage = mesh.get_local_rank("stage")
    first = ("tok_embeddings.", "layers.0.")
    mine = {k: v for k, v in single().items() if k.startswith(first) == (stage == 0)}
    return {k: distribute_tensor(v, mesh["shard"], [Shard(0)], src_data_rank=None) for k, v in mine.items()}


ON_TWO = [fsdp, tensor_parallel, columns, single, pipeline]
ON_FOUR = [
    fsdp, hsdp, fsdp_and_tensor_parallel, replicated_tensor_parallel, rows_and_columns, columns, single, pipeline,
    pipeline_and_fsdp,
]  # fmt: skip


def export(state: StateDict, folder: Path, coordinator: Coordinator, dtype: torch.dtype | None = None) -> None:
    made = model()
    groups = StateDictTransforms(made.key_map()).to_file(state, None, dtype)
    export_huggingface(
        folder, groups, config=made.hf_config(), assets=None, max_shard_bytes=150_000, coordinator=coordinator
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same_files_from_every_layout(root: Path, layouts: Sequence[Callable[[], StateDict]]) -> None:
    for dtype in (None, torch.bfloat16):
        reference = root / f"reference-{dtype}"
        if dist.get_rank() == 0:
            export(single(), reference, Coordinator(0, 1, None, "", 60.0), dtype)
        dist.barrier()
        for layout in layouts:
            folder = root / f"{layout.__name__}-{dtype}"
            state = layout()
            export(state, folder, Coordinator.current(60.0), dtype)
            assert contents(folder) == contents(reference), layout.__name__
            sent = {fqn: value.to(dtype or value.dtype) for fqn, value in state.items()}
            assert logical_digests(sent, Coordinator.current(60.0)) == digests_of(folder), layout.__name__
    assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []


def digests_of(folder: Path) -> dict[str, str]:
    """The logical digests of what a folder holds, read by one rank."""
    with open_reader(folder) as reader:
        stored = next(iter(reader.tensors.values())).dtype
        state = {fqn: torch.zeros_like(value, dtype=stored) for fqn, value in single().items()}
        plan = StateDictTransforms(model().key_map()).from_file(state, reader.tensors, None, cast=False)
        assert not (plan.report.missing or plan.report.unexpected or plan.report.mismatched), plan.report
        reader.read(plan.requests)
    return logical_digests(state, Coordinator(0, 1, None, "", 60.0))


@distributed(nproc=2)
def test_two_ranks_write_what_one_writes(tmp_path: Path) -> None:
    """FSDP2, TP, dim-1 shards, replicas and PP give byte-identical folders with the digests sent, plain and cast."""
    same_files_from_every_layout(tmp_path, ON_TWO)


@distributed(nproc=4)
def test_four_ranks_write_what_one_writes(tmp_path: Path) -> None:
    """HSDP, FSDP2 + TP, TP under DDP, 2-D shards and PP + FSDP give byte-identical folders, in float32 and cast."""
    same_files_from_every_layout(tmp_path, ON_FOUR)


def every_layout_loads(root: Path, layouts: Sequence[Callable[[], StateDict]]) -> None:
    truth = single()
    if dist.get_rank() == 0:
        export(truth, root / "base", Coordinator(0, 1, None, "", 60.0))
    dist.barrier()
    for layout in layouts:
        state = layout()
        for value in state.values():
            (value._local_tensor if isinstance(value, DTensor) else value).detach().zero_()
        with open_reader(root / "base") as reader:
            plan = StateDictTransforms(model().key_map()).from_file(state, reader.tensors, None, cast=False)
            assert not plan.report.missing, layout.__name__
            assert not plan.report.mismatched, layout.__name__
            reader.read(plan.requests)
        for fqn, value in state.items():
            for block in blocks_of(value):
                where = tuple(slice(o, o + n) for o, n in zip(block.chunk.offsets, block.chunk.sizes, strict=True))
                assert torch.equal(block.data, truth[fqn][where]), (layout.__name__, fqn)


@distributed(nproc=2)
def test_two_ranks_load_their_slices(tmp_path: Path) -> None:
    """Every layout of two ranks is filled with exactly its values, straight from the folder."""
    every_layout_loads(tmp_path, ON_TWO)


@distributed(nproc=4)
def test_four_ranks_load_their_slices(tmp_path: Path) -> None:
    """Every layout of four ranks is filled with exactly its values, straight from the folder."""
    every_layout_loads(tmp_path, ON_FOUR)


def lazily_doubled(value: Any) -> LazyTensor:
    """Twice a sharded tensor, computed when it is written, with a collective on the way."""

    def blocks() -> list[Block]:
        one = torch.ones(())
        dist.all_reduce(one)
        return [Block(b.chunk, b.data * (2 * one / dist.get_world_size())) for b in blocks_of(value)]

    return LazyTensor(info_of(value), blocks, collective=True, like=value)


@distributed(nproc=2)
def test_lazy_tensors_with_collectives(tmp_path: Path) -> None:
    """Tensors that are merged by collectives while they are written give what one rank writes."""
    export({k: lazily_doubled(v) for k, v in fsdp().items()}, tmp_path / "two", Coordinator.current(60.0))
    if dist.get_rank() == 0:
        doubled = {k: v * 2 for k, v in single().items()}
        export(doubled, tmp_path / "one", Coordinator(0, 1, None, "", 60.0))
        assert contents(tmp_path / "two") == contents(tmp_path / "one")


@distributed(nproc=2)
def test_a_lazy_tensor_that_does_not_say_how_it_is_held(tmp_path: Path) -> None:
    """Without `like` every rank writes what it holds, and the folder is the same."""

    def bare(value: Any) -> LazyTensor:
        return LazyTensor(info_of(value), lambda: blocks_of(value))

    for name, layout in {"fsdp": fsdp, "replicas": single}.items():
        export({k: bare(v) for k, v in layout().items()}, tmp_path / name, Coordinator.current(60.0))
    if dist.get_rank() == 0:
        export(single(), tmp_path / "one", Coordinator(0, 1, None, "", 60.0))
        assert contents(tmp_path / "fsdp") == contents(tmp_path / "replicas") == contents(tmp_path / "one")


@distributed(nproc=2)
def test_lazy_tensors_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    """Blocks that do not make up the tensor would be zeros in the file, which no digest of what was written can see."""
    state = single()
    norm = state["norm.weight"]
    first_half = Block(Chunk((0,), (48,)), norm[:48])
    state["norm.weight"] = LazyTensor(info_of(norm), lambda: [first_half])
    with pytest.raises(ExportError, match=r"model\.norm\.weight: 48 elements in 1 parts were written of 96"):
        export(state, tmp_path / "out", Coordinator.current(60.0))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@distributed(nproc=2)
def test_a_rank_with_nothing_takes_part(tmp_path: Path) -> None:
    """One rank has the whole model, the other no tensor at all."""
    export(single() if dist.get_rank() == 1 else {}, tmp_path / "out", Coordinator.current(60.0))
    if dist.get_rank() == 0:
        export(single(), tmp_path / "one", Coordinator(0, 1, None, "", 60.0))
        assert contents(tmp_path / "out") == contents(tmp_path / "one")


def forbid_large_files() -> None:
    """From here on this process's disk is full: the kernel refuses to let a file grow past 1000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_fails_all_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    """The rank that cannot write says so, the other names it, nobody waits, no folder and no rest remain."""
    full_disk(tmp_path, failing)


@distributed(nproc=2)
def full_disk(tmp_path: Path, failing: int) -> None:
    state = {k: lazily_doubled(v) for k, v in fsdp().items()}
    if dist.get_rank() == failing:
        forbid_large_files()
    started = time.monotonic()
    with pytest.raises(ExportError, match="nothing was published") as caught:
        export(state, tmp_path / "out", Coordinator.current(600.0))
    assert time.monotonic() - started < 100
    if dist.get_rank() == failing:
        assert isinstance(caught.value.__cause__, OSError)
        assert "File too large" in str(caught.value)
    else:
        assert isinstance(caught.value.__cause__, PeerError)
        assert f"rank {failing} failed" in str(caught.value)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@distributed(nproc=2)
def test_ranks_that_disagree_about_a_tensor_export_nothing(tmp_path: Path) -> None:
    """Another shape on another rank is named, with both."""
    state = single()
    state["norm.weight"] = torch.ones(96 + dist.get_rank())
    with pytest.raises(ExportError, match=r"model\.norm\.weight"):
        export(state, tmp_path / "out", Coordinator.current(60.0))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@distributed(nproc=2)
def test_only_this_ranks_bytes_are_read(tmp_path: Path) -> None:
    """Two ranks with half of the rows each read half of the bytes each: the kernel's own count."""
    if dist.get_rank() == 0:
        export(single(), tmp_path / "base", Coordinator(0, 1, None, "", 60.0))
    dist.barrier()
    state = fsdp()
    with open_reader(tmp_path / "base") as reader:
        plan = StateDictTransforms(model().key_map()).from_file(state, reader.tensors, None, cast=False)
        before = bytes_read()
        reader.read(plan.requests)
        read = bytes_read() - before
    mine = sum(block.data.nbytes for value in state.values() for block in blocks_of(value))
    assert mine <= read <= mine * 1.05 + 4096


def bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def lasting_columns() -> StateDict:
    """Tensors that take many rounds of rows to put together, with heads that are mixed in memory; by columns."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    local = [torch.randn(rows, 512) for rows in (3 * 1500, 4101)]
    return {f"w{i}.weight": DTensor.from_local(part, mesh, [Shard(1)], run_check=False) for i, part in enumerate(local)}


def export_columns(state: StateDict, folder: Path, coordinator: Coordinator) -> None:
    table = KeyMap((KeyRule.of("w0.weight", "q.weight", PermuteRotary(3)), KeyRule.of("w1.weight", "w1.weight")))
    groups = StateDictTransforms(table).to_file(state, None, None)
    export_huggingface(
        folder, groups, config={"model_type": "x", "architectures": ["X"]}, assets=None, max_shard_bytes=10_000_000,
        coordinator=coordinator,
    )  # fmt: skip


@distributed(nproc=2)
def test_columns_are_put_together_or_written_through_mappings(tmp_path: Path) -> None:
    """Ranks that gloo connects, whatever host they say they are on, and ranks that it cannot, write what one writes.

    Where the file system reserves no space, ranks write rows and store nothing to a mapping.
    """
    state = lasting_columns()
    whole = {fqn: value.full_tensor() for fqn, value in state.items() if isinstance(value, DTensor)}
    mapped, true_map = [], posix.map_shared

    def counted(fd: int, offset: int, num_bytes: int) -> memoryview:
        mapped.append(num_bytes)
        return true_map(fd, offset, num_bytes)

    def refused(*_: object) -> None:
        raise RuntimeError("no route to host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posix, "map_shared", counted)
        patch.setattr(kernel, "BOOT_ID", Path(f"/nowhere/host-{dist.get_rank()}"))
        export_columns(state, tmp_path / "together", Coordinator.current(60.0))
        assert not mapped
        patch.setattr(Coordinator, "gloo_group", refused)
        export_columns(state, tmp_path / "mapped", Coordinator.current(60.0))
        assert mapped
        mapped.clear()
        patch.setattr(posix, "_fallocate", lambda *_: errno.EOPNOTSUPP)
        export_columns(state, tmp_path / "unreserved", Coordinator.current(60.0))
        assert not mapped, "a full disk would end the process"
    if dist.get_rank() == 0:
        export_columns(dict(whole), tmp_path / "one", Coordinator(0, 1, None, "", 60.0))
        one = contents(tmp_path / "one")
        assert [contents(tmp_path / name) for name in ("together", "mapped", "unreserved")] == [one] * 3


class Tampered:
    """An exchange after which something happens to what this rank has received."""

    def __init__(self, work: Any, then: Callable[[], object]) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()


@contextlib.contextmanager
def tampered(then: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Let exchanges of rows, not those of tables, be tampered with on this rank."""
    real = PeerGroups.exchange

    def exchange(self: PeerGroups, ranks: Ranks, send: Any, sizes: Any, receive: torch.Tensor, *rest: Any) -> Any:
        work = real(self, ranks, send, sizes, receive, *rest)
        return Tampered(work, lambda: then(receive)) if receive.numel() > 1 << 20 else work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerGroups, "exchange", exchange)
        yield


def breaks_off(received: torch.Tensor) -> None:
    raise RuntimeError("Connection reset by peer")


@distributed(nproc=2)
def test_columns_that_are_not_those_of_their_owner_are_found(tmp_path: Path) -> None:
    """A bit that changes on the way, columns in the wrong place of whole rows, tied copies that differ: none is right.

    The digest of a part is its owner's, so what was received and written as it came is found as well. So is what was
    not received, although all ranks are alive.
    """
    for then, message in (
        (lambda received: received[1000].add_(4), "read back differ from what was written"),
        (breaks_off, "the exchange of columns between ranks 0, 1 broke off: Connection reset by peer"),
    ):
        with tampered(then), pytest.raises(ExportError, match=message):
            export_columns(lasting_columns(), tmp_path / "out", Coordinator.current(60.0))
        dist.barrier()

    def mirrored(whole: torch.Tensor, box: Chunk, rows: Chunk) -> torch.Tensor:
        columns = box.offsets[1]
        return whole[:, 512 - columns : 1024 - columns]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_columns_module, "_part_of", mirrored)
        with pytest.raises(ExportError) as caught:
            export_columns(lasting_columns(), tmp_path / "out", Coordinator.current(60.0))
    assert "read back differ from what was written" in str(caught.value)
    mesh = init_device_mesh("cpu", (2,))
    copies: dict[str, Any] = {
        name: DTensor.from_local(torch.ones(100, 50), mesh, [Shard(1)], run_check=False) for name in ("a", "b")
    }
    copies["b"]._local_tensor[3, 4] += dist.get_rank()
    groups = StateDictTransforms(KeyMap((KeyRule.of(("a", "b"), "x", Tie(2)),))).to_file(copies, None, None)
    with pytest.raises(ExportError, match=r"of x \(tied, and not equal: a, b\)"):
        export_huggingface(
            tmp_path / "out", groups, config={"model_type": "x", "architectures": ["X"]}, assets=None,
            max_shard_bytes=10**9, coordinator=Coordinator.current(60.0),
        )  # fmt: skip
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_while_columns_are_put_together(tmp_path: Path, failing: int) -> None:
    """The rank that cannot write goes on exchanging, so the other does not wait in vain, and both know who failed."""
    full_disk_for_columns(tmp_path, failing)


@distributed(nproc=2)
def full_disk_for_columns(tmp_path: Path, failing: int) -> None:
    state = lasting_columns()
    for ordinal, lasting in ((2, False), (3, True), (5, False), (9, False)):
        full = FailAt(ordinal=ordinal, errno=errno.ENOSPC, lasting=lasting, named="pwrite_all")
        started = time.monotonic()
        with (
            intercepted(full) if dist.get_rank() == failing else contextlib.nullcontext(),
            pytest.raises(ExportError, match="No space left") as caught,
        ):
            export_columns(state, tmp_path / "out", Coordinator.current(600.0))
        assert time.monotonic() - started < 100
        if dist.get_rank() != failing:
            assert f"rank {failing} failed: OSError" in str(caught.value)
        dist.barrier()
        assert list(tmp_path.iterdir()) == []
        dist.barrier()


@distributed(nproc=2)
def test_an_export_needs_little_memory(tmp_path: Path) -> None:
    """Rows and columns of 48 MiB tensors are cast and written with less than 64 MiB on top of what is there."""
    mesh = init_device_mesh("cpu", (2,))
    for dim, mapped in ((0, False), (1, False), (1, True)):
        shape = [4096, 3072]
        shape[dim] //= 2
        state = {
            f"w{i}.weight": DTensor.from_local(torch.ones(shape), mesh, [Shard(dim)], run_check=False) for i in range(3)
        }
        groups = StateDictTransforms().to_file(state, None, torch.bfloat16)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status("VmRSS")
        with pytest.MonkeyPatch.context() as patch:
            if mapped:  # as where gloo cannot connect the ranks
                patch.setattr(export_writer.ExportWriter, "strided", lambda *_: {})
            export_huggingface(
                tmp_path / f"{dim}-{mapped}", groups, config={"model_type": "x", "architectures": ["X"]}, assets=None,
                max_shard_bytes=10**9, coordinator=Coordinator.current(60.0),
            )  # fmt: skip
        assert status("VmHWM") - before < 64 << 20


def status(name: str) -> int:
    """A field of this process's memory status, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def test_the_index_names_every_tensor_once(tmp_path: Path) -> None:
    """Written by one rank or by many, the index is complete."""
    export(single(), tmp_path / "out", Coordinator.current())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == len(single())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in single().values())
