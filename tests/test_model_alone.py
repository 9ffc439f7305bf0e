"""Steps that hold the model alone: seeds, from which runs of any layout start, and last steps in a chosen dtype."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.run_folder import RunFolder
from tests.world import Run, Value, load, load_fails, read_all, same
from tests.world import manager as build
from titan_ckpt.config import InitialLoadConfig
from titan_ckpt.errors import CheckpointNotFoundError, ExportError
from titan_ckpt.formats.native import arena
from titan_ckpt.formats.native.arena import Arena
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.saving.saver import Saver


def _run(folder: RunFolder, seed: int = 0, **settings: Any) -> tuple[Run, CheckpointManager]:
    torch.manual_seed(seed)
    run = Run(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), seed)
    return run, run.manager(folder, **{"interval": 2, **settings})


def _train(run: Run, manager: CheckpointManager, last: int) -> int:
    """Resume or start, train up to a last step, and return where it started."""
    with manager:
        start = manager.load().step
        for step in range(start + 1, last + 1):
            run.step()
            manager.save(step, last_step=step == last)
    return start


def test_a_run_starts_from_a_seed_and_from_nothing_else_of_its_process(run_folder: RunFolder) -> None:
    """The seed's weights are loaded, the optimizer and the generators of the new run are not touched."""
    seed, manager = _run(run_folder, seed=1)
    with manager:
        manager.save_seed()
    run, manager = _run(run_folder, seed=2)
    generator = torch.get_rng_state()
    result = load(manager)
    assert result.step == 0
    assert set(result.report.loaded) == set(seed.model.state_dict())
    assert same(run.model.state_dict(), seed.model.state_dict())
    assert not run.optimizer.state
    assert torch.equal(generator, torch.get_rng_state())
    assert _train(*_run(run_folder, seed=2), last=2) == 0
    assert _train(*_run(run_folder, seed=2), last=4) == 2


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.parametrize("dtype", [True, "bfloat16"])
def test_a_last_step_holds_the_model_alone_in_its_dtype(run_folder: RunFolder, mode: Any, dtype: Any) -> None:
    """The values are those of the model, rounded once; counters keep their type; another run can start from them."""
    run, manager = _run(run_folder, async_mode=mode, model_only_last=dtype)
    _train(run, manager, last=3)
    source = InitialLoadConfig(f"{run_folder.checkpoints}/step-3", cast=True)
    other, manager = _run(run_folder / "other", seed=5, initial_load=[source])
    report = load(manager).report
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    for name, value in run.model.state_dict().items():
        rounded = value.to(wanted).float() if value.is_floating_point() else value
        assert torch.equal(rounded, other.model.state_dict()[name]), name
    assert bool(report.cast) is (dtype == "bfloat16")
    assert "1.num_batches_tracked" in report.loaded


class Casts(TorchDispatchMode):
    """Counts the tensors that this thread casts, and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(made.nbytes)
        return made


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_a5_a_last_step_is_cast_while_it_is_copied(tmp_path: Path, mode: Any) -> None:
    """No tensor of the model has a second one in the file's dtype: what is saved is the live memory."""
    run, manager = _run(RunFolder(tmp_path), async_mode=mode, model_only_last="bfloat16", interval=9)
    run.step()
    with manager, mock.patch.object(Saver, "save", autospec=True, side_effect=Saver.save) as saved, Casts() as casts:
        manager.save(1, last_step=True)
    (_, _, _, snapshot, _), _ = saved.call_args
    live = {f"model.{name}": value.data_ptr() for name, value in run.model.state_dict().items()}
    assert {name: value.data_ptr() for name, value in snapshot.tensors.items()} == live
    assert casts.sizes == []
    stored = read_all(tmp_path / "checkpoints/step-1")
    for name, value in run.model.state_dict().items():
        wanted = value.bfloat16() if value.is_floating_point() else value
        assert torch.equal(stored[f"model.{name}"], wanted), name


def test_a_last_step_from_a_process_holds_the_model_alone_in_its_dtype(tmp_path: Path) -> None:
    """It does not take `run_folder`, because a process takes seconds to start: one test of those on buckets has one."""
    test_a_last_step_holds_the_model_alone_in_its_dtype(RunFolder(tmp_path), "process", "bfloat16")


def test_a_last_step_in_float16_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    """The tensor is named, and no step is there; bfloat16 holds it."""
    for dtype in ("float16", "bfloat16"):
        run, manager = _run(RunFolder(tmp_path / dtype), model_only_last=dtype, interval=9)
        run.step()
        with torch.no_grad():
            run.model[0].bias[:2] = torch.tensor([torch.inf, -65520.0])
        refused: Any = pytest.raises(ExportError, match=r"model\.0\.bias: its largest value is 65520, and float16 ends")
        with manager, refused if dtype == "float16" else nullcontext():
            manager.save(1, last_step=True)
        assert (tmp_path / dtype / "checkpoints/step-1").exists() is (dtype == "bfloat16")


def test_a_finished_run_with_the_model_alone_goes_on_from_its_last_full_step(run_folder: RunFolder) -> None:
    """The newer weights-only step is passed over, and the steps after the full one are trained again."""
    assert _train(*_run(run_folder, model_only_last=True), last=3) == 0
    assert _train(*_run(run_folder, model_only_last=True), last=3) == 2


@pytest.mark.parametrize("seeded", [False, True])
def test_a_finished_run_without_a_full_step_is_not_trained_again_in_silence(
    run_folder: RunFolder, seeded: bool
) -> None:
    """A folder whose steps all hold the model alone is refused, with the way to its weights."""
    save: dict[str, Any] = {"interval": 100, "model_only_last": True}
    if seeded:
        _, manager = _run(run_folder, **save)
        with manager:
            manager.save_seed()
    _train(*_run(run_folder, **save), last=3)
    fault = r"step 3 holds the model alone.*initial_load"
    load_fails(_run(run_folder, **save)[1], CheckpointNotFoundError, fault)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_memory_for_the_copy_is_made_once_although_saves_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """States that hold tensors are known at the first save, and the last step is the model alone: all fit the memory.

    On a device the memory is page-locked, which takes seconds each time it is made.
    """
    made: list[int] = []

    class Counted(Arena):
        def __init__(self, num_bytes: int, **settings: Any) -> None:
            made.append(num_bytes)
            super().__init__(num_bytes, **settings)

    monkeypatch.setattr(arena, "Arena", Counted)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    save: dict[str, Any] = {"interval": 2, "async_mode": mode, "model_only_last": True}
    manager = build(tmp_path, model, optimizer, **save, states={"own": Value(torch.arange(1000.0))})
    weights = {}
    with manager:
        manager.load()
        for step in range(1, 6):
            model(torch.randn(3, 100)).square().mean().backward()
            manager.maybe_wait_for_staging()
            optimizer.step()
            weights[step] = model.weight.detach().clone()
            manager.save(step, last_step=step == 5)
    assert len(made) == 1
    for step in (2, 4, 5):  # every block that is read is verified
        assert torch.equal(read_all(tmp_path / f"checkpoints/step-{step}")["model.weight"], weights[step])
