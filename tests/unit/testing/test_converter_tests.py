"""The `@distributed` decorator itself: real ranks, failures that fail, hangs that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.testing import RankError, distributed


@distributed(nproc=3)
def test_ranks_form_one_group(tmp_path: Path) -> None:
    """Every rank is a process of its own with its own rank, and collectives add up."""
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    assert value.item() == 6
    pids: list[int] = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    assert len(set(pids)) == 3
    assert os.environ["RANK"] == str(dist.get_rank())
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("word", ["left", "right"])
@distributed(nproc=2)
def test_fixtures_and_parameters_reach_every_rank(word: str, tmp_path: Path) -> None:
    """Fixtures are evaluated once, so all ranks share one tmp_path, and parameters arrive as they are."""
    (tmp_path / f"{dist.get_rank()}.txt").write_text(word)
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.txt", "1.txt"]
    assert {p.read_text() for p in tmp_path.iterdir()} == {word}
    assert word in ("left", "right")


class TestMethods:
    """Conformance classes have methods."""

    @distributed(nproc=2)
    def test_a_method_runs_in_ranks(self) -> None:
        """A method of a test class is found by its qualified name."""
        assert dist.get_world_size() == 2


@distributed(nproc=2)
def test_warnings_are_judged_as_in_the_test_process() -> None:
    """The filters of the pytest configuration hold in every rank: a warning is an error."""
    with pytest.raises(UserWarning, match="from a rank"):
        warnings.warn("from a rank", UserWarning, stacklevel=1)


@distributed(nproc=2)
def _rank_one_raises(expected: int) -> None:
    found = dist.get_rank() + 40
    if dist.get_rank() == 1:
        assert found == expected
    dist.barrier()


def test_a_failing_rank_fails_the_test_with_its_traceback_and_values() -> None:
    """The error names the rank, shows the failing line, and the values around it."""
    with pytest.raises(RankError) as caught:
        _rank_one_raises(7)
    assert 1 in caught.value.ranks  # and 0 too, where it saw its peer go before it was ended
    text = str(caught.value)
    assert "assert found == expected" in text
    assert "found = 41" in text
    assert "expected = 7" in text


@distributed(nproc=2, timeout_seconds=6.0)
def _rank_one_waits_for_ever(pids: Path) -> None:
    (pids / str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (pids / "child").write_text(str(child.pid))
        time.sleep(600)


def test_a_hang_is_bounded_and_shows_where(tmp_path: Path) -> None:
    """A rank that hangs is named, with the line it hangs at; it and its child processes are gone."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        _rank_one_waits_for_ever(tmp_path)
    assert time.monotonic() - start < 100
    assert caught.value.ranks == (1,)
    assert "_rank_one_waits_for_ever" in str(caught.value).split("did not end and was ended by force")[1]
    for file in tmp_path.iterdir():
        assert not _is_running(int(file.read_text())), file.name


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@distributed(nproc=2, timeout_seconds=600.0)
def _rank_zero_is_killed() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_fails_the_test_long_before_the_timeout() -> None:
    """The death of rank 0 is reported as such, first, and ends its peers soon."""
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0: ended by SIGKILL") as caught:
        _rank_zero_is_killed()
    assert caught.value.ranks[0] == 0
    assert time.monotonic() - start < 100


@distributed(nproc=2)
def _never_runs(value: object) -> None:
    raise AssertionError


def test_an_argument_that_ranks_cannot_have_is_named() -> None:
    """An argument that does not pickle is refused before any process starts."""
    with pytest.raises(TypeError, match="argument value of a @distributed test"):
        _never_runs(value=lambda: None)
