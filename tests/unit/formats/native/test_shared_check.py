"""A load verifies first and copies then: what may change in between, and who verifies what."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.native.test_native import FILE, MIB, assert_same, drop_from_page_cache, of, raw, save
from titan_ckpt.disk import page_cache
from titan_ckpt.disk.direct import FileReader
from titan_ckpt.disk.page_cache import Witness
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.shared_check import check_together, divided
from titan_ckpt.formats.native.transfers import BlockReader
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import ReadRequest, TensorReader


@pytest.fixture(autouse=True)
def _files_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be trusted that were written this second."""
    monkeypatch.setattr(page_cache, "_SETTLED_SECONDS", 0.0)


class Scripted:
    """A witness that holds until it has been asked some number of times."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def holds(self) -> bool:
        self._answers -= 1
        return self._answers >= 0

    def close(self) -> None: ...


def warm(folder: Path) -> None:
    for file in folder.iterdir():
        file.read_bytes()


def requests_for(into: dict[str, torch.Tensor]) -> list[ReadRequest]:
    return [ReadRequest(fqn, Chunk.whole(value.shape), value) for fqn, value in into.items()]


def tensors_of_every_path() -> dict[str, torch.Tensor]:
    """Return tensors that are read in place, scattered, small by the hundred, and arranged."""
    small = {f"small.{i}": of(torch.float32, 8, 8, seed=i) for i in range(300)}
    return small | {"large": of(torch.float32, 1500, 1024), "columns": of(torch.bfloat16, 1000, 1500)}


@pytest.mark.parametrize("answers", [10**6, 5, 0])
def test_what_is_watched_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """While the witness holds nothing is hashed a second time; from when it does not, all that is left is."""
    tensors = tensors_of_every_path()
    save(tmp_path, tensors)
    warm(tmp_path)
    hashed: list[int] = []
    real = BlockReader._verified

    def counted(self: BlockReader, index: int, block: list[memoryview]) -> bool:
        hashed.append(index)
        return real(self, index, block)

    monkeypatch.setattr(BlockReader, "_verified", counted)
    monkeypatch.setattr(FileReader, "witness", lambda _: Scripted(answers))
    into = {fqn: torch.zeros_like(value) for fqn, value in tensors.items() if fqn != "columns"}
    half = torch.zeros(1000, 750, dtype=torch.bfloat16)
    requests = [*requests_for(into), ReadRequest("columns", Chunk((0, 750), (1000, 750)), half)]
    with NativeReader(tmp_path) as reader:
        reader.check(requests)
        blocks = len(hashed)
        assert sorted(hashed) == list(range(blocks)) and blocks == (tmp_path / FILE).stat().st_size // MIB + 1
        reader.read(requests)
    again = hashed[blocks:]
    assert len(again) == (0 if answers > 5 else len(set(again)))
    assert (again == []) == (answers > 5) and (len(again) == blocks) == (answers == 0)
    assert raw(half) == raw(tensors.pop("columns")[:, 750:])
    assert_same(into, tensors)


def damaged_between(folder: Path, damage: Any) -> pytest.ExceptionInfo[CorruptCheckpointError]:
    """Verify, let `damage` happen, and read."""
    tensors = {f"t{i}": of(torch.uint8, MIB, seed=i) for i in range(12)}
    save(folder, tensors)
    warm(folder)
    time.sleep(0.05)  # the file system's clock
    into = {fqn: torch.zeros_like(value) for fqn, value in tensors.items()}
    requests = requests_for(into)
    with NativeReader(folder) as reader:
        reader.check(requests)
        assert not any(value.any() for value in into.values())
        damage(folder / FILE)
        with pytest.raises(CorruptCheckpointError) as caught:
            reader.read(requests)
    return caught


def test_a_page_read_anew_from_a_disk_that_answers_otherwise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages verified were dropped, and what is read in their place is not what they were."""
    real = FileReader.read_into

    def lying(self: FileReader, views: list[memoryview], offset: int) -> None:
        real(self, views, offset)
        views[0][7] ^= 1

    def evict(path: Path) -> None:
        drop_from_page_cache(path.parent)
        monkeypatch.setattr(FileReader, "read_into", lying)

    assert "12 block(s) do not have the digest" in str(damaged_between(tmp_path, evict).value)


