"""One read that fails or lies is no damage: the newest step is resumed. Only what a second look confirms steps back."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_half_loaded import WARM_OR_COLD, Run, file_of, io_error, keeps, refused, resumes, settle
from tests.world import same
from titan_ckpt.disk import posix
from titan_ckpt.disk.files import FileReader
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.stores import store

MAY_PASS = (errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT, errno.EAGAIN, errno.EACCES)
FILES = ("MANIFEST.json", "state.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WAITS_SECONDS", (0.0, 0.0, 0.0))


@contextmanager
def reads_of(name: str, change: Callable[[int, Any], Any]) -> Iterator[None]:
    """Let each read of a file of step 2 pass through `change`, with its number and what was read.

    What was read is bytes, or the memory that was filled.
    """
    numbers = itertools.count()
    read_whole, read = posix.read_whole, FileReader.read
    read_into, read_aligned = FileReader.read_into, FileReader.read_aligned

    def is_meant(path: Any) -> bool:
        return str(path).endswith(f"step-2/{name}")

    def whole(path: Any, max_bytes: int) -> bytes:
        data = read_whole(path, max_bytes)
        return change(next(numbers), data) if is_meant(path) else data

    def head(self: FileReader, offset: int, num_bytes: int) -> bytes:
        data = read(self, offset, num_bytes)
        return change(next(numbers), data) if is_meant(self.path) else data

    def into(self: FileReader, views: list[memoryview], offset: int) -> None:
        read_into(self, views, offset)
        if is_meant(self.path):
            change(next(numbers), views[0])

    def aligned(self: FileReader, buffer: memoryview, offset: int, num_bytes: int) -> None:
        read_aligned(self, buffer, offset, num_bytes)
        if is_meant(self.path):
            change(next(numbers), buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posix, "read_whole", whole)
        for method, act in (("read", head), ("read_into", into), ("read_aligned", aligned)):
            patch.setattr(FileReader, method, act)
        yield


def fails(code: int, when: Callable[[int], bool]) -> Callable[[int, Any], Any]:
    def change(number: int, data: Any) -> Any:
        if when(number):
            raise OSError(code, os.strerror(code))
        return data

    return change


def flips(when: Callable[[int], bool]) -> Callable[[int, Any], Any]:
    """Return a change of one bit, as a page of the cache may have it, of all reads that `when` names."""

    def change(number: int, data: Any) -> Any:
        if not when(number):
            return data
        if isinstance(data, memoryview):
            data[0] ^= 16
            return data
        return bytes([*data[:-1], data[-1] ^ 16])

    return change


@WARM_OR_COLD
def test_one_failed_or_wrong_read_of_any_file_steps_back_from_nothing(tmp_path: Path, cold: bool) -> None:
    """Every error, and a flipped bit, at each of the first reads of each file: the newest step, with every tensor."""
    run = Run(tmp_path)
    history = run.save(2)
    with run.manager() as manager:
        for name in FILES:
            for number in range(5 if name.endswith("safetensors") else 2):
                one = number.__eq__
                for change in (flips(one), *(fails(code, one) for code in (errno.EIO, *MAY_PASS))):
                    settle(tmp_path, cold=cold)
                    run.step()
                    with reads_of(name, change):
                        assert manager.load().step == 2, (name, number)
                    assert same(run.values(), history[1]), (name, number)
        assert keeps(manager, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("name", FILES)
def test_an_error_that_does_not_pass_is_raised_and_nothing_is_set_aside(tmp_path: Path, name: str) -> None:
    """ESTALE and its like say nothing about the step: the load ends with the error, and the next one resumes it."""
    run = Run(tmp_path)
    history = run.save(2)
    with run.manager() as manager:
        for code in MAY_PASS:
            with reads_of(name, fails(code, lambda _: True)), pytest.raises(OSError, match=os.strerror(code)) as caught:
                manager.load()
            assert caught.value.errno == code
        if name.endswith("safetensors"):
            with reads_of(name, fails(errno.ESTALE, lambda number: number >= 3)), pytest.raises(OSError, match="Stale"):
                manager.load()
            assert refused(manager)
        assert resumes(manager, run, 2, history[1])
        assert keeps(manager, 3)


@pytest.mark.parametrize("name", FILES)
def test_damage_that_stays_leads_to_the_step_before(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """EIO and wrong bytes that a second look confirms, in any file: the log says which and why."""
    run = Run(tmp_path)
    history = run.save(2)
    for change in (flips(lambda _: True), fails(errno.EIO, lambda _: True)):
        caplog.clear()
        with run.manager(saves=False) as manager, reads_of(name, change):
            assert resumes(manager, run, 1, history[0])
        assert name == "MANIFEST.json" or f"step-2/{name}" in caplog.text


def test_bytes_that_are_wrong_in_the_page_cache_alone_are_read_from_the_disk(tmp_path: Path) -> None:
    """The block went into a live tensor, wrong; the second look fills it again, and only a third wrong one is named."""
    run = Run(tmp_path)
    history = run.save(2)
    settle(tmp_path, cold=False)
    with run.manager() as manager:
        real = FileReader.read_into

        def wrong(self: FileReader, views: list[memoryview], offset: int) -> None:
            real(self, views, offset)
            views[0][0] ^= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileReader, "read_into", wrong)
            assert resumes(manager, run, 2, history[1])
            settle(tmp_path, cold=False)
            patch.setattr(FileReader, "read_again", lambda *_: io_error())
            with pytest.raises(CorruptCheckpointError, match="Input/output error") as caught:
                manager.load(2)
            assert caught.value.path == str(file_of(tmp_path, 2)) and caught.value.overwritten
            assert refused(manager)
