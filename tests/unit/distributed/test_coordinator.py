"""Ranks agree, fail together and never wait without bound: real processes over a real TCP store."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.faults.forked_ranks import Ranks, outcome, run
from titan_ckpt.distributed import coordinator
from titan_ckpt.distributed.coordinator import Coordinator, bounded


def test_every_rank_gets_every_value_in_order_of_ranks() -> None:
    """Three ranks exchange values twice under the same tag and then broadcast."""

    def body(line: Coordinator) -> Any:
        first = line.gather("x", {"rank": line.rank, "text": "ü"})
        second = line.gather("x", line.rank * 10)
        return [first, second, line.broadcast("y", [line.rank, None])]

    expected = [[{"rank": rank, "text": "ü"} for rank in range(3)], [0, 10, 20], [0, None]]
    assert run(3, body) == [expected] * 3


def test_ranks_act_together_or_none_has_a_value() -> None:
    """Each keeps its own value, gets all values, or that of rank 0; an interrupt on one rank is told to all at once."""

    def body(line: Coordinator) -> Any:
        def interrupted() -> int:
            if line.rank == 1:
                raise KeyboardInterrupt
            return line.rank

        own = line.together("own", lambda: {line.rank})
        every = line.gather_results("every", lambda: line.rank * 10)
        start = time.monotonic()
        try:
            failed = outcome(lambda: line.together("x", interrupted))
        except KeyboardInterrupt:
            failed = ["interrupted"]
        return [sorted(own), every, failed, line.on_rank_0("y", interrupted), time.monotonic() - start < 100]

    results = run(3, body, timeout=600)
    for rank, (own, every, failed, led, quick) in enumerate(results):
        assert (own, every, led, quick) == ([rank], [0, 10, 20], 0, True)
        assert failed[0] == ("interrupted" if rank == 1 else "PeerError")
        assert rank == 1 or "rank 1 failed: KeyboardInterrupt" in failed[2]


def test_a_question_is_answered_by_all_ranks_or_by_none() -> None:
    """True anywhere is true everywhere; an error of one rank is that of all."""

    def body(line: Coordinator) -> Any:
        answers = [line.anywhere("one", lambda: line.rank == 1), line.anywhere("none", lambda: False)]
        return [answers, outcome(lambda: line.anywhere("failing", lambda: [1 // (2 - line.rank)]))[:2]]

    peer, failed = [[True, False], ["PeerError", [2]]], ["ZeroDivisionError", "integer division or modulo by zero"]
    assert run(3, body) == [peer, peer, [[True, False], failed]]


def test_equal_values_are_posted_once() -> None:
    """Two of three ranks have one list: the lower of them posts it; a value that all its holders share, nobody."""

    def body(line: Coordinator) -> Any:
        posted: list[str] = []
        gather = line.gather

        def watched(tag: str, value: Any, *arguments: Any) -> list[Any]:
            posted.append(json.dumps(value))
            return gather(tag, value, *arguments)

        line.gather = watched  # type: ignore[assignment, method-assign]
        values: dict[str, Any] = {"list": [line.rank == 1], "same": 7}
        if line.rank == 2:
            values["alone"] = 8
        distinct = line.gather_distinct("x", lambda: values)
        equal = line.gather_distinct("y", lambda: {"same": [1]})
        return [[[name, [*found.items()]] for name, found in distinct.items()], [*equal["same"].items()], posted]

    for rank, (distinct, equal, posted) in enumerate(run(3, body)):
        assert distinct[:2] == [["list", [[[0, 2], [False]], [[1], [True]]]], ["same", [[[0, 1, 2], 7]]]]
        assert distinct[2:] == ([["alone", [[[2], 8]]]] if rank == 2 else [])
        assert equal == [[[0, 1, 2], [1]]]
        assert len(posted) == 3, "equal values are compared by their digests alone"
        assert json.loads(posted[1]) == [{"list": [False]}, {"list": [True]}, {}][rank]


def test_one_process_needs_no_store() -> None:
    """World 1 returns its own value, as JSON would, and raises its own error."""
    line = Coordinator.current()
    assert (line.rank, line.world_size) == (0, 1)
    assert line.gather("x", {"a": 1}) == [{"a": 1}]
    assert line.background().broadcast("x", 3) == 3
    with pytest.raises(OSError, match="disk"):
        line.barrier("x", OSError("disk"))
    line.close()


def test_lines_of_code_called_by_a_run_are_bounded_as_the_run_is() -> None:
    """A converter that asks the other ranks does not wait longer for a dead one than the run itself."""
    with bounded(3.0):
        assert Coordinator.current().timeout_seconds == 3.0
        assert Coordinator.current(5.0).timeout_seconds == 5.0
    assert Coordinator.current().timeout_seconds == 1800.0


def test_an_error_on_one_rank_is_raised_on_all_and_named() -> None:
    """The failing rank keeps its own exception; the others learn rank, type and message; the line stays usable."""

    def body(line: Coordinator) -> Any:
        error = OSError(28, "No space left on device") if line.rank == 2 else None
        failed = outcome(lambda: line.gather("write", line.rank, error))
        return [failed, outcome(lambda: line.gather("again", line.rank))]

    results = run(4, body)
    for rank, (failed, again) in enumerate(results):
        assert again == ["ok", [0, 1, 2, 3]]
        if rank == 2:
            assert failed == ["OSError", "[Errno 28] No space left on device"]
        else:
            assert failed[:2] == ["PeerError", [2]]
            assert "rank 2 failed: OSError: [Errno 28] No space left on device" in failed[2]
            assert failed[2].startswith("write:")


def test_one_cause_on_several_ranks_is_told_once() -> None:
    """The ranks that failed alike are in one line, and those that failed otherwise in another."""

    def body(line: Coordinator) -> Any:
        cause = {0: "no space", 1: "no space", 2: "no permission", 3: "no space"}.get(line.rank)
        return outcome(lambda: line.barrier("t", OSError(cause) if cause else None))

    kind, ranks, message = run(5, body)[4]
    assert [kind, ranks] == ["PeerError", [0, 1, 2, 3]]
    causes = ["  ranks 0, 1, 3 failed: OSError: no space", "  rank 2 failed: OSError: no permission"]
    assert message.splitlines() == ["t: stopped on all ranks because", *causes]


def test_ranks_at_different_places_are_told_so() -> None:
    """A rank that calls something else is named with the place it is at, instead of mixing values."""
    results = run(2, lambda line: outcome(lambda: line.gather("save" if line.rank == 0 else "load", 1)))
    for kind, ranks, message in results:
        assert (kind, ranks) == ("PeerError", [1])
        assert "rank 1 is at 'load' while rank 0 is at 'save'" in message


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_dead_rank_is_named_within_the_bound(silent: int, how: signal.Signals) -> None:
    """Three ranks, one silenced after the first exchange: the other two raise PeerError naming it, in time."""

    def body(line: Coordinator) -> Any:
        line.barrier("before")
        if line.rank == silent:
            os.kill(os.getpid(), how)
        start = time.monotonic()
        failed = outcome(lambda: line.barrier("after", timeout_seconds=3.0))
        return [failed, time.monotonic() - start]

    with Ranks(3, body, timeout=600, rank_0_serves=False) as ranks:
        for rank in {0, 1, 2} - {silent}:
            (kind, named, message), seconds = ranks.result(rank)
            assert (kind, named) == ("PeerError", [silent]), message
            assert f"rank {silent} did not" in message
            assert seconds < 100


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_losing_the_store_itself_is_bounded(how: signal.Signals) -> None:
    """Rank 0 serves the store and stops or dies: no call waits on, though the store's own client would."""

    def body(line: Coordinator) -> Any:
        line.barrier("before")
        if line.rank == 0:
            time.sleep(0.3)
            os.kill(os.getpid(), how)
        time.sleep(0.6)
        return [outcome(partial(line.barrier, tag, timeout_seconds=1.0)) for tag in ("after", "later")]

    with Ranks(2, body, timeout=600, rank_0_serves=True) as ranks:
        first, second = ranks.result(1)
        assert first[:2] == ["PeerError", [0]]
        assert second == first, "without another wait"


