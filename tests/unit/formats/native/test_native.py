"""The native format in one process: what is written is a safetensors file, and comes back bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from tests.world import differing, flip_bit
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotACheckpointError,
    SaveError,
    StateEncodingError,
)
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.formats.native.header import header_bytes
from titan_ckpt.formats.native.rank_file import STORED_DTYPES
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.sealed_file import BLOCK_BYTES
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.geometry.chunks import Block, Chunk

Tensors = dict[str, torch.Tensor]
FILE = "rank-00000.safetensors"
MIB = 1 << 20


def of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any dtype with random bits."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).view(shape)


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    return WritePlan.of(tensors, Coordinator.current()).write(folder, tensors)


def stage(plan: WritePlan, tensors: Mapping[str, torch.Tensor]) -> StagedFile:
    file = StagedFile(plan)
    file.begin(tensors).finish()
    return file


def load(folder: Path, like: Mapping[str, torch.Tensor]) -> Tensors:
    """Read every tensor whole, into fresh memory full of other bits."""
    into = {fqn: of(value.dtype, *value.shape, seed=1) for fqn, value in like.items()}
    with NativeReader(folder) as reader:
        reader.read([Block(Chunk.whole(value.shape), value, fqn) for fqn, value in into.items()])
    return into


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert not (places := differing(dict(found), dict(expected))), places


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def every_kind() -> Tensors:
    """Return tensors of every dtype and of every shape of memory."""
    base = of(torch.float32, 64, 50)
    tensors = {f"dtype.{dtype}": of(dtype, 5, 3) for dtype in STORED_DTYPES}
    return tensors | {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "scalar.bool": torch.tensor(True),
        "empty": torch.empty(0),
        "empty.inner": torch.empty(4, 0, 3, dtype=torch.int16),
        "one": torch.ones(1, 1, 1),
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "expanded": torch.arange(4.0).expand(3, 4),
        "conjugate": of(torch.complex64, 4, 4).conj(),
        "negative": of(torch.complex64, 4, 4).conj().imag,
        "shared.a": base[:10],
        "shared.b": base[5:15],
        "large": of(torch.float32, 1500, 1000),
        "large.odd": of(torch.uint8, 3 * MIB + 1),
        "large.strided": of(torch.bfloat16, 1001, 1203).t(),
        "name with spaces / ünïcode \U0001f9ed #1": torch.zeros(2),
        "__metadata__": torch.ones(3),
    }


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "live"])
def test_every_dtype_and_shape_of_memory_comes_back(tmp_path: Path, staged: bool, cached: bool) -> None:
    """Written from live memory or from the arena, read through the page cache or around it."""
    tensors = every_kind()
    plan = WritePlan.of(tensors, Coordinator.current())
    record = stage(plan, tensors).write(tmp_path) if staged else plan.write(tmp_path, tensors)
    assert (tmp_path / record.name).stat().st_size == record.num_bytes == plan.layout.num_bytes
    if not cached:
        drop_from_page_cache(tmp_path)
    assert_same(load(tmp_path, tensors), {fqn: value.resolve_conj().resolve_neg() for fqn, value in tensors.items()})
    with NativeReader(tmp_path) as reader:
        reader.verify()


def test_any_safetensors_reader_opens_the_file(tmp_path: Path) -> None:
    """The upstream library reads names, shapes, dtypes and values."""
    tensors = {"a": torch.randn(7, 3), "b": of(torch.float8_e4m3fn, 9), "c": torch.tensor(5), "none": torch.empty(0, 2)}
    save(tmp_path, tensors)
    with safetensors.safe_open(tmp_path / FILE, "pt") as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118
        assert file.metadata()["format"] == "pt"


def test_data_begins_aligned_and_elements_too(tmp_path: Path) -> None:
    """Direct I/O needs the one, typed views of mapped memory the other."""
    tensors = {"small": of(torch.uint8, 3), "wide": of(torch.float64, 5), "half": of(torch.bfloat16, 7)}
    save(tmp_path, tensors)
    content = (tmp_path / FILE).read_bytes()
    start = header_bytes(content[:8], len(content), FILE)
    assert start % 4096 == 0
    header = json.loads(content[8:start])
    assert header["wide"]["data_offsets"][0] % 8 == 0 and header["half"]["data_offsets"][0] % 2 == 0


def test_the_same_values_make_the_same_file(tmp_path: Path) -> None:
    """Live and staged writes agree byte for byte, and so do their digests."""
    tensors = every_kind()
    plan = WritePlan.of(tensors, Coordinator.current())
    records = []
    for name, write in (("live", lambda f: plan.write(f, tensors)), ("staged", stage(plan, tensors).write)):
        (tmp_path / name).mkdir()
        records.append(write(tmp_path / name))
    assert records[0] == records[1]
    assert (tmp_path / "live" / FILE).read_bytes() == (tmp_path / "staged" / FILE).read_bytes()


def test_a_staged_copy_is_not_the_live_memory(tmp_path: Path) -> None:
    """The file has what was staged, whatever happens to the tensors afterwards; so has that of the next save."""
    tensors = {"a": torch.arange(3 * MIB), "b": torch.ones(5)}
    file = StagedFile(WritePlan.of(tensors, Coordinator.current()))
    for step in range(3):
        expected = {fqn: value.clone() for fqn, value in tensors.items()}
        handle = file.begin(tensors)
        handle.wait()
        for value in tensors.values():
            value.add_(1)
        (tmp_path / str(step)).mkdir()
        handle.finish()
        file.write(tmp_path / str(step))
        assert_same(load(tmp_path / str(step), tensors), expected)


def test_the_plan_is_kept_while_names_shapes_and_dtypes_are(tmp_path: Path) -> None:
    """Other values, and other memory, do not change it; another tensor does."""
    coordinator = Coordinator.current()
    tensors = {"a": torch.zeros(10), "b": torch.zeros(3, 3)}
    plan = WritePlan.of(tensors, coordinator)
    assert WritePlan.of({fqn: torch.randn(v.shape) for fqn, v in tensors.items()}, coordinator, plan) is plan
    for other in (
        {"a": torch.zeros(10), "c": torch.zeros(3, 3)},
        {"a": torch.zeros(10), "b": torch.zeros(3, 4)},
        {"a": torch.zeros(10), "b": torch.zeros(3, 3, dtype=torch.int32)},
        {"b": torch.zeros(3, 3), "a": torch.zeros(10)},
        {"a": torch.zeros(10)},
    ):
        before, plan = plan, WritePlan.of(other, coordinator, plan)
        assert plan is not before
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        plan.write(folder, other)
        assert_same(load(folder, other), other)


def refused_at_the_open(patch: pytest.MonkeyPatch, refused: set[str]) -> None:
    real = os.open

    def without_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        fd = real(path, flags & ~os.O_DIRECT, *rest, **named)  # a file that is to be created is there, then
        if flags & os.O_DIRECT:
            refused.add("read" if flags & os.O_ACCMODE == os.O_RDONLY else "write")
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    patch.setattr(os, "open", without_direct)


def refused_at_the_first_use(patch: pytest.MonkeyPatch, refused: set[str]) -> None:
    """Also fallocate(2) is not there at all."""

    def refusing(name: str, what: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, *rest: Any) -> Any:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.add(what)
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *rest)

        return call

    for name, what in (("pwrite", "write"), ("preadv", "read")):
        patch.setattr(os, name, refusing(name, what))
    patch.setattr(posix, "_fallocate", lambda *_: errno.EOPNOTSUPP)


@pytest.mark.parametrize("refuse", [refused_at_the_open, refused_at_the_first_use])
def test_where_direct_io_is_refused_the_same_bytes_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch, set[str]], None]
) -> None:
    """Whenever the file system says so, writes and reads are buffered."""
    tensors, refused = every_kind(), set[str]()
    for name in ("direct", "buffered"):
        (tmp_path / name).mkdir()
    save(tmp_path / "direct", tensors)
    refuse(monkeypatch, refused)
    save(tmp_path / "buffered", tensors)
    drop_from_page_cache(tmp_path / "buffered")
    load(tmp_path / "buffered", tensors)
    assert refused == {"read", "write"}
    assert (tmp_path / "buffered" / FILE).read_bytes() == (tmp_path / "direct" / FILE).read_bytes()


# errors


def test_what_cannot_be_stored_is_named_all_at_once() -> None:
    """Meta, sparse, quantized and wrapped tensors and other objects, each with its reason."""
    bad: dict[str, Any] = {
        "a.meta": torch.empty(3, device="meta"),
        "b.sparse": torch.eye(3).to_sparse(),
        "c.object": [1, 2],
        "d.nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "fine": torch.ones(2),
    }
    with pytest.raises(StateEncodingError) as caught:
        WritePlan.of(bad, Coordinator.current())
    for fqn in bad:
        assert (fqn in str(caught.value)) == (fqn != "fine"), caught.value


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    """O_EXCL: a second writer fails, the first one's bytes stay."""
    save(tmp_path, {"a": torch.ones(3)})
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(FileExistsError):
        save(tmp_path, {"a": torch.zeros(3)})
    assert (tmp_path / FILE).read_bytes() == before


