"""CheckpointManager with several ranks: sharded training, exact resume, other layouts, failing ranks."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests import world
from tests.run_folder import RunFolder
from tests.world import Run, gathered, heard, manager, same
from titan_ckpt import CheckpointManager, ExportConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError, LoadMismatchError, PeerError
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.testing import distributed

Mode = Literal["disabled", "thread"]


def steps(run: Run, number: int) -> list[float]:
    """Take steps on data that is drawn, for which the ranks' generators move alike."""
    torch.manual_seed(1)
    return [run.step() for _ in range(number)]


@distributed(nproc=2)
def train_and_resume(folder: RunFolder, mode: Mode) -> None:
    whole, first, second = Run(), Run(), Run(seed=9)
    losses = steps(whole, 6)
    with first.manager(folder, interval=2, async_mode=mode) as manager:
        assert manager.load().step == 0
        torch.manual_seed(1)
        for step in (1, 2, 3, 4):
            assert first.step() == losses[step - 1]
            manager.save(step)
    with second.manager(folder, interval=2, async_mode=mode) as manager:
        assert manager.load().step == 4
        assert [second.step(), second.step()] == losses[4:]
        manager.save(6, last_step=True)
    reference = whole.state()
    assert same(second.state(), reference)
    if dist.get_rank() == 0:
        torch.save(reference, folder.base / "reference.pt")


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_a_sharded_run_resumes_bit_for_bit_and_its_checkpoint_opens_in_one_process(
    run_folder: RunFolder, mode: Mode
) -> None:
    """FSDP2 x2: 4 + 2 steps equal 6; then a single process reads the same weights and moments."""
    train_and_resume(run_folder, mode)
    single = Run(seed=5)
    assert world.load(single.manager(run_folder, interval=2)).step == 6
    assert same(single.state(), torch.load(run_folder.base / "reference.pt"))


@distributed(nproc=2)
def test_f12_two_ranks_over_gloo_save_in_the_background_by_default(run_folder: RunFolder) -> None:
    """Without settings save() returns on every rank before a byte is written, and both step before the commit."""
    run, fresh = Run(), Run(seed=9)
    go_on, write = threading.Event(), StagedFile.write
    with run.manager(run_folder) as manager:
        manager.load()
        run.step()
        with patch.object(StagedFile, "write", lambda file, folder: (go_on.wait(20), write(file, folder))[1]):
            saved = run.state()
            assert manager.save(1)
            run.step()
            assert not same(run.state(), saved)
            assert run_folder.steps() == []
            dist.barrier()
            go_on.set()
            manager.wait()
    assert run_folder.steps() == [1]
    world.load(fresh.manager(run_folder))
    assert same(fresh.state(), saved)


@distributed(nproc=2)
def test_a_misfit_and_one_ranks_damaged_header_raise_on_every_rank_and_change_none(tmp_path: Path) -> None:
    """All ranks get one error each, and none goes on alone: rank 1's header is bad, and rank 0 fills nothing."""
    world.save(Run().manager(tmp_path), 2)
    with (
        Run(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))).manager(tmp_path) as manager,
        pytest.raises(CheckpointError) as caught,
    ):
        manager.load()
    assert isinstance(caught.value, (LoadMismatchError, PeerError))
    dist.barrier()
    if dist.get_rank() == 0:
        with (tmp_path / "checkpoints" / "step-2" / "rank-00001.safetensors").open("r+b") as file:
            file.seek(100)
            file.write(b"\x55")
    dist.barrier()
    live = Run(seed=4)
    before = live.state()
    world.load_fails(live.manager(tmp_path), CheckpointError, r"rank-00001\.safetensors")
    assert same(live.state(), before)


@distributed(nproc=2)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_step(run_folder: RunFolder) -> None:
    """Rank 1 cannot write its file: every rank raises, the step before stays the newest."""
    run = Run()
    with run.manager(run_folder, interval=2, async_mode="disabled") as manager:
        manager.load()
        run.step()
        manager.save(2)
        fails = patch.object(WritePlan, "write", side_effect=OSError("no space"))
        with fails if dist.get_rank() == 1 else nullcontext(), pytest.raises(OSError, match=r"rank 1 failed|no space"):
            manager.save(4)
        manager.save(6)
    assert run_folder.steps() == [2, 6]


