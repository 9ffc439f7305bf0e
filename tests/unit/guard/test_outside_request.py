"""The files of requests to save, where two processes use them at one time."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.forked import answer
from titan_ckpt.disk import posix
from titan_ckpt.errors import SaveError
from titan_ckpt.guard import outside_request


def test_a_request_that_was_taken_and_not_answered_in_time_leaves_the_next_one(tmp_path: Path) -> None:
    """The process that gives up withdraws its own request alone."""
    outside_request.announce(tmp_path)
    first = outside_request.ask(tmp_path)
    assert outside_request.take(tmp_path) == first
    second = outside_request.ask(tmp_path)
    with pytest.raises(SaveError, match="no answer"):
        outside_request.await_answer(tmp_path, first, 0.1)
    assert outside_request.take(tmp_path) == second
    third = outside_request.ask(tmp_path, pin=True)
    with pytest.raises(SaveError, match="no answer"):
        outside_request.await_answer(tmp_path, third, 0.1)
    assert outside_request.take(tmp_path) is None


def test_a_run_that_ends_leaves_the_name_of_its_successor(tmp_path: Path) -> None:
    """The successor has announced itself in the grace period of the one before."""

    def end_late() -> bool:
        outside_request.announce(tmp_path)
        assert answer(lambda: outside_request.announce(tmp_path))[1] == 0
        outside_request.retire(tmp_path)
        return (tmp_path / outside_request.TAKER).exists()

    assert answer(end_late) == (True, 0)
    outside_request.announce(tmp_path)
    outside_request.retire(tmp_path)
    assert not (tmp_path / outside_request.TAKER).exists()


def test_a_request_for_which_the_disk_has_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft goes, too."""
    outside_request.announce(tmp_path)

    def full(fd: int, buffer: object, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(posix, "pwrite_all", full)
    with pytest.raises(OSError, match="No space left"):
        outside_request.ask(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [outside_request.TAKER]