def test_absent_folders_and_files_are_told_apart(tmp_path: Path) -> None:
    """Nothing there, nothing of this format there, a committed file missing."""
    with pytest.raises(CheckpointNotFoundError):
        NativeReader(tmp_path / "nowhere")
    with pytest.raises(NotACheckpointError):
        NativeReader(tmp_path)
    manifest(tmp_path, FileRecord(FILE, 10, "0" * 32))
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors.*missing"):
        NativeReader(tmp_path)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
def test_a_damaged_block_is_named_with_its_tensors_and_all_that_were_overwritten(tmp_path: Path, cached: bool) -> None:
    """The message lists file, bytes and tensors. Cached bytes go straight to their place, also those of a bad block."""
    tensors = {f"t{i}": of(torch.uint8, BLOCK_BYTES, seed=i) for i in range(40)}
    save(tmp_path, tensors)
    path = tmp_path / FILE
    content = path.read_bytes()
    start = header_bytes(content[:8], len(content), FILE)
    flip_bit(path, start + 17 * BLOCK_BYTES + 5)
    if not cached:
        drop_from_page_cache(tmp_path)
    into = {fqn: torch.zeros_like(value) for fqn, value in tensors.items()}
    with NativeReader(tmp_path) as reader:
        unharmed = {fqn: value for fqn, value in into.items() if fqn != "t17"}
        reader.read([Block(Chunk.whole(value.shape), value, fqn) for fqn, value in unharmed.items()])
        assert_same(unharmed, {fqn: tensors[fqn] for fqn in unharmed})
        for value in into.values():
            value.zero_()
        with pytest.raises(CorruptCheckpointError, match=r"values of 1 tensor\(s\): t17\.") as caught:
            reader.read([Block(Chunk.whole(value.shape), value, fqn) for fqn, value in into.items()])
        changed = {fqn for fqn, value in into.items() if value.any()}
        assert changed == set(caught.value.overwritten) == {*into} - ({"t17"} if not cached else set())
        with pytest.raises(CorruptCheckpointError, match="t17"):
            reader.verify()
    assert caught.value.path == str(path) and f"{start + 17 * BLOCK_BYTES}-" in str(caught.value)


