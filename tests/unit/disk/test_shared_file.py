"""Bytes at any place of a file that several writers share."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.faults.shim import Counter, intercepted
from tests.test_interrupted_waits import Interrupt
from titan_ckpt.disk import files, kernel
from titan_ckpt.disk.files import FileWriter
from titan_ckpt.disk.kernel import ALIGNMENT, Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.publish.plan import OutputFiles
from titan_ckpt.formats.safetensors.container import Layout


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("first", [0, 8, ALIGNMENT - 8])
def test_every_byte_lands_where_it_belongs(tmp_path: Path, direct: bool, first: int) -> None:
    """Writers of neighbouring ranges of any length, in any order, in memory aligned or not, make up the file."""
    lengths = [8, 4088, 4096, 5000, 3 * 4096, 3 * 4096 + 16, 70_000, 0, 2]
    expected = random.Random(first).randbytes(first + sum(lengths))
    path = tmp_path / "shared"
    path.write_bytes(bytes(len(expected)))
    ranges, start = [], first
    for length in lengths:
        ranges.append((start, length))
        start += length
    random.Random(7).shuffle(ranges)
    writers = [FileWriter(path, direct), FileWriter(path, direct)]
    for number, (offset, length) in enumerate(ranges):
        buffer = Buffer.allocate(length + 2 * ALIGNMENT)
        at = offset % ALIGNMENT + number % 2 * (0 if direct else 8)  # direct writes ask for alignment
        buffer.view[at : at + length] = expected[offset : offset + length]
        writers[number % 2].write(buffer.view[at : at + length], offset)
    for writer in writers:
        writer.finish(len(expected))
        writer.close()
        writer.close()
    assert path.read_bytes()[first:] == expected[first:]


def test_small_neighbours_are_written_at_once_and_none_is_kept_for_long(tmp_path: Path) -> None:
    """A thousand tensors of some bytes are one write when they are flushed; a MiB of them does not wait for that."""
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    data = random.Random(1).randbytes(3 << 20)
    file = FileWriter(tmp_path / "file", direct=True)
    calls = Counter()
    with intercepted(calls):
        for start in range(8, 8 + 1000 * 24, 24):
            file.write(memoryview(data[start : start + 24]), start)
        assert calls.names == []
        file.flush()
        file.flush()
        assert calls.names == ["pwrite_all"]
        for start in range(1 << 20, 3 << 20, 2048):
            file.write(memoryview(data[start : start + 2048]), start)
        assert calls.names == ["pwrite_all"] * 3
    file.close()
    found = (tmp_path / "file").read_bytes()
    assert found[8 : 8 + 24_000] == data[8 : 8 + 24_000]
    assert found[1 << 20 :] == data[1 << 20 :]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """A symbolic link in a staging folder is somebody else's doing."""
    (tmp_path / "real").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"):
        FileWriter(tmp_path / "link", direct=True)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    """Closing closes both ways into the file."""
    (tmp_path / "file").write_bytes(bytes(8192))
    before = set(os.listdir("/proc/self/fd"))
    file = FileWriter(tmp_path / "file", direct=True)
    file.write(Buffer.allocate(8192).view, 0)
    file.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_close_that_fails_leaves_no_other_descriptor_open(tmp_path: Path) -> None:
    """Network file systems report late errors there: the first of two descriptors of the first of two files does."""
    names = ["a", "b"]
    outputs = OutputFiles(tmp_path, {name: Layout(b"", {}, 2 * ALIGNMENT) for name in names}, Coordinator.current())
    outputs.begin()
    before = set(os.listdir("/proc/self/fd"))
    for name in names:
        outputs.file(name)
    closed: list[int] = []

    def close(name: str, operation: Callable[..., object], arguments: tuple[int]) -> None:
        operation(*arguments)
        closed.append(arguments[0])
        if len(closed) == 1:
            raise OSError(errno.EIO, "late")

    with intercepted(close), pytest.raises(OSError, match="late"):
        outputs.close()
    assert set(os.listdir("/proc/self/fd")) == before and len(closed) >= len(names)


def test_an_interrupt_closes_no_descriptor_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every bytecode of the creation: the number of a closed descriptor may be that of another thread's file."""
    monkeypatch.setattr(files, "open_direct", kernel.open_file)  # on any file system
    made: list[FileWriter] = []

    def is_interrupted(at: int) -> bool:
        return Interrupt(at).around(lambda: made.append(FileWriter.create(tmp_path / str(at), ALIGNMENT)))

    num_points = next(at for at in count(1) if not is_interrupted(at))
    assert num_points > 100 and [file.is_direct for file in made] == [True]
    made[0].close()
