"""A load that fails in the middle: the ladder ends on a step with every tensor right, or nothing is kept."""

from __future__ import annotations

import errno
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tests.world as kit
from tests.unit.formats.native.test_native import drop_from_page_cache
from tests.world import flip_bit, same
from titan_ckpt import CheckpointManager, ExportConfig, RunGuard
from titan_ckpt.components.run_state import RunState
from titan_ckpt.disk.files import FileReader
from titan_ckpt.errors import CorruptCheckpointError, HalfLoadedError, LoadMismatchError
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.saving.step import DueSave

Values = dict[str, torch.Tensor]
THROUGH_CACHE, AROUND_CACHE = "read_into", "read_aligned"
WARM_OR_COLD = pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
ROLLED_BACK_OR_RESUMED = pytest.mark.parametrize("fresh", [False, True], ids=["rolled back", "resumed"])


class Run(kit.Run):
    """Some MiB of weights and moments, on all ranks of the job, and a manager that saves every step."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 64))
        if dist.is_initialized():
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        super().__init__(model, is_laid_out=True, lr=0.1)
        self.folder = folder

    def manager(self, *, saves: bool = True) -> CheckpointManager:  # type: ignore[override]
        save = {"async_mode": "disabled"} if saves else {"save": None}
        return super().manager(self.folder, timeout_seconds=20.0, export=(ExportConfig("dcp"),), **save)

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.model.parameters():
            parameter.grad = torch.sin(parameter.detach() * 1e3)
        self.optimizer.step()

    def values(self) -> Values:
        """Return copies of all weights and moments of this rank."""
        live = {name: value.detach() for name, value in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            live |= {f"{name}.{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return {name: local_tensor(value).clone() for name, value in live.items()}

    def save(self, steps: int) -> list[Values]:
        """Save some steps; return the values of each, and of a last one that is not saved."""
        history = []
        with self.manager() as manager:
            for step in range(1, steps + 1):
                self.step()
                history.append(self.values())
                manager.save(step)
        self.step()
        return [*history, self.values()]


def file_of(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / "checkpoints" / f"step-{step}" / f"rank-{rank:05d}.safetensors"


def flip(path: Path, share: float, *, cold: bool) -> None:
    """Flip a bit in the values, at some share of the file, on the disk and in the page cache or only on the disk."""
    flip_bit(path, int(path.stat().st_size * share), 4)
    path.read_bytes()
    if cold:
        drop_from_page_cache(path.parent)


def refused(manager: CheckpointManager) -> bool:
    """Return whether everything that would keep the present state refuses it."""
    for act in (
        lambda: manager.save(9),
        lambda: manager.save(9, force=True),
        lambda: manager.save(9, last_step=True),
        lambda: manager.export(9, last_step=True),
        lambda: manager.save_step(DueSave(9)),
        lambda: manager.export_step(manager.config.export, 9, last_step=True),
        *([] if manager.config.external else [manager.save_seed]),
        manager.completed.save,
    ):
        with pytest.raises(HalfLoadedError, match="a mixture") as caught:
            act()
        assert caught.value.overwritten and caught.value.source
    manager.completed.complete(9)
    return manager.completed.marked is None


def keeps(manager: CheckpointManager, step: int) -> bool:
    """Return whether the state can be saved and exported again."""
    return manager.save(step, last_step=True)


def resumes(manager: CheckpointManager, run: Run, step: int, values: Values) -> bool:
    """Return whether the ladder ends on this step with every tensor right."""
    return manager.load().step == step and same(run.values(), values)


def after_a_step(guard: RunGuard) -> None:
    """Complete a step of which nothing is due to be saved, and fail."""
    guard._manager.completed.complete(3)
    raise RuntimeError("of the loop")


@contextmanager
def failing_after(reads: int, fault: Callable[[], None], step: int = 2) -> Iterator[set[str]]:
    """Let reads of a step's values meet a fault from some number on; yield the ways in which it was read."""
    ways: set[str] = set()
    numbers = itertools.count()

    def watched(way: str) -> Callable[..., None]:
        real = getattr(FileReader, way)

        def read(self: FileReader, *arguments: Any) -> None:
            if f"step-{step}" in str(self.path):
                ways.add(way)
                if next(numbers) >= reads:
                    fault()
            real(self, *arguments)

        return read

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.MonkeyPatch.context() as patch:
            for way in (THROUGH_CACHE, AROUND_CACHE):
                patch.setattr(FileReader, way, watched(way))
            yield ways
    finally:
        signal.signal(signal.SIGINT, before)


