"""Interrupted runs, as real processes with real signals: what is kept, who stops when, and that a resume is exact."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import forked
from tests.faults import guarded_loop
from titan_ckpt.cli.main import main as cli


class Job(forked.Job):
    """The ranks of one run of the script."""

    def __init__(self, folder: Path, num_ranks: int = 1, **job: Any) -> None:
        self.folder = folder
        checkpoint = {"save": {"interval": 1000, "timeout_seconds": 60}, **job.pop("checkpoint", {})}
        settings = {"folder": str(folder), "steps": 400, **job, "checkpoint": checkpoint}
        super().__init__(guarded_loop.main, settings, folder=folder, num_ranks=num_ranks)

    def lines(self, rank: int = 0) -> list[str]:
        return self.ranks[rank].text().splitlines()

    def wait_for(self, line: str, rank: int = 0) -> None:
        """Return once a rank has printed a line that begins so."""
        self.wait_until(lambda: any(found.startswith(line) for found in self.lines(rank)))

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step-*"))

    def weights(self) -> dict[int, str]:
        """Return what was printed of the weights after each step."""
        return {int(words[1]): words[2] for line in self.lines() if (words := line.split())[:1] == ["step"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the weights that one process prints when nothing disturbs it."""
    with Job(tmp_path_factory.mktemp("whole"), steps=60, slow=0) as job:
        assert job.codes() == [0]
        return job.weights()


def goes_on(folder: Path, whole: dict[int, str], from_step: int) -> None:
    """Resume and compare every step with the undisturbed run: weights, noise, data position and buffer."""
    with Job(folder, steps=from_step + 3, slow=0) as job:
        assert job.codes() == [0], job.text()
        assert f"from {from_step} {2 * from_step} {2 * from_step}" in job.lines(), job.text()
        after = range(from_step + 1, from_step + 4)
        assert job.weights() == {step: whole[step] for step in after}


def test_a_signal_within_a_step_saves_the_step_before(tmp_path: Path, whole: dict[int, str]) -> None:
    """SIGUSR1 while micro-batches are added up: the half step is left, and what it had moved is put back."""
    with Job(tmp_path, slow=0.4) as job:
        job.wait_for("micro-batch 2 0")
        job.ranks[0].send_signal(signal.SIGUSR1)
        assert job.codes() == [0], job.text()
        assert "stopping: SIGUSR1 to rank 0" in job.text()
        (last,) = job.steps()
        assert f"micro-batch {last + 1} 0" in job.lines(), "the next step had begun"
        assert "left" not in job.text()
    goes_on(tmp_path, whole, last)


def test_f8_a_request_a_time_limit_and_a_second_signal(tmp_path: Path, whole: dict[int, str]) -> None:
    """`titan-ckpt save` returns when its save is committed; the run goes on, and ends in time by itself."""
    with Job(tmp_path, slow=0.02, checkpoint={"save": {"interval": 1000, "async_mode": "thread"}}) as job:
        job.wait_for("step 1 ")
        assert cli(["save", "--run", str(tmp_path), "--timeout-seconds", "60"]) == 0
        (asked,) = job.steps()
        (tmp_path / "save-request").touch()
        while (tmp_path / "save-request").exists() or len(job.steps()) < 2:
            assert job.ranks[0].poll() is None, job.text()
            time.sleep(0.01)
        assert job.steps()[0] == asked
        job.ranks[0].send_signal(signal.SIGSTOP)  # it is there, and takes no request
        assert cli(["save", "--run", str(tmp_path), "--timeout-seconds", "0.3"]) == 1
        job.ranks[0].kill()
    assert cli(["save", "--run", str(tmp_path)]) == 2, "nobody runs there"
    assert not (tmp_path / "save-request").exists()
    goes_on(tmp_path, whole, job.steps()[-1])
    with Job(tmp_path / "limited", slow=0.2, checkpoint={"stop": {"after_hours": 13 / 3600}}) as job:
        assert job.codes() == [0], job.text()
        assert len(job.steps()) == 1 or "no last save: " in job.text(), job.text()  # the machine may have stood still
        assert "stopping: the time of [checkpoint.stop] is up" in job.text()
    with Job(tmp_path / "twice", slow=30) as job:
        job.wait_for("from")
        began = time.monotonic()
        job.ranks[0].terminate()
        time.sleep(0.2)
        job.ranks[0].terminate()  # as a launcher passes it on
        stood_still = time.monotonic() - began > 1
        time.sleep(3)  # more than the two seconds after the first one, which it may have noticed late
        assert stood_still or job.ranks[0].poll() is None
        job.ranks[0].terminate()
        assert job.codes() == [128 + signal.SIGTERM]
    short = {"stop": {"grace_seconds": 0.1}}
    with Job(tmp_path / "closing", slow=0.01, closing=1, same_signal_seconds=100, checkpoint=short) as job:
        job.wait_for("step 2 ")
        job.ranks[0].terminate()
        job.wait_for("closing")
        job.ranks[0].terminate()  # passed on late, while the program closes
        assert job.codes() == [0], job.text()
        assert job.steps() == [], "no save is begun that the grace is too short for"
        assert "no last save: " in job.text()


