"""A load of two ranks that fails on one of them: both end on a step with every tensor right, or keep nothing."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults import forked_ranks
from tests.faults.rank_exports import join
from tests.faults.test_half_loaded import (
    Run,
    Values,
    failing_after,
    file_of,
    flip,
    interrupt,
    io_error,
    keeps,
    once,
    refused,
    resumes,
    settle,
)
from tests.world import gathered, same
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, PeerError
from titan_ckpt.testing import distributed


@distributed(nproc=2)
def test_f5_damage_in_either_ranks_file_and_a_failure_of_one_rank_stop_both(tmp_path: Path) -> None:
    """Warm and cold: one names the file, both refuse to keep what is in memory, and both go on from a right step."""
    rank, root = dist.get_rank(), tmp_path
    run = Run(root)
    history = run.save(2)
    with run.manager() as manager:
        for cold in (False, True):
            for damaged in (0, 1):
                path = file_of(root, 2, damaged)
                dist.barrier()
                if rank == 0:
                    flip(path, 0.5, cold=cold)
                dist.barrier()
                with pytest.raises((CorruptCheckpointError, PeerError), match=path.name) as caught:
                    manager.load(2)
                assert isinstance(caught.value, CorruptCheckpointError) == (rank == damaged)
                assert refused(manager)
                assert resumes(manager, run, 1, history[0])
                fresh = Run(root)
                with fresh.manager(saves=False) as other:
                    assert resumes(other, fresh, 1, history[0])
                dist.barrier()
                if rank == 0:
                    flip(path, 0.5, cold=False)
                dist.barrier()
                assert resumes(manager, run, 2, history[1])
    for cold, is_new, is_error in product((False, True), repeat=3):
        one_rank_fails(Run(root) if is_new else run, history, rank == int(cold), is_error, cold=cold)
    for cold in (False, True):
        one_rank_is_out_of_luck(run, history, rank == int(cold), cold=cold)
    with run.manager() as manager:
        assert manager.load().step == 2
        assert keeps(manager, 3)


def one_rank_is_out_of_luck(run: Run, history: list[Values], is_failing: bool, *, cold: bool) -> None:
    """Let a read of one rank fail once: both resume the step. A stale handle that stays ends the load of both."""
    dist.barrier()
    settle(run.folder, cold=cold)
    dist.barrier()
    with run.manager() as manager:
        with failing_after(0, once(io_error)) if is_failing else nullcontext():
            assert resumes(manager, run, 2, history[1])
        with failing_after(0, stale) if is_failing else nullcontext():
            with pytest.raises(OSError, match="Stale file handle") as caught:
                manager.load()
            assert isinstance(caught.value, PeerError) != is_failing
        assert refused(manager)
        assert resumes(manager, run, 2, history[1])


def stale() -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def one_rank_fails(run: Run, history: list[Values], is_failing: bool, is_error: bool, *, cold: bool) -> None:
    """Let reads of one rank fail: it raises its own error, and both go on from a step with every tensor right."""
    dist.barrier()
    settle(run.folder, cold=cold)
    dist.barrier()
    own: type[BaseException] = CorruptCheckpointError if is_error else KeyboardInterrupt
    fault = io_error if is_error else once(interrupt)
    with run.manager() as manager:
        with failing_after(0, fault) if is_failing else nullcontext():
            with pytest.raises(own if is_failing else PeerError):
                manager.load(2 if is_error else -1)
            assert refused(manager)
            step = manager.load().step
        assert step == (1 if is_error else 2)
        assert same(run.values(), history[step - 1])


@distributed(nproc=2, timeout_seconds=300)
def test_a_rank_that_falls_silent_in_the_middle_leaves_the_mark_on_the_others(tmp_path: Path) -> None:
    """They do not wait longer than the timeout, and keep nothing until a load succeeds on all."""
    rank, root = dist.get_rank(), tmp_path
    run = Run(root)
    history = run.save(2)
    pids = gathered(os.getpid())

    def stand_still(line: Coordinator) -> None:
        """Stop rank 1; let rank 0 go on, and be impatient, when that has happened: a busy machine takes its time."""
        line.timeout_seconds = 4.0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while rank == 0 and Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    for cold, fresh in product((False, True), (False, True)):
        run = Run(root) if fresh else run
        dist.barrier()
        settle(root, cold=cold)
        dist.barrier()
        with run.manager() as manager:
            line = manager._coordinator
            with failing_after(0, once(partial(stand_still, line))), pytest.raises(CheckpointError, match="rank 1"):
                manager.load(2)
            assert refused(manager)
            if rank == 0:
                os.kill(pids[1], signal.SIGCONT)
            line.timeout_seconds = 60.0
            assert resumes(manager, run, 2, history[1])
    with run.manager() as manager:
        manager.load()
        assert keeps(manager, 3)


def test_a_rank_that_dies_in_the_middle_leaves_the_mark_on_the_others(tmp_path: Path) -> None:
    """Nothing can be loaded without it, so the others refuse to keep anything until they end."""

    def body(line: Coordinator) -> Any:
        join(line)
        trained = Run(tmp_path)
        trained.save(1)
        with trained.manager() as manager:
            manager._coordinator.timeout_seconds = manager._directory._coordinator.timeout_seconds = 4.0
            with failing_after(0, lambda: os.kill(os.getpid(), signal.SIGKILL), 1) if line.rank == 1 else nullcontext():
                told = forked_ranks.outcome(manager.load)
            return [told, refused(manager)]

    ((ended, *_, why), has_refused), killed = forked_ranks.run(2, body)
    assert killed is None
    assert (ended, has_refused) == ("PeerError", True)
    assert "rank 1 did not arrive" in why
