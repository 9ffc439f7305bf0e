"""A rank's file in a bucket: how it is sent and read, how much memory that takes, and how many requests."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fake_cuda import on_device
from tests.stores import servers
from tests.stores.conftest import place_in, through
from tests.stores.servers import Server
from tests.test_manager import Run
from titan_ckpt.config import SaveConfig
from titan_ckpt.disk import cuda
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.disk.workers import bounce_buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.formats.native.header import parse_header
from titan_ckpt.formats.native.rank_file import LARGE_BYTES, lay_out
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.sealed_file import BLOCK_BYTES, with_digests
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.reading import slices
from titan_ckpt.formats.reading.engine import SliceReader
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.object_files import ObjectReader, PartMemory
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import StoreConfig, open_location
from titan_ckpt.types import StateDict


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the address of each copy of a part."""
    addresses: list[int] = []
    take = PartMemory.take

    def noted(self: PartMemory, num_bytes: int) -> memoryview:
        view = take(self, num_bytes)
        addresses.append(np.frombuffer(view, np.uint8).ctypes.data)
        return view

    monkeypatch.setattr(PartMemory, "take", noted)
    return addresses


def attempt_in(place: BucketPath) -> BucketPath:
    """Return the place of an attempt's files."""
    return place / "data" / "step-1" / uuid.uuid4().hex


def bytes_in(folder: BucketPath, name: str = "rank-00000.safetensors") -> bytes:
    return folder.bucket.read((folder / name).key)[0]


def of_all_kinds() -> StateDict:
    """Return plain, strided, tiny and empty tensors, and one on a device: 22 MB."""
    torch.manual_seed(0)
    return {
        "plain": torch.nn.Parameter(torch.randn(1800, 1000)),
        "strided": torch.randn(1400, 900, dtype=torch.float64).t(),
        "device": on_device(torch.randn(600, 1000)),
        **{f"tiny.{i}": torch.randn(7) for i in range(300)},
        "flags": torch.rand(1 << 20) > 0.5,
        "empty": torch.empty(0, 3),
        "bf16": torch.randn(500, 1000).bfloat16(),
    }


def test_large_tensors_are_sent_from_their_own_memory(server: Server, tmp_path: Path, taken: list[int]) -> None:
    """No part of them is copied, and the object has the bytes that a disk gets; so has one from a staged copy."""
    state: StateDict = {f"{i}": torch.randn(3, 700, 1000) for i in range(2)} | {"n": torch.randn(9).bfloat16()}
    plan = WritePlan.of(state, Coordinator.current())
    on_disk = plan.write(tmp_path, state)
    folder = attempt_in(place_in(server, part_mib=5, concurrency=2))
    assert plan.write(folder, state) == on_disk
    assert bytes_in(folder) == (tmp_path / on_disk.name).read_bytes()
    staged, folder = StagedFile(plan), attempt_in(place_in(server, part_mib=5))
    staged.begin(state).finish()
    assert staged.write(folder) == on_disk
    assert bytes_in(folder) == (tmp_path / on_disk.name).read_bytes()
    staged.close()
    assert not taken