def test_an_exception_saves_the_last_whole_step_and_never_a_half_one(tmp_path: Path, whole: dict[int, str]) -> None:
    """Raised within micro-batches: the step before is saved; between the optimizer and the step's end: nothing is."""
    save = {"interval": 2, "keep": {"latest": 1}}
    with Job(tmp_path, raise_at=4, checkpoint={"save": save}) as job:
        assert job.codes() == [1]
        assert "ValueError: a batch that cannot be" in job.text()
        assert job.steps() == [2, 3], "nothing expires for it"
    goes_on(tmp_path, whole, 3)
    with Job(tmp_path / "half", raise_after_step=4, checkpoint={"save": save}) as job:
        assert job.codes() == [1]
        assert job.steps() == [2], job.text()
        assert "partly applied" in job.text()


@pytest.mark.parametrize("async_mode", ["thread", "process"])
def test_f12_all_ranks_stop_at_one_step_with_a_save_in_flight(tmp_path: Path, async_mode: str) -> None:
    """SIGTERM to all, writers too: the save in flight is finished, a last one made; who lags stops there too."""
    save = {"interval": 2, "async_mode": async_mode}
    with Job(tmp_path, 2, slow=0.01, lag=0.1, width=1_000_000, checkpoint={"save": save}) as job:
        job.wait_for("step 2")
        for process in job.ranks:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGTERM)
            process.terminate()
        assert job.codes() == [0, 0], job.text()
        steps = job.steps()
        assert 2 in steps, job.text()
        for rank in range(2):
            text = "\n".join(job.lines(rank))
            assert f"step {steps[-1]} " in text
            assert f"step {steps[-1] + 1} " not in text
        assert load_file(tmp_path / "checkpoints" / f"step-{steps[-1]}" / "rank-00001.safetensors")


def test_a_rank_that_is_silent_for_less_than_the_grace_costs_nothing(tmp_path: Path) -> None:
    """SIGTERM to one rank, while another gives no answer for longer than in a roll call: the last save is made."""
    stop = {"grace_seconds": 300}
    with Job(tmp_path, 2, slow=0.05, answer_seconds=0.5, checkpoint={"stop": stop}) as job:
        job.wait_for("step 2 ", rank=1)
        job.ranks[1].send_signal(signal.SIGSTOP)
        job.ranks[0].terminate()
        time.sleep(2.5)
        job.ranks[1].send_signal(signal.SIGCONT)
        assert job.codes() == [0, 0], job.text()
        assert len(job.steps()) == 1, job.text()


def test_a_dead_a_raising_and_a_hung_rank_stop_the_others_in_time(tmp_path: Path) -> None:
    """The others end within the bounds, though they wait in C, and name who raised and who hangs."""
    stop: dict[str, Any] = {"grace_seconds": 2}
    with Job(tmp_path / "dead", 2, slow=0.01, checkpoint={"stop": stop}) as job:
        job.wait_for("step 2", rank=1)
        job.ranks[0].kill()
        began = time.monotonic()
        assert job.codes(but=(0,)) == [1]
        assert time.monotonic() - began < 100
        assert job.steps() == []
        assert "the last completed step is not saved: " in job.text()
    with Job(tmp_path / "raised", 2, raise_at=[3, 1], checkpoint={"stop": stop}) as job:
        assert job.codes() == [1, 1]
        assert job.steps() == [], job.text()
        assert "rank 1 has raised ValueError: it waits up to 2 s" in "\n".join(job.lines(1))
        left = "rank 1 has left because of ValueError: a batch that cannot be"
        assert left in "\n".join(job.lines(0)), job.text()
        assert "rank 0 did not" in "\n".join(job.lines(1)), job.text()
    stop = {"hang_seconds": 2}
    checkpoint = {"save": {"interval": 1000, "timeout_seconds": 3}, "stop": stop}
    with Job(tmp_path / "hung", 3, slow=0.01, checkpoint=checkpoint) as job:
        job.wait_for("step 2", rank=1)
        job.ranks[1].send_signal(signal.SIGSTOP)
        assert job.codes(but=(1,)) == [1, 1], job.text()
        for rank in (0, 2):
            assert "rank 1 did not arrive within 3 s" in "\n".join(job.lines(rank))