def test_the_time_in_which_a_job_is_suspended_does_not_count(tmp_path: Path) -> None:
    """All ranks are stopped for longer than the bound while one waits for the other; then they go on."""

    def body(line: Coordinator) -> Any:
        line.barrier("before")
        if line.rank == 1:
            (tmp_path / "begun").touch()
            for _ in range(25):  # the other rank waits, and most of this is left when both go on
                time.sleep(0.1)
        return line.gather("after", line.rank, timeout_seconds=5.0)

    with Ranks(2, body, timeout=20, rank_0_serves=False) as ranks:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGCONT)
        assert [ranks.result(rank) for rank in range(2)] == [[0, 1]] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_reads_the_verdict_and_all_go_on_together(late: int) -> None:
    """A rank that sleeps past the bound fails like the others, and the next exchange is in step again.

    Also rank 0, which finds that all others have posted: they have given up.
    """

    def body(line: Coordinator) -> Any:
        line.barrier("before")
        if line.rank == late:
            time.sleep(4)
        first = outcome(lambda: line.gather("a", line.rank, timeout_seconds=1.0))
        return [first[:2], line.gather("b", line.rank), line.gather("c", line.rank)]

    assert run(2, body) == [[["PeerError", [late]], [0, 1], [0, 1]]] * 2


