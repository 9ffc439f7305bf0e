"""Notices that take effect at the same tick of every rank, and requests from outside."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked_ranks import run
from tests.forked import answer
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import SaveError
from titan_ckpt.guard import outside_request
from titan_ckpt.guard.notices import NoticeBoard


def test_ranks_that_are_apart_act_at_the_same_tick() -> None:
    """Rank 0 is five ticks ahead when rank 1 notices something: both are told at the sixth, the first none has made."""

    def body(line: Coordinator) -> Any:
        own = line.background()
        board = NoticeBoard(
            own, answer_seconds=lambda _: 200.0, hang_seconds=None, on_signal=lambda *_: None, on_idle=lambda: None
        )
        ticks = 0
        for _ in range(5 if line.rank == 0 else 1):
            assert board.tick() is None
            ticks += 1
        line.barrier("apart")
        board.start()
        if line.rank == 1:
            board.post("stop", "enough")
        while not board._due:
            time.sleep(0.01)
        notice = None
        while notice is None:
            notice = board.tick()
            ticks += 1
        line.barrier("told")
        board.close()
        return [ticks, notice.kind, notice.reason, notice.rank]

    assert run(2, body) == [[6, "stop", "enough", 1]] * 2


def test_a_rank_that_goes_on_alone_is_not_ended_because_the_others_have_left_in_order() -> None:
    """Such as rank 0, which evaluates for longer than hang_seconds after the last step."""

    def body(line: Coordinator) -> Any:
        board = NoticeBoard(
            line.background(), answer_seconds=lambda _: 200.0, hang_seconds=0.5, on_signal=lambda *_: None,
            on_idle=lambda: None,
        )  # fmt: skip
        board.start()
        line.barrier("trained")
        if line.rank == 0:
            while board._error is None:
                time.sleep(0.01)
        board.close()
        line.close()
        return str(board._error)

    assert [said.rpartition("\n  ")[2] for said in run(2, body)] == ["rank 1 has left", "None"]


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
