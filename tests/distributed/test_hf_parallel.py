"""Hugging Face folders under parallelism: every layout writes the same files, and loads them."""

from __future__ import annotations

import contextlib
import errno
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.distributed.layouts import mesh_of, split_heads
from tests.faults.shim import FailAt, intercepted
from tests.forked import resident
from tests.world import contents, fill, llama, misplaced, on_ranks, write_hf
from titan_ckpt.disk import kernel, posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import PeerGroups, Ranks
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish import exchange as exchange_module
from titan_ckpt.formats.publish import write as export_writer
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo, blocks_of, info_of, local_tensor
from titan_ckpt.geometry.keymap import Concat, KeyMap, KeyRule, PermuteRotary, Tie
from titan_ckpt.models import qwen3_moe
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

Layout = Callable[..., StateDict]
"""Lays out the model it is given, by default that of this file."""


def model() -> Llama3:
    """The same model on every rank."""
    return llama(CONFIG, 3)


def single(made: Any = None) -> StateDict:
    return dict((made or model()).state_dict())


def laid_out(made: Any, tensor: DeviceMesh | None = None, sharded: DeviceMesh | None = None) -> StateDict:
    """Split the heads of a model's layers over one mesh, and shard it over another."""
    made = made or model()
    for layer in made.layers.values():
        if tensor is not None:
            split_heads(layer, tensor)
        if sharded is not None:
            fully_shard(layer, mesh=sharded)
    if sharded is not None:
        fully_shard(made, mesh=sharded)
    return single(made)