def io_error() -> None:
    raise OSError(errno.EIO, "Input/output error")


def once(fault: Callable[[], object]) -> Callable[[], None]:
    """Return a fault that only the first thread meets."""
    numbers = itertools.count()

    def first_time() -> None:
        if next(numbers) == 0:
            fault()

    return first_time


def interrupt() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def settle(folder: Path, *, cold: bool) -> None:
    """Put the files of both steps into the page cache, or out of it."""
    for step in (1, 2):
        for path in file_of(folder, step).parent.iterdir():
            path.read_bytes()
        if cold:
            drop_from_page_cache(file_of(folder, step).parent)


@WARM_OR_COLD
@ROLLED_BACK_OR_RESUMED
@pytest.mark.parametrize("share", [0.4, 0.9], ids=["weights", "moments"])
def test_f5_after_a_flipped_bit_the_ladder_ends_on_a_step_with_every_tensor_right(
    tmp_path: Path, cold: bool, fresh: bool, share: float
) -> None:
    """The step before is loaded over all that was overwritten, and can be saved."""
    run = Run(tmp_path)
    history = run.save(2)
    flip(file_of(tmp_path, 2), share, cold=cold)
    run = Run(tmp_path) if fresh else run
    with run.manager() as manager:
        assert resumes(manager, run, 1, history[0])
        assert keeps(manager, 3)


@WARM_OR_COLD
def test_a_wrong_block_names_what_was_overwritten_and_nothing_is_kept(tmp_path: Path, cold: bool) -> None:
    """Weights and moments are read one after the other; until another load succeeds, save and export refuse."""
    run = Run(tmp_path)
    history = run.save(2)
    flip(file_of(tmp_path, 2), 0.5, cold=cold)
    before = run.values()
    with run.manager() as manager:
        with pytest.raises(CorruptCheckpointError, match="do not have the digest") as caught:
            manager.load(2)
        after = run.values()
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        named = {name.removeprefix("model.").removeprefix("optimizer.") for name in caught.value.overwritten}
        assert {"0.weight", "1.weight", "1.bias"} <= changed <= named
        assert refused(manager)
        assert manager.load(1).step == 1
        assert same(run.values(), history[0])
        assert keeps(manager, 3)


def test_what_no_tensor_has_to_be_read_for_is_checked_before_the_first_byte_changes(tmp_path: Path) -> None:
    """A cut file and a damaged header leave the run as it was, and it can be saved."""
    run = Run(tmp_path)
    run.save(2)
    path = file_of(tmp_path, 2)
    content = path.read_bytes()
    with run.manager() as manager:
        manager.load()
        run.step()
        before = run.values()
        for damaged in (content[:-1], content[:100] + b"#" + content[101:]):
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError):
                manager.load(2)
            assert same(run.values(), before)
        assert keeps(manager, 3)


