"""A notice takes effect at the same tick of every rank, however far apart they are when it comes."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.forked_ranks import run
from titan_ckpt.distributed.coordinator import Coordinator
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