def test_a_background_line_works_beside_a_blocked_one() -> None:
    """While the main line of each rank waits for a late one, the background lines complete exchanges."""

    def body(line: Coordinator) -> Any:
        import threading

        other = line.background()
        gathered: list[Any] = []

        def talk() -> None:
            gathered.extend(other.gather("bg", [line.rank, index]) for index in range(20))

        thread = threading.Thread(target=talk)
        thread.start()
        if line.rank == 1:
            thread.join()
        line.barrier("main")
        thread.join()
        return gathered

    assert run(2, body) == [[[[0, index], [1, index]] for index in range(20)]] * 2


def test_the_store_does_not_grow() -> None:
    """After a hundred exchanges, good, failing and late, as many keys are left as after a few."""

    def body(line: Coordinator) -> Any:
        counts = []
        for index in range(100):
            if index == 50:
                outcome(lambda: line.barrier("bad", ValueError() if line.rank else None))
                if line.rank == 1:
                    time.sleep(2.5)
                outcome(lambda: line.barrier("late", timeout_seconds=0.5))
            line.gather("x", "v" * 100)
            line.gather("sync", None)
            if line.rank == 0:
                store: Any = line._store
                counts.append(store.num_keys())
        return [counts[5], counts[-1]] if line.rank == 0 else None

    few, many = run(2, body)[0]
    assert many <= few + 1


def test_rank_0_may_end_right_after_the_last_exchange() -> None:
    """close() keeps the store's server alive until the others have read the last verdict."""

    def body(line: Coordinator) -> Any:
        value = line.gather("last", line.rank)
        line.close()
        return value

    for _ in range(5):
        assert run(2, body, rank_0_serves=True) == [[0, 1], [0, 1]]


def test_rank_0_leaves_without_those_that_it_has_waited_for_in_vain() -> None:
    """torchrun kills what has not ended 30 s after a rank's death, of which the wait for that rank takes 20."""

    def body(line: Coordinator) -> Any:
        other = line.background()
        line.barrier("before")
        if line.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        failed = outcome(lambda: other.barrier("after", timeout_seconds=1.0))
        if line.rank == 0:  # rank 2 has left, which ends this exchange and says nothing of rank 1
            assert "rank 2 has left" in outcome(lambda: line.barrier("more"))[2]
        with mock.patch.object(coordinator, "_arrive", wraps=coordinator._arrive) as waiting:
            line.close()
        return [failed[:2], [key.rpartition("/")[2] for call in waiting.call_args_list for key in call.args[1]]]

    with Ranks(3, body, timeout=600, rank_0_serves=False) as ranks:
        assert ranks.result(0) == [["PeerError", [1]], ["0", "2"]]