@pytest.mark.parametrize(("cold", "reads"), [(False, 2), (False, 9), (True, 1)], ids=["warm", "late", "cold"])
@ROLLED_BACK_OR_RESUMED
def test_after_an_io_error_the_ladder_ends_on_a_step_with_every_tensor_right(
    tmp_path: Path, cold: bool, reads: int, fresh: bool
) -> None:
    """The disk fails in the middle of the newest step, and not for the one before."""
    run = Run(tmp_path)
    history = run.save(2)
    settle(tmp_path, cold=cold)
    run = Run(tmp_path) if fresh else run
    before = run.values()
    with run.manager() as manager, failing_after(reads, io_error) as ways:
        with pytest.raises(CorruptCheckpointError, match="Input/output error"):
            manager.load(2)
        assert not same(run.values(), before)
        assert ways == ({AROUND_CACHE} if cold else {THROUGH_CACHE, AROUND_CACHE})  # the second look is at the disk
        assert refused(manager)
        assert resumes(manager, run, 1, history[0])
        assert keeps(manager, 3)


@WARM_OR_COLD
@ROLLED_BACK_OR_RESUMED
def test_an_interrupt_leaves_no_thread_that_writes_and_nothing_is_kept(tmp_path: Path, cold: bool, fresh: bool) -> None:
    """Ctrl-C while tensors are filled: it is raised once all threads have stopped; the guard saves nothing either."""
    run = Run(tmp_path)
    history = run.save(2)
    settle(tmp_path, cold=cold)
    run = Run(tmp_path) if fresh else run
    with run.manager() as manager:
        with pytest.raises(KeyboardInterrupt), RunGuard(manager), failing_after(1, once(interrupt)) as ways:
            manager.load()
        assert ways == {AROUND_CACHE if cold else THROUGH_CACHE}
        assert not [thread for thread in threading.enumerate() if "titan_ckpt-io" in thread.name]
        assert refused(manager)
        with pytest.raises(RuntimeError, match="of the loop"), RunGuard(manager) as guard:
            after_a_step(guard)
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
        assert resumes(manager, run, 2, history[1])
        assert keeps(manager, 3)


def test_an_owner_that_fails_to_take_its_state_leaves_the_mark(tmp_path: Path) -> None:
    """Weights and moments are those of the step, and a counter is not."""
    run = Run(tmp_path)
    run.save(2)
    with run.manager() as manager, pytest.MonkeyPatch.context() as patch:

        def fails(*_: Any) -> None:
            raise RuntimeError("the scheduler is gone")

        patch.setattr(RunState, "apply", fails)
        with pytest.raises(RuntimeError, match="scheduler is gone"):
            manager.load()
        assert refused(manager)


def test_a_step_that_leaves_overwritten_moments_as_they_are_is_refused(tmp_path: Path) -> None:
    """Below the damaged step lies a seed, which holds no moments: those of the run are a mixture."""
    run = Run(tmp_path)
    with run.manager() as manager:
        manager.save_seed()
        run.step()
        manager.save(1)
    run.step()
    flip(file_of(tmp_path, 1), 0.9, cold=False)
    with run.manager() as manager:
        with pytest.raises(LoadMismatchError, match=r"load of step 0 replaced all but 6 of .*exp_avg"):
            manager.load()
        assert refused(manager)
    fresh = Run(tmp_path)
    with fresh.manager() as manager:
        assert manager.load().step == 0
        assert keeps(manager, 3)


def test_moments_that_were_attached_before_another_owner_failed_are_not_kept_by_a_step_without_any(
    tmp_path: Path,
) -> None:
    """A new run has no moments before a load: those of step 1 would stay beside the weights of the seed."""
    run = Run(tmp_path)
    with run.manager() as manager:
        manager.save_seed()
        run.step()
        manager.save(1)
    run = Run(tmp_path)
    with run.manager() as manager, pytest.MonkeyPatch.context() as patch:
        real = RunState.apply

        def fails(*arguments: Any) -> None:
            real(*arguments)
            raise RuntimeError("the scheduler is gone")

        patch.setattr(RunState, "apply", fails)
        with pytest.raises(RuntimeError, match="scheduler is gone"):
            manager.load()
        assert run.optimizer.state
        patch.undo()
        with pytest.raises(LoadMismatchError, match=r"load of step 0 replaced all but 6 of .*exp_avg"):
            manager.load(0)
        assert refused(manager)
        assert manager.load().step == 1
        assert keeps(manager, 3)