def test_a_cut_or_grown_file_is_noticed(tmp_path: Path) -> None:
    """Whatever its length."""
    tensors = {"a": torch.randn(300)}
    save(tmp_path, tensors)
    path = tmp_path / FILE
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 100, 4095, 4096, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpointError, match=FILE):
            load(tmp_path, tensors)
    path.write_bytes(content + b"\0")
    with pytest.raises(CorruptCheckpointError, match=FILE):
        load(tmp_path, tensors)


def test_links_folders_and_pipes_are_no_rank_files(tmp_path: Path) -> None:
    """Refused by name, without following or blocking."""
    (tmp_path / "real").mkdir()
    save(tmp_path / "real", {"a": torch.ones(3)})
    for make in (
        lambda path: path.symlink_to(tmp_path / "real" / FILE),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
    ):
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        make(folder / FILE)
        with pytest.raises(CorruptCheckpointError, match=FILE):
            NativeReader(folder)


def manifest(folder: Path, *records: FileRecord) -> None:
    """Commit the files by hand."""
    committed = Manifest(1, "full", "0" * 32, 1, 1.0, ("model",), [], None, None, records)
    (folder / "MANIFEST.json").write_bytes(committed.to_bytes())


def test_a_file_of_another_save_is_refused_by_the_manifest(tmp_path: Path) -> None:
    """Whole and valid in itself, but not what was committed."""
    tensors = {"a": torch.ones(3)}
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    record = save(tmp_path / "mine", tensors)
    save(tmp_path / "other", {"a": torch.zeros(3)})
    manifest(tmp_path / "mine", record)
    assert_same(load(tmp_path / "mine", tensors), tensors)
    os.replace(tmp_path / "other" / FILE, tmp_path / "mine" / FILE)
    with pytest.raises(CorruptCheckpointError, match="of another save"):
        load(tmp_path / "mine", tensors)
    manifest(tmp_path / "mine", dataclasses.replace(record, name="state.json"))
    with pytest.raises(CorruptCheckpointError, match="no such file"):
        NativeReader(tmp_path / "mine")