def test_rank_0_waits_for_a_rank_that_was_late_once_and_has_come_again() -> None:
    """It was waited for in vain on one line and has answered on another since: it may still read what rank 0 serves."""

    def body(line: Coordinator) -> Any:
        other = line.background()
        if line.rank == 1:
            time.sleep(3)
        failed = outcome(lambda: other.barrier("late", timeout_seconds=1.0))
        line.barrier("again")
        with mock.patch.object(coordinator, "_arrive", wraps=coordinator._arrive) as waiting:
            line.close()
        return [failed[0], [key.rpartition("/")[2] for call in waiting.call_args_list for key in call.args[1]]]

    assert run(2, body, timeout=600) == [["PeerError", ["0", "1"]], ["PeerError", []]]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_who_leaves_tells_all_at_once(leaver: int) -> None:
    """A rank ends by an error; the others meet it by name on every line, in a wait or later, again and again."""

    def body(line: Coordinator) -> Any:
        other = line.background()
        line.barrier("before")
        if line.rank == leaver:
            time.sleep(0.5)  # the rank after it waits then
            try:
                raise ValueError("a batch that cannot be")
            except ValueError:
                line.close()
            return outcome(lambda: line.barrier("after"))[:2]
        if line.rank == (leaver + 2) % 3:
            time.sleep(2)  # such as in a collective of the training
        waited = [outcome(partial(each.barrier, "save")) for each in (line, line, other)]
        line.close()
        return waited

    results = run(3, body, timeout=200)
    assert results.pop(leaver) == ["PeerError", [leaver]]
    for waited in results:
        for kind, named, message in waited:
            assert (kind, named) == ("PeerError", [leaver])
            assert f"rank {leaver} has left because of ValueError: a batch that cannot be" in message


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("moment", ["start", "join"])
def test_who_is_interrupted_in_an_exchange_tells_all_at_once(leaver: int, moment: str) -> None:
    """Before it has posted, the others wait in this very exchange; after that, they may be in the next one."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def body(line: Coordinator) -> Any:
        line.barrier("before")
        if line.rank != leaver:
            time.sleep(0.5 if moment == "join" else 0)  # the leaver waits then
            waited = [outcome(partial(line.barrier, "save")) for _ in range(2)][-1]
            line.close()
            return waited
        time.sleep(0.5 if moment == "start" else 0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading.Thread, moment, interrupted)
                line.barrier("save")
        except KeyboardInterrupt:
            line.close()
        return None

    kind, named, message = run(2, body, timeout=200)[1 - leaver]
    assert (kind, named) == ("PeerError", [leaver])
    assert f"rank {leaver} has left because of KeyboardInterrupt" in message


def test_ranks_that_all_leave_leave_no_key_behind() -> None:
    """The end of a run is no error, and rank 0 deletes what was posted on all lines."""

    def body(line: Coordinator) -> Any:
        lines = [line, line.background(), line.background()]
        for each in lines:
            each.barrier("x")
        store: Any = line._store
        before = store.num_keys() if line.rank == 0 else 0
        line.barrier("counted")
        line.close()
        return [before, store.num_keys()] if line.rank == 0 else None

    before, after = run(3, body)[0]
    assert before > 2
    assert after <= 2, "a key of the store's own, and at most one of this test"


def test_large_values_are_cut_so_that_the_store_takes_them() -> None:
    """Posts and verdicts of 20 MB that cannot be compressed arrive whole: no value in the store is above 1 MiB."""

    def body(line: Coordinator) -> Any:
        store: Any = line._store
        sizes = []

        class Measured:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def set(self, key: str, value: bytes) -> None:
                sizes.append(len(value))
                store.set(key, value)

            def compare_set(self, key: str, expected: str, value: bytes) -> bytes:
                sizes.append(len(value))
                return store.compare_set(key, expected, value)  # type: ignore[no-any-return]

        line._store = Measured()
        drawn = random.Random(line.rank).randbytes(5_000_000).hex()
        values: list[Any] = line.gather("large", drawn)
        line.barrier("after")
        counts = store.num_keys() if line.rank == 0 else 0
        expected = [random.Random(rank).randbytes(5_000_000).hex() for rank in range(2)]
        return [values == expected, max(sizes) <= 1 << 20, counts <= 3]

    assert run(2, body) == [[True] * 3] * 2


def test_one_exchange_costs_milliseconds() -> None:
    """The median of many exchanges on two ranks is small beside the commit's budget of 50 ms."""

    def body(line: Coordinator) -> Any:
        seconds = []
        for _ in range(50):
            start = time.monotonic()
            line.barrier("t")
            seconds.append(time.monotonic() - start)
        return sorted(seconds)[25]

    assert max(run(2, body)) < 0.03


@pytest.mark.parametrize("kind", ["file", "memory", "tcp"])
def test_a_rank_that_does_not_come_is_waited_for_in_vain_in_every_store(kind: str, tmp_path: Path) -> None:
    """A FileStore, as of `init_method="file://..."`, says so by another error than the others."""
    stores: dict[str, Any] = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "memory": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True),
    }
    store = dist.PrefixStore("job", stores[kind]())
    assert not coordinator._arrive(store, ["absent"], 0.1)
    store.set("there", "1")
    assert coordinator._arrive(store, ["there"], 10)