def _mesh(*names: str) -> DeviceMesh:
    """Return all ranks as one axis, or as two of which the first has two."""
    world = dist.get_world_size()
    return mesh_of("cpu", (2, world // 2) if names else (world,), mesh_dim_names=names or None)


def fsdp(made: Any = None) -> StateDict:
    return laid_out(made, sharded=_mesh())


def hsdp(made: Any = None) -> StateDict:
    made = made or model()
    fully_shard(made, mesh=_mesh("replicate", "shard"))
    return single(made)


def tensor_parallel(made: Any = None) -> StateDict:
    return laid_out(made, _mesh())


def fsdp_and_tensor_parallel(made: Any = None) -> StateDict:
    mesh = _mesh("shard", "tensor")
    return laid_out(made, mesh["tensor"], mesh["shard"])


def replicated_tensor_parallel(made: Any = None) -> StateDict:
    """DDP around tensor parallelism: every tensor is on several meshes that know nothing of each other."""
    return laid_out(made, _mesh("replicate", "tensor")["tensor"])


def columns(made: Any = None) -> StateDict:
    return {k: distribute_tensor(v, _mesh(), [Shard(v.dim() - 1)]) for k, v in single(made).items()}


def rows_and_columns(made: Any = None) -> StateDict:
    mesh = mesh_of("cpu", (2, dist.get_world_size() // 2))

    def placements(value: torch.Tensor) -> list[Placement]:
        return [Shard(1), Shard(0)] if value.dim() > 1 else [Replicate(), Shard(0)]

    return {k: distribute_tensor(v, mesh, placements(v)) for k, v in single(made).items()}


def pipeline(made: Any = None) -> StateDict:
    """One layer on each of the first two ranks, the rest on the last; of four ranks one has nothing."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    owner = {"tok_embeddings": 0, "layers.0": 0, "layers.1": 1, "norm": last, "output": last}
    return {k: v for k, v in single(made).items() if any(k.startswith(f"{p}.") and rank == r for p, r in owner.items())}


def pipeline_and_fsdp(made: Any = None) -> StateDict:
    """Two stages of half the ranks each, sharded within the stage."""
    mesh = _mesh("stage", "shard")
    stage = mesh.get_local_rank("stage")
    first = ("tok_embeddings.", "layers.0.")
    mine = {k: v for k, v in single(made).items() if k.startswith(first) == (stage == 0)}
    return {k: distribute_tensor(v, mesh["shard"], [Shard(0)], src_data_rank=None) for k, v in mine.items()}


def experts_and_rows(made: Any = None) -> StateDict:
    """Experts over one axis of ranks, the rows of each over the other."""
    mesh = mesh_of("cpu", (2, dist.get_world_size() // 2))
    return {
        k: distribute_tensor(v, mesh, [Shard(0), Shard(1) if v.dim() > 1 else Replicate()])
        for k, v in single(made).items()
    }


def sparse() -> Any:
    """One dense layer, and one of five experts of 27 rows: neither divides. The same on every rank."""
    torch.manual_seed(3)
    made = qwen3_moe.Qwen3Moe(
        replace(
            qwen3_moe.FLAVORS["debug-1m"], max_seq_len=64, vocab_size=161, num_layers=2, num_experts=5, expert_dim=27
        )
    )
    made.init_weights()
    return made


ON_TWO = [fsdp, tensor_parallel, columns, single, pipeline]
ON_FOUR = [
    fsdp, hsdp, fsdp_and_tensor_parallel, replicated_tensor_parallel, rows_and_columns, columns, single, pipeline,
    pipeline_and_fsdp,
]  # fmt: skip


ALONE = Coordinator(0, 1, None, "", 60.0)


def export(
    state: StateDict, folder: Path, coordinator: Coordinator, dtype: torch.dtype | None = None, made: Any = None
) -> None:
    made = made or model()
    about = {"config": made.hf_config(), "max_shard_bytes": 150_000}
    write_hf(folder, state, made.key_map(), dtype=dtype, line=coordinator, **about)


def write_and_load(root: Path, layouts: Sequence[Layout], make: Callable[[], Any] = model) -> None:
    """Compare the folder that each layout writes with that of whole tensors; then load it into the emptied shards."""
    plain = make()
    whole = single(plain)
    for dtype in (None, torch.bfloat16) if make is model else (None,):
        reference = root / f"reference-{dtype}"
        if dist.get_rank() == 0:
            export(whole, reference, ALONE, dtype, plain)
        dist.barrier()
        digests = logical_digests({k: v.to(dtype or v.dtype) for k, v in whole.items()}, ALONE)
        for layout in layouts:
            folder = root / f"{layout.__name__}-{dtype}"
            state = layout(make())
            export(state, folder, Coordinator.current(60.0), dtype, plain)
            assert contents(folder) == contents(reference), layout.__name__
            state = {fqn: value.to(dtype or value.dtype) for fqn, value in state.items()}
            for value in state.values():
                local_tensor(value).detach().zero_()
            fill(state, folder, plain.key_map())
            assert logical_digests(state, Coordinator.current(60.0)) == digests, layout.__name__
            assert misplaced(state, {k: v.to(dtype or v.dtype) for k, v in whole.items()}) == [], layout.__name__
            dist.barrier()
    assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []


CASES: dict[str, tuple[int, list[Layout], Callable[[], Any]]] = {
    "two": (2, ON_TWO, model),
    "four": (4, ON_FOUR, model),
    "experts on two": (2, [fsdp, tensor_parallel, pipeline, columns], sparse),
    "experts on four": (4, [fsdp_and_tensor_parallel, experts_and_rows, columns], sparse),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_write_what_one_writes_and_load_their_slices(tmp_path: Path, name: str) -> None:
    """Each layout gives byte-identical folders with the digests sent, plain and cast, and is filled from them.

    FSDP2, TP, dim-1 shards, replicas and PP; HSDP, FSDP2 + TP, TP under DDP, 2-D shards and PP + FSDP; experts by rows.
    """
    nproc, layouts, make = CASES[name]
    on_ranks(nproc, write_and_load, tmp_path, layouts, make)


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
        export(doubled, tmp_path / "one", ALONE)
        assert contents(tmp_path / "two") == contents(tmp_path / "one")


@distributed(nproc=2)
def test_after_an_error_on_one_rank_collectives_keep_their_order(tmp_path: Path) -> None:
    """That of the files, in which the other rank makes them, also between two tensors that make one in the file.

    An interrupt is no other error: the training goes on, or ends, with no rank in a collective of the export.
    """
    rows = {"c": 3, "a": 4, "d": 50, "b": 600}
    seen: list[str] = []
    errors: list[BaseException] = [ValueError("no room"), KeyboardInterrupt("no room")]

    def summed(name: str) -> LazyTensor:
        info = TensorInfo((rows[name], 2), torch.float32)

        def blocks() -> list[Block]:
            seen.append(name)
            value = torch.ones(info.shape)
            dist.all_reduce(value)
            if name == "a" and dist.get_rank() == 1:
                raise errors[0]
            return [Block(Chunk.whole(info.shape), value)]

        return LazyTensor(info, blocks, collective=True, like=torch.empty(info.shape, device="meta"))

    joined = KeyRule.of(("a", "d"), "a", Concat((rows["a"], rows["d"])))
    table = KeyMap((joined, KeyRule.of("b", "b"), KeyRule.of("c", "c")))
    while errors:
        seen.clear()
        with pytest.raises((ExportError, KeyboardInterrupt), match="no room"):
            write_hf(tmp_path / "out", {name: summed(name) for name in rows}, table)
        assert seen == ["a", "d", "b", "c"]
        values = torch.ones(())
        dist.all_reduce(values)  # as training goes on
        assert values == 2
        del errors[0]


@distributed(nproc=2)
def test_a_lazy_tensor_that_does_not_say_how_it_is_held(tmp_path: Path) -> None:
    """Without `like` every rank writes what it holds, and the folder is the same."""

    def bare(value: Any) -> LazyTensor:
        return LazyTensor(info_of(value), lambda: blocks_of(value))

    for name, layout in {"fsdp": fsdp, "replicas": single}.items():
        export({k: bare(v) for k, v in layout().items()}, tmp_path / name, Coordinator.current(60.0))
    if dist.get_rank() == 0:
        export(single(), tmp_path / "one", ALONE)
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
        export(single(), tmp_path / "base", ALONE)
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
    write_hf(folder, state, table, line=coordinator, max_shard_bytes=10_000_000)


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
        export_columns(dict(whole), tmp_path / "one", ALONE)
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
        (breaks_off, "the exchange between ranks 0, 1 broke off: Connection reset by peer"),
    ):
        with tampered(then), pytest.raises(ExportError, match=message):
            export_columns(lasting_columns(), tmp_path / "out", Coordinator.current(60.0))
        dist.barrier()

    def mirrored(whole: torch.Tensor, box: Chunk, rows: Chunk) -> torch.Tensor:
        columns = box.offsets[1]
        return whole[:, 512 - columns : 1024 - columns]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "_place", mirrored)
        with pytest.raises(ExportError) as caught:
            export_columns(lasting_columns(), tmp_path / "out", Coordinator.current(60.0))
    assert "read back differ from what was written" in str(caught.value)
    mesh = init_device_mesh("cpu", (2,))
    copies: dict[str, Any] = {
        name: DTensor.from_local(torch.ones(100, 50), mesh, [Shard(1)], run_check=False) for name in ("a", "b")
    }
    copies["b"]._local_tensor[3, 4] += dist.get_rank()
    of_stage = {"ab"[dist.get_rank()]: torch.full((100, 50), dist.get_rank())}
    for state in (copies, of_stage):
        with pytest.raises(ExportError, match=r"of x \(tied, and not equal: a, b\)"):
            write_hf(tmp_path / "out", state, KeyMap((KeyRule.of(("a", "b"), "x", Tie(2)),)))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let this process's disk be full: the kernel refuses to let a file grow past 1000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@distributed(nproc=2)
def test_a_full_disk_on_one_rank_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    """The rank that cannot write says so, the other names it, nobody waits, no folder and no rest remain.

    A rank that cannot write columns goes on exchanging them, so that the other one does not wait in vain.
    """
    rows, columns = {k: lazily_doubled(v) for k, v in fsdp().items()}, lasting_columns()
    cases: list[tuple[Callable[..., None], StateDict, Callable[[], Any], str]]
    cases = [(export, rows, small_files, "File too large")]
    for ordinal in (2, 3, 5, 9):
        full = FailAt(ordinal=ordinal, errno=errno.ENOSPC, lasting=ordinal == 3, named="pwrite_all")
        cases.append((export_columns, columns, partial(intercepted, full), "No space left"))
    for failing, (act, state, full_disk, cause) in product((0, 1), cases):
        is_failing, started = dist.get_rank() == failing, time.monotonic()
        with (
            full_disk() if is_failing else contextlib.nullcontext(),
            pytest.raises(ExportError, match="nothing was published") as caught,
        ):
            act(state, tmp_path / "out", Coordinator.current(600.0))
        assert time.monotonic() - started < 100
        assert isinstance(caught.value.__cause__, OSError if is_failing else PeerError)
        assert cause in str(caught.value)
        assert is_failing or f"rank {failing} failed: OSError" in str(caught.value)
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
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident()
        with pytest.MonkeyPatch.context() as patch:
            if mapped:  # as where gloo cannot connect the ranks
                patch.setattr(export_writer, "row_peers", lambda _: {})
            write_hf(tmp_path / f"{dim}-{mapped}", state, dtype=torch.bfloat16)
        assert resident("VmHWM") - before < 64 << 20