def test_a_failing_write_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in any worker thread is raised, and no thread is left behind."""
    tensors = {"a": of(torch.uint8, 40 * MIB)}
    real = posix.pwrite_all

    def failing(fd: int, buffer: Any, offset: int) -> None:
        if offset > 20 * MIB:
            raise OSError(28, "No space left on device")
        real(fd, buffer, offset)

    monkeypatch.setattr(posix, "pwrite_all", failing)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, tensors)
    assert not [thread for thread in threading.enumerate() if "titan_ckpt-io" in thread.name]


def test_a_process_of_its_own_writes_the_same_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From shared memory, save after save, and without a word."""
    tensors = every_kind()
    (tmp_path / "here").mkdir()
    expected = save(tmp_path / "here", tensors)
    with closing(StagedFile(WritePlan.of(tensors, Coordinator.current()), in_process=True)) as file:
        for name in ("first", "second"):
            file.begin(tensors).finish()
            (tmp_path / name).mkdir()
            assert file.write(tmp_path / name) == expected
            assert (tmp_path / name / FILE).read_bytes() == (tmp_path / "here" / FILE).read_bytes()
        with pytest.raises(FileExistsError):
            file.write(tmp_path / "first")
    assert capfd.readouterr().err == ""


def test_a_killed_writer_process_fails_one_save_only(tmp_path: Path) -> None:
    """The save says how it ended, the next one starts another process."""
    tensors = {"a": torch.randn(1000)}
    with closing(StagedFile(WritePlan.of(tensors, Coordinator.current()), in_process=True)) as file:
        file.begin(tensors).finish()
        assert file._process is not None
        file._process._process.kill()
        with pytest.raises(SaveError, match="SIGKILL"):
            file.write(tmp_path)
        (tmp_path / "next").mkdir()
        file.begin(tensors).finish()
        file.write(tmp_path / "next")
        assert_same(load(tmp_path / "next", tensors), tensors)


def test_an_error_while_staging_is_the_one_of_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread raises it, for all ranks; training, which waits on one rank alone, goes on."""
    tensors = {"a": torch.ones(5)}
    file = StagedFile(WritePlan.of(tensors, Coordinator.current()))
    monkeypatch.setattr("titan_ckpt.formats.native.arena.Segments.fill", lambda *_: 1 / 0)
    handle = file.begin(tensors)
    handle.wait()
    with pytest.raises(ZeroDivisionError):
        handle.finish()


def test_tensors_of_whole_blocks_come_first(tmp_path: Path) -> None:
    """Their blocks hold nothing else, so their digests are those of the tensor, wherever another run cuts its rows."""
    tensors = {"wide": of(torch.int64, 3), "narrow": of(torch.uint8, 5), "half": of(torch.float16, MIB)}
    tensors |= {"empty": of(torch.int64, 0), "whole": of(torch.float32, MIB // 4)}
    save(tmp_path, tensors)
    assert_same(load(tmp_path, tensors), tensors)
    with safetensors.safe_open(tmp_path / FILE, "pt") as file:
        assert file.offset_keys() == ["whole", "half", "wide", "empty", "narrow"]