@distributed(nproc=2, timeout_seconds=90)
def test_a_rank_that_hangs_is_named_within_the_bound(tmp_path: Path) -> None:
    """Rank 1 stops: rank 0 raises PeerError naming it instead of waiting for half an hour."""
    run = Run()
    with run.manager(tmp_path, async_mode="disabled", timeout_seconds=8) as manager:
        manager.save(1)
        pids = gathered(os.getpid())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerError, match="rank 1") as caught:
            manager.save(2)
        assert caught.value.ranks == (1,)
        if dist.get_rank() == 0:
            os.kill(pids[1], signal.SIGCONT)


@distributed(nproc=2)
def test_rank_0_warns_of_each_class_whose_state_another_takes_over_on_any_rank(tmp_path: Path) -> None:
    """First one pipeline stage has another class of optimizer, then both have; each pair of classes is one line."""
    sgd, one, other = (type(name, (torch.optim.SGD,), {}) for name in ("Sgd", "One", "Other"))

    def run(*of_stages: type[torch.optim.SGD]) -> CheckpointManager:
        stage = nn.ModuleDict({str(dist.get_rank()): nn.Linear(2, 2)})
        return manager(tmp_path, stage, of_stages[dist.get_rank()](stage.parameters(), lr=0.1))

    world.save(run(sgd, sgd))
    for now, told in ((sgd, other), ["Other"]), ((one, one), ["One"]), ((one, other), ["One", "Other"]):
        with heard() as lines, run(*now) as resumed:
            assert resumed.load().step == 1
        found = [line for line in lines if "goes on with that state as it is" in line]
        expected = [f"optimizer is of class Sgd, and this run's of class {name}, " for name in told]
        assert len(found) == len(expected) * (dist.get_rank() == 0)
        assert all(part in line for part, line in zip(expected, found, strict=False))


@distributed(nproc=2)
def test_a_loop_of_ones_own_sees_each_save_and_export_once_and_where_it_is(tmp_path: Path) -> None:
    """At level INFO, on rank 0 alone; an export for DCP has its line as others do."""
    run = Run()
    with heard(level=logging.INFO) as lines, run.manager(tmp_path, export=(ExportConfig("dcp"),)) as manager:
        manager.load()
        run.step()
        manager.save(1, last_step=True)
    made = [line for line in lines if "saved in" in line or line.startswith("exported")]
    if dist.get_rank():
        assert made == []
    else:
        saved, exported = made
        assert re.fullmatch(rf"step 1 saved in \d+\.\d\d s: {tmp_path}/checkpoints/step-1", saved)
        assert re.fullmatch(rf"exported 4 tensors, 172 bytes, to {tmp_path}/exports/step-1 in \d+\.\d\d s", exported)


@distributed(nproc=2, timeout_seconds=60)
def test_metrics_of_rank_0_count_and_end_all_ranks_if_they_are_no_numbers(tmp_path: Path) -> None:
    """Ranks that compute none may give anything; the others do not wait for rank 0 until their time is over."""
    mesh, is_first = init_device_mesh("cpu", (2,)), dist.get_rank() == 0
    partial = DTensor.from_local(torch.tensor(0.25), mesh, [Partial()], run_check=False)
    with manager(tmp_path, nn.Linear(2, 2), timeout_seconds=300) as m:
        m.load()
        cases: list[Any] = [{"loss": None} if is_first else {}, {"loss": partial}]
        for metrics in cases:
            with pytest.raises(CheckpointError if is_first else PeerError, match="'loss' is"):
                m.save(1, metrics=metrics)
        of_rank: Any = {"loss": 0.5 if is_first else None}
        m.save(1, metrics=of_rank)
        m.save(2, metrics={"loss": partial.redistribute(placements=[Replicate()])})  # type: ignore[dict-item]
    directory = CheckpointDirectory(tmp_path / "checkpoints", Coordinator.current())
    assert [directory.committed(step)[0].metrics for step in (1, 2)] == [{"loss": 0.5}] * 2