@pytest.mark.parametrize("evicted", [True, False], ids=["evicted", "in memory"])
def test_bytes_written_after_they_were_verified_are_caught(tmp_path: Path, evicted: bool) -> None:
    """Whether the reader meets them in the page cache or on the disk; also where the file's old time is put back."""

    def write(path: Path) -> None:
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(status.st_size - 5 * MIB // 2)
            file.write(b"\0other\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if evicted:
            drop_from_page_cache(path.parent)

    assert "values of 1 tensor(s): t9" in str(damaged_between(tmp_path, write).value)


def test_a_witness_notices_reads_from_the_disk_and_writes(tmp_path: Path) -> None:
    """Of its own file; what else the machine reads makes it say no too, so a yes is waited for."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    drop_from_page_cache(tmp_path)

    def watched() -> Iterator[Witness]:
        for _ in range(200):
            path.read_bytes()
            with path.open("rb") as file:
                witness = Witness.of(file.fileno())
                if witness is None:
                    pytest.skip("the folder for tests is on no local disk")
                if witness.holds():
                    yield witness
                witness.close()
                assert not witness.holds()

    assert next(watched()).holds() or next(watched()).holds() or next(watched()).holds()
    for witness in watched():
        drop_from_page_cache(tmp_path)
        path.read_bytes()
        assert not witness.holds()
        break
    for witness in watched():
        time.sleep(0.05)
        path.write_bytes(b"x")
        assert not witness.holds()
        break


def test_a_file_changed_just_now_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write in the same tick of the file system's clock would leave its times as they are."""
    monkeypatch.setattr(page_cache, "_SETTLED_SECONDS", 1.0)
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        assert Witness.of(file.fileno()) is None


@pytest.mark.parametrize("sectors", [0, 8])
def test_a_disk_that_never_counts_is_no_witness(sectors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some drivers do not, however often it is read."""
    (tmp_path / "stat").write_text(f"  {sectors // 8}  0  {sectors}  0  5  0  40  1  0  2  2\n")
    monkeypatch.setattr(page_cache, "_device", lambda _: tmp_path)
    with (tmp_path / "stat").open("rb") as file:
        witness = Witness.of(file.fileno())
        assert (witness is not None) == (sectors > 0)
        if witness is not None:
            assert witness.holds()
            witness.close()


@given(st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=4), min_size=1, max_size=5))
def test_every_block_is_verified_by_exactly_one_rank_that_needs_it(ranks: list[list[tuple[int, int]]]) -> None:
    """Whatever each needs, of this file or another; those that need the same share it about equally."""
    needs = [{"a": [(first, first + n) for first, n in runs], "b": [(0, 99)]} for runs in ranks]
    wanted = [{i for first, n in runs for i in range(first, first + n)} for runs in ranks]
    found = [
        [i for a, b in divided("a", [(i, i + 1) for i in sorted(mine)], rank, needs) for i in range(a, b)]
        for rank, mine in enumerate(wanted)
    ]
    assert sorted(i for of_rank in found for i in of_rank) == sorted(set.union(*wanted))
    assert all(set(of_rank) <= mine for of_rank, mine in zip(found, wanted, strict=True))
    if all(mine == wanted[0] for mine in wanted):
        counts = [len(of_rank) for of_rank in found]
        assert max(counts) - min(counts) <= 2 * 4 * len(ranks)


class ChecksItself(TensorReader):
    """A reader of a third party whose `plan` returns files that ranks cannot divide."""

    tensors: Mapping[str, TensorInfo] = {}

    def __init__(self) -> None:
        self.checked: list[Sequence[ReadRequest]] = []

    def read(self, requests: Sequence[ReadRequest]) -> None: ...

    def check(self, requests: Sequence[ReadRequest]) -> None:
        self.checked.append(requests)

    def plan(self, requests: Sequence[ReadRequest]) -> Sequence[object]:
        return [object()]

    def close(self) -> None: ...


def test_a_reader_whose_files_cannot_be_divided_checks_them_itself() -> None:
    """Whatever its plan returns, its blocks are verified before anything is filled."""
    reader, requests = ChecksItself(), requests_for({"w": torch.zeros(2)})
    check_together([(reader, requests)], Coordinator(0, 1, None, "", 60.0))
    assert reader.checked == [requests]