@pytest.mark.parametrize("concurrency", [1, 3])
def test_other_tensors_are_copied_into_fewer_parts_than_are_in_flight(
    s3: Server, tmp_path: Path, taken: list[int], concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part's memory is used again when its request is answered, and not before: the bytes are those of a disk."""
    monkeypatch.setattr(cuda, "settle", lambda _: None)
    state = of_all_kinds()
    plan = WritePlan.of(state, Coordinator.current())
    on_disk = plan.write(tmp_path, state)
    folder = attempt_in(place_in(s3, part_mib=5, concurrency=concurrency))
    assert plan.write(folder, state) == on_disk
    assert bytes_in(folder) == (tmp_path / on_disk.name).read_bytes()
    assert len(taken) >= 3 and len(set(taken)) <= max(1, concurrency - 1)


def test_memory_of_a_part_is_lent_again_when_the_last_view_of_it_is_gone() -> None:
    """Views of views hold it, too; who asks for it meanwhile waits."""
    parts = PartMemory(8192, 1)
    first = parts.take(5000)
    held = np.frombuffer(first[100:200], np.uint8)
    again: list[memoryview] = []
    waiter = threading.Thread(target=lambda: again.append(parts.take(8192)))
    waiter.start()
    del first
    waiter.join(0.2)
    assert waiter.is_alive() and len(held) == 100
    del held
    waiter.join(60)
    assert [len(view) for view in again] == [8192]


def read(folder: BucketPath, **targets: torch.Tensor) -> None:
    with NativeReader(folder) as reader:
        requests = [Block(Chunk.whole(into.shape), into, fqn) for fqn, into in targets.items()]
        reader.plan(requests)()


def written(place: BucketPath, state: StateDict) -> BucketPath:
    folder = attempt_in(place)
    WritePlan.of(state, Coordinator.current()).write(folder, state)
    return folder


def test_a_file_is_read_in_requests_of_a_part(s3: Server) -> None:
    """Of 16 MiB at most: larger answers would only take more memory."""
    place = place_in(s3)
    state = {"a": torch.randn(5, 1000, 500), "b": torch.randn(300, 1000)}
    folder = written(place, state)
    for part_mib, expected in ((5, 3), (8, 2), (512, 1)):
        with servers.Proxy(s3.endpoint, lambda *_: None) as proxy:
            into = {fqn: torch.zeros_like(value) for fqn, value in state.items()}
            read(through(folder, proxy, part_mib=part_mib), **into)
            asked = [path for method, path in proxy.requests if method == "GET" and path.endswith("00000.safetensors")]
        assert len(asked) == 1 + expected, part_mib
        assert all(torch.equal(into[fqn], state[fqn]) for fqn in state)


def test_a_damaged_block_of_a_request_is_named_and_copied_nowhere(s3: Server) -> None:
    """The other blocks of the same request are right, and are copied."""
    value = torch.randn(5, 1 << 18)  # five blocks
    assert value[0].nbytes == BLOCK_BYTES
    folder = written(place_in(s3), {"a": value})
    data = bytearray(bytes_in(folder))
    data[-2 * BLOCK_BYTES - 1] ^= 1
    folder.bucket.upload((folder / "rank-00000.safetensors").key, iter([memoryview(data)]), 5 << 20)
    into = torch.zeros_like(value)
    with pytest.raises(CorruptCheckpointError, match=r"1 block.* do not have the digest"):
        read(folder, a=into)
    assert torch.equal(into, value * torch.tensor([1, 1, 0, 1, 1]).view(5, 1))
    with NativeReader(folder) as reader, pytest.raises(CorruptCheckpointError, match=r"1 block.* do not have"):
        reader.verify()


def test_a_block_that_is_wrong_in_one_answer_is_asked_for_again(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer for a range has a flipped bit; a request for that block alone brings the right one."""
    value = torch.randn(5, 1 << 18)
    folder = written(place_in(s3), {"a": value})
    real, asked = Bucket.read_range, list[int]()

    def flipped(self: Bucket, key: str, start: int, stop: int) -> memoryview:
        answer = bytearray(real(self, key, start, stop))
        answer[-1] ^= 0 if asked else 1
        asked.append(stop - start)
        return memoryview(answer)

    monkeypatch.setattr(Bucket, "read_range", flipped)
    read(folder, a=(into := torch.zeros_like(value)))
    assert torch.equal(into, value) and asked[1:] == [BLOCK_BYTES]


def test_what_is_read_is_cast_and_laid_out_and_copied_to_devices(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts and strides are made from the answer's memory; a device's copy is made from a bounce buffer."""
    lent: list[Buffer] = []

    @contextlib.contextmanager
    def noted() -> Iterator[Buffer]:
        with bounce_buffer() as buffer:
            lent.append(buffer)
            yield buffer

    def upload(values: torch.Tensor, _: torch.device) -> torch.Tensor:
        assert any(0 <= values.data_ptr() - buffer.address < len(buffer.view) for buffer in lent)
        return on_device(values.clone())

    monkeypatch.setattr(slices, "upload", upload)
    value, mask = torch.randn(1100, 1000), torch.tensor([True, False, True])
    folder = written(place_in(s3), {"a": value, "mask": mask})
    targets = [torch.zeros(1100, 1000, dtype=torch.float64), torch.zeros(1000, 1100).t(), torch.zeros(1100, 1000)]
    for target in targets:
        read(folder, a=target, mask=(flags := torch.zeros(3, dtype=torch.bool)))
        assert torch.equal(target, value.to(target.dtype)) and torch.equal(flags, mask)
    assert not lent
    monkeypatch.setattr(slices, "bounce_buffer", noted)
    target = on_device(torch.zeros(1100, 1000))
    read(folder, a=target)
    assert lent and torch.equal(target, value)


def test_a_load_lists_commits_and_files_no_more_than_it_must(s3: Server, tmp_path: Path) -> None:
    """Once, by number or not: the manifest, which every rank reads, shows that the step is still there."""
    run, place = Run(), place_in(s3)
    with servers.Proxy(s3.endpoint, lambda *_: None) as proxy:
        store = through(place, proxy).bucket.settings
        with run.manager(tmp_path, folder=str(place), store=store, save=SaveConfig(interval=1)) as manager:
            manager.save(1)
            manager.wait()
        for step in (1, -1):
            proxy.requests.clear()
            with run.manager(tmp_path, folder=str(place), store=store, save=None) as manager:
                assert manager.load(step).step == 1
            listed = [path for _, path in proxy.requests if "list-type=2" in path]
            counts = [sum(f"%2F{name}%2F" in path for path in listed) for name in ("commits", "data")]
            assert counts == [1, 1], listed


@pytest.mark.parametrize("part_mib", [8, 64])
def test_a_bucket_is_asked_for_ranges_that_end_where_its_parts_do(part_mib: int) -> None:
    """A large data section begins at a multiple of 1 MiB, and each request ends at one of its size in the object."""
    num_bytes = LARGE_BYTES + 5 * BLOCK_BYTES + 12
    info = TensorInfo((num_bytes,), torch.uint8)
    layout = lay_out([("x", info, Chunk.whole(info.shape))], 0, 1)
    small = lay_out([("x", TensorInfo((9,), torch.uint8), Chunk.whole((9,)))], 0, 1)
    assert (len(small.header), len(layout.header)) == (4096, BLOCK_BYTES)
    raw, _ = with_digests(layout.header, ["0" * 32] * -(-(layout.num_bytes - len(layout.header)) // BLOCK_BYTES))
    header = parse_header(raw, layout.num_bytes, "rank-00000.safetensors")
    place = open_location("s3://bucket/rank-00000.safetensors", settings=StoreConfig())
    assert isinstance(place, BucketPath)
    place.bucket.part_mib = part_mib
    known = BucketPath(place.bucket, place.key, {place.key: (raw, layout.num_bytes)})  # so that nothing is sent
    part = slices.Slice("x", header.blocks.start, info.shape, info.dtype, None, torch.empty(0))
    windows = SliceReader(ObjectReader(known), header.blocks, [part]).windows
    assert [start for start, _ in windows] == [header.blocks.start, *(stop for _, stop in windows[:-1])]
    request = min(part_mib, 16) << 20
    assert [stop for _, stop in windows] == [*range(request, layout.num_bytes, request), layout.num_bytes]
