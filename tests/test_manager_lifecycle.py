"""The life of a manager besides saving and loading: misuse, interrupts, failures, leaks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load
from torch import nn

from tests import world
from tests.run_folder import RunFolder
from tests.world import Value
from tests.world import manager as build
from titan_ckpt import CheckpointConfig, CheckpointManager, ExportConfig, SaveConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointError,
    CommitConflictError,
    CorruptCheckpointError,
    ExportError,
    LoadMismatchError,
    StateEncodingError,
)
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.saving.step import DueSave

MODES = pytest.mark.parametrize("mode", ["disabled", "thread"])


def manager(folder: RunFolder, mode: Any = "disabled", model: Any = None, **given: Any) -> CheckpointManager:
    optimizers = given.pop("optimizers", ())
    return build(folder, model or nn.Linear(2, 2), *optimizers, async_mode=mode, **given)


def _weight(model: nn.Sequential, index: int) -> torch.Tensor:
    weight = model[index].weight
    assert isinstance(weight, torch.Tensor)
    return weight


@MODES
@pytest.mark.parametrize("value", [object(), RuntimeError("no state today")])
def test_a_state_that_cannot_be_saved_is_an_error_and_not_a_hang(run_folder: RunFolder, mode: Any, value: Any) -> None:
    """The save fails at once, closing does not wait for it, and the next save works."""
    state = Value()
    with manager(run_folder, mode, states={"it": state}) as m:
        state.value = value
        with pytest.raises(StateEncodingError, match=r"states?\.it\.value|no state today"):
            m.save(1)
        state.value = 3
        assert m.save(1)
    assert run_folder.steps() == [1]


@MODES
def test_an_interrupt_while_writing_leaves_nothing_behind(
    run_folder: RunFolder, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a save: raised once, no file of it stays, the next save works."""
    with manager(run_folder, mode) as m:
        assert m._saver is not None
        with monkeypatch.context() as patch:
            for way in (WritePlan, StagedFile):
                patch.setattr(way, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            if mode != "disabled":
                m.save(1)
            with pytest.raises(KeyboardInterrupt):
                m.wait() if mode != "disabled" else m.save(1)
        assert not run_folder.unfinished()
        assert m.save(1)
    assert run_folder.steps() == [1]


def test_a_closed_manager_says_so(run_folder: RunFolder) -> None:
    """Saving or loading after close is refused, because another run may hold the folder; closing again is not."""
    m = manager(run_folder)
    m.save(1)
    m.close()
    m.close()
    for use in (lambda: m.save(2), m.load, lambda: m.save_step(DueSave(2))):
        with pytest.raises(CheckpointError, match="is closed; make another"):
            use()
    assert run_folder.steps() == [1]


def test_a_step_is_not_saved_without_the_table_for_saves(run_folder: RunFolder) -> None:
    """save() has nothing to do then; save_step() cannot do what it was called for."""
    with build(run_folder, nn.Linear(2, 2), save=None) as m:
        assert m.save(1) is False
        with pytest.raises(CheckpointError, match=r": step 1 is not saved: save_step needs .* checkpoint\.save, and"):
            m.save_step(DueSave(1))
    assert run_folder.steps() == []


@MODES
def test_nothing_is_left_after_close(run_folder: RunFolder, mode: Any) -> None:
    """No thread, no open file, no hook on the optimizer; also where the run fails with a save in flight."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(folder: RunFolder, *, fail: bool) -> None:
        with manager(folder, mode, model, optimizers=[optimizer]) as m:
            m.load()
            m.save(1)
            if fail:
                raise RuntimeError("the run failed")

    def open_things() -> tuple[int, set[str], int]:
        gc.collect()
        threads = {t.name for t in threading.enumerate()}
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        if run_folder.url:  # a bucket's client closes connections when it likes
            files = [file for file in files if "socket:" not in file]
        return len(files), threads, len(optimizer._optimizer_step_pre_hooks)

    run(run_folder / "first", fail=False)  # buffers and libraries that stay for the next save
    before = open_things()
    run(run_folder / "first", fail=False)
    with pytest.raises(RuntimeError, match="the run failed"):
        run(run_folder / "second", fail=True)
    with pytest.raises(ExportError):
        manager(run_folder, model=model, optimizers=[optimizer], export=(ExportConfig("peft"),))
    other = manager(run_folder / "first", model=nn.Linear(3, 3))
    with pytest.raises(LoadMismatchError):
        other.load()
    other.close()
    deadline = time.monotonic() + (60 if run_folder.url else 0)
    while (now := open_things())[0] > before[0] and time.monotonic() < deadline:
        time.sleep(0.1)  # a bucket's client opens files for a moment, in threads of its own
    assert now[0] <= before[0]
    assert now[1:] == before[1:]
    assert (run_folder / "second").steps() == [1]


def test_a_second_writer_is_refused_while_the_first_lives(run_folder: RunFolder) -> None:
    """Two managers on one folder: the second cannot save, and can once the first is closed."""
    with manager(run_folder) as first:
        first.load()
        first.save(1)
        world.load_fails(manager(run_folder), CommitConflictError)
        first.save(2)
    assert world.load(manager(run_folder)).step == 2


def test_a_state_file_of_another_shape_is_typed_though_its_digest_holds(tmp_path: Path) -> None:
    """A state file that another program sealed is named, the step before is taken, and nothing is touched."""
    run_folder = RunFolder(tmp_path)
    model = nn.Linear(2, 2)
    with manager(run_folder, "disabled", model, optimizers=[torch.optim.SGD(model.parameters(), 0.1)]) as m:
        m.save(1)
        m.save(2)
    committed = Manifest.from_bytes(run_folder.read(2, "MANIFEST.json"))
    for name, text in [
        ("state.json", "[]"),
        ("state.json", '{"step": 2, "optimizer": 1}'),
        ("state.json", '{"step": 2, "optimizer": ["x"]}'),
        ("state.json", '{"step": 2, "optimizer": [[1]]}'),
        ("state.json", '{"step": 2, "lr_scheduler": {}}'),
        ("state.json", '{"step": 2, "states": []}'),
        ("rank-00000.json", "null"),
        ("rank-00000.json", '{"rng": 1}'),
        ("rank-00000.json", '{"rng": {"python": 1}}'),
    ]:
        before = run_folder.read(2, name)
        run_folder.write(2, name, text.encode())
        sealed = FileRecord(name, len(text), xxhash.xxh3_128_hexdigest(text.encode()))
        files = tuple(sealed if record.name == name else record for record in committed.files)
        run_folder.write(2, "MANIFEST.json", dataclasses.replace(committed, files=files).to_bytes())
        fresh = nn.Linear(2, 2)
        weight = fresh.weight.detach().clone()
        with manager(run_folder, "disabled", fresh, optimizers=[torch.optim.SGD(fresh.parameters(), 0.1)]) as m:
            with pytest.raises(CorruptCheckpointError, match=rf"step-2/{name}: not the state of a run"):
                m.load(2)
            assert torch.equal(fresh.weight, weight)
            assert m.load().step == 1
        run_folder.write(2, name, before)


@pytest.mark.parametrize("if_busy", ["wait", "skip"])
def test_a_save_that_is_due_meanwhile_waits_or_is_skipped(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, if_busy: str
) -> None:
    """if_busy = "skip": the step is left out, the one in flight and the next are saved; the log says which it was."""
    with manager(run_folder, "thread", if_busy=if_busy) as m:
        assert m._saver is not None
        go_on = threading.Event()
        write = StagedFile.write
        monkeypatch.setattr(StagedFile, "write", lambda file, folder: (go_on.wait(20), write(file, folder))[1])
        assert m.save(1)
        if if_busy == "wait":
            threading.Timer(0.2, go_on.set).start()
        assert m.save(2) is (if_busy == "wait")
        go_on.set()
        m.wait()
        assert m.save(3)
    assert run_folder.steps() == [1, *([2] if if_busy == "wait" else []), 3]
    said = {"wait": "training waits", "skip": "not saved"}[if_busy]
    assert [f"step 2 is due and {said}" in line for line in caplog.messages].count(True) == 1, caplog.messages


def test_f12_a_save_without_settings_is_written_while_training_goes_on(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save() returns before any byte of the step is written, on the CPU; the optimizer steps before the commit."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with world.manager(run_folder, model, optimizer) as m:
        m.load()
        go_on, write = threading.Event(), StagedFile.write
        monkeypatch.setattr(StagedFile, "write", lambda file, folder: (go_on.wait(20), write(file, folder))[1])
        saved = model.weight.detach().clone()
        assert m.save(1)
        world.step_with_ones(optimizer)
        assert not torch.equal(model.weight, saved)
        assert run_folder.steps() == []
        go_on.set()
        m.wait()
        assert run_folder.steps() == [1]
    fresh = nn.Linear(2, 2)
    world.load(world.manager(run_folder, fresh, torch.optim.SGD(fresh.parameters(), lr=1.0)))
    assert torch.equal(fresh.weight, saved)


def test_the_last_step_waits_for_the_save_in_flight(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is committed when save(last_step=True) returns."""
    with manager(run_folder, "thread") as m:
        assert m._saver is not None
        write = StagedFile.write

        def slow(file: StagedFile, folder: Path) -> Any:
            time.sleep(0.3)
            return write(file, folder)

        monkeypatch.setattr(StagedFile, "write", slow)
        m.save(1)
        m.save(2, last_step=True)
        assert run_folder.steps() == [1, 2]


def test_a_damaged_step_before_a_weights_only_one_is_no_fresh_start(run_folder: RunFolder) -> None:
    """Nothing that can be resumed from is whole: an error, not step 0."""
    with manager(run_folder) as m:
        m.save(1)
        m.save(2)
    manifest = dataclasses.replace(Manifest.from_bytes(run_folder.read(1, "MANIFEST.json")), kind="model")
    run_folder.write(1, "MANIFEST.json", manifest.to_bytes())
    run_folder.damage(2)
    world.load_fails(manager(run_folder), CorruptCheckpointError)


def test_statistics_that_a_forward_changes_are_those_of_the_step(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm moves its buffers while the save is still being staged: what is saved is what was there."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    other = nn.Sequential(nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters())
    with manager(run_folder, "thread", model, optimizers=[optimizer]) as m:
        assert m._saver is not None
        go_on = threading.Event()
        begin = StagedFile.begin

        def late(file: StagedFile, tensors: dict[str, torch.Tensor], changed: Any) -> Any:
            class Staging:
                def finish(self) -> list[str]:
                    go_on.wait(20)
                    return begin(file, tensors, changed).finish()

            return Staging()

        monkeypatch.setattr(StagedFile, "begin", late)
        model(torch.randn(4, 3))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        m.save(1)
        model(torch.randn(4, 3) + 5)
        go_on.set()
        m.wait()
    world.load(manager(run_folder, "thread", other))
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def test_parameters_replaced_between_saves_are_the_ones_saved(run_folder: RunFolder) -> None:
    """A layer of another size, with an optimizer's group of its own: names and the plan are looked at anew."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    with manager(run_folder, "thread", model, optimizers=[optimizer]) as m:
        m.save(1)
        model[1] = nn.Linear(2, 5)
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.3})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        m.save(2)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5))
    again = torch.optim.SGD([{"params": list(layer.parameters())} for layer in other], lr=9.0, momentum=0.9)
    assert world.load(manager(run_folder, "thread", other, optimizers=[again])).step == 2
    assert torch.equal(_weight(other, 1), _weight(model, 1))
    assert [g["lr"] for g in again.param_groups] == [0.1, 0.3]


def test_an_optimizer_of_replaced_parameters_is_named(run_folder: RunFolder) -> None:
    """It trains tensors that are the model's no longer: said so, instead of saving them under the model's names."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager(run_folder, model=model, optimizers=[optimizer]) as m:
        model.weight = nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(LoadMismatchError, match=r"parameter 0 \(shape \[2, 2\]\) of SGD is in no model part"):
            m.save(1)


def test_ties_are_those_of_the_moment(run_folder: RunFolder) -> None:
    """A weight tied when the manager was made, and untied since, is saved under both names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[2].weight = model[0].weight
    with manager(run_folder, model=model) as m:
        m.save(1)
        model[1].weight = nn.Parameter(torch.full((2, 2), 7.0))
        m.save(2)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    other[2].weight = other[0].weight
    world.load(manager(run_folder, model=other))
    assert torch.equal(_weight(other, 1), _weight(model, 1))
    assert torch.equal(_weight(other, 2), _weight(model, 0))


@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_a_model_without_memory_is_neither_saved_nor_loaded_into(run_folder: RunFolder, kind: str) -> None:
    """A model left on meta would take a load in silence."""
    world.save(manager(run_folder, model=nn.Linear(2, 3)))
    if kind == "meta":
        with torch.device("meta"):
            model: nn.Module = nn.Linear(2, 3)
    else:
        model = nn.LazyLinear(3)
    world.load_fails(manager(run_folder, model=model), StateEncodingError, r"no memory yet for.*weight")
    with manager(run_folder / "new", model=model) as m, pytest.raises(StateEncodingError, match="no memory yet for"):
        m.save(1)


def test_a_module_in_place_of_a_list_is_named(tmp_path: Path) -> None:
    """A Sequential is a sequence of modules too, and would lose its names."""
    with pytest.raises(TypeError, match=r"one Sequential: put it in a list"):
        CheckpointManager(CheckpointConfig(), model_parts=nn.Sequential(nn.Linear(2, 2)), base_folder=tmp_path)  # type: ignore[arg-type]


def test_steps_of_torchtitan_are_loaded_before_the_first_save_too(tmp_path: Path) -> None:
    """A run that had not loaded them saved beside them, and its step was the newest."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.step_with_ones(optimizer)
    world.save(
        world.manager(tmp_path / "titan", model, optimizer, export=(ExportConfig("torchtitan"),)), last_step=True
    )
    shutil.copytree(tmp_path / "titan" / "exports", tmp_path / "run" / "checkpoints")
    with world.manager(tmp_path / "run", model, optimizer) as m:
        with pytest.raises(CommitConflictError, match=r"load\(\) was never called, and step 1 of an earlier run"):
            m.save(5)
        assert m.load().step == 1
        m.save(5)
    assert RunFolder(tmp_path / "run").steps() == [1, 5]


def test_what_is_no_list_or_no_dict_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_parts": nn.Sequential(model)}, r"model_parts is one Sequential: put it in a list"),
        ({"optimizers": optimizer}, r"optimizers is one SGD: put it in a list"),
        ({"lr_schedulers": scheduler}, r"lr_schedulers is one StepLR: put it in a list"),
        ({"states": [scheduler]}, r"states is a list: give each object a name"),
    ]
    for given, message in wrong:
        with pytest.raises(TypeError, match=message):
            CheckpointManager(CheckpointConfig(), **{"model_parts": [model], "base_folder": tmp_path, **given})


def test_lists_that_can_be_read_once_are_saved_as_a_whole(tmp_path: Path) -> None:
    """A generator of schedulers was empty when it came to their state, and a resume would have begun them anew."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given: dict[str, Any] = {"model_parts": [model], "optimizers": [optimizer], "lr_schedulers": [scheduler]}
    once: Any = {name: iter(values) for name, values in given.items()}
    with CheckpointManager(CheckpointConfig(save=SaveConfig(interval=1)), **once, base_folder=tmp_path) as m:
        m.load()
        optimizer.step()
        scheduler.step()
        m.save(1)
    scheduler.step()
    world.load(CheckpointManager(CheckpointConfig(), **given, base_folder=tmp_path))
    assert scheduler.last_epoch == 1


def test_steps_that_a_loop_counts_by_numpy_are_saved(run_folder: RunFolder) -> None:
    steps: Any = np.arange(1, 3)
    with manager(run_folder, model=nn.Linear(2, 2)) as m:
        m.load()
        for step in steps:
            assert m.save(step)
            m.completed.complete(step)
        assert m.completed.marked is None or type(m.completed.marked) is int
        m.wait()
        assert m.load(steps[0]).step == 1


def test_metrics_that_are_no_numbers_are_refused_by_name(run_folder: RunFolder) -> None:
    """All are named at once, and the step can be saved again; tensors and numpy's numbers are numbers."""
    wrong: Any = {
        "loss": "0.5",
        "kept": None,
        1: 2.0,
        "\ud800": 2.0,
        "each": torch.ones(2),
        "huge": 10**400,
        "right": 1,
    }
    right: Any = {"loss": torch.tensor(0.5), "reward": np.float32(2), "endless": math.inf}
    with manager(run_folder) as m:
        m.load()
        with pytest.raises(CheckpointError) as raised:
            m.save(1, metrics=wrong)
        others: list[Any] = [[("loss", 1.0)], {str(number): 1.0 for number in range(1001)}]
        for each, what in zip(others, ("it is a list", "there are 1001, and a step holds 1000"), strict=True):
            with pytest.raises(CheckpointError, match=what):
                m.save(1, metrics=each)
        assert m.save(1, metrics=right)
        m.wait()
        found, _ = CheckpointDirectory(m._directory.root, Coordinator.current()).committed(1)
    names = ("'loss' is '0.5'", "'kept' is None", "the name 1 is no text", "'huge' is 1000")
    for named in (*names, r"the name '\ud800' is no text", "'each' is tensor([1., 1.])"):
        assert named in str(raised.value)
    assert "right" not in str(raised.value)
    assert found.metrics == {"loss": 0.5, "reward": 2.0}


@pytest.mark.parametrize("due", [{"last_step": True}, {"force": True}, {"force": True, "last_step": True}])
def test_metrics_that_are_no_numbers_cost_no_save_that_nothing_makes_up_for(
    tmp_path: Path, due: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """The save of a RunGuard at SIGTERM was refused for them, and all was lost since the last interval."""
    wrong: Any = {"loss": None, "right": 1.0}
    with manager(RunFolder(tmp_path), interval=100) as m:
        m.load()
        assert m.save(1, metrics=wrong, **due)
    found, _ = CheckpointDirectory(m._directory.root, Coordinator.current()).committed(1)
    assert found.metrics == {"right": 1.0}
    assert "step 1 is saved without metrics that are no numbers" in caplog.text and "'loss' is None" in caplog.text


@pytest.mark.parametrize("step", ["1", 1.0, None, True, -2, torch.tensor(1.0)])
def test_what_is_no_step_is_refused_at_once(run_folder: RunFolder, step: Any) -> None:
    """And does not lead to the newest step, nor to a save that fails when training has gone on."""
    with manager(run_folder, model=nn.Linear(2, 2)) as m:
        m.load()
        for call in (m.save, m.export, m.load, m.completed.complete):
            with pytest.raises(CheckpointError, match="is no step"):
                call(step)


ENDS_WITHOUT_CLOSE = """
import sys, threading, time
from collections.abc import Sequence
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.formats.native.arena import StagedFile

start, write = threading._start_new_thread, StagedFile.write

def start_before_the_end(*args):
    if not threading.main_thread().is_alive():
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 and later
    return start(*args)

def write_after_the_end(file, folder):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    if "fails" in str(folder):
        raise OSError(28, "No space left on device")
    return write(file, folder)

threading._start_new_thread, StagedFile.write = start_before_the_end, write_after_the_end
for name in ("works", "fails"):
    config = CheckpointConfig(save=SaveConfig(interval=1))
    manager = CheckpointManager(config, model_parts=[nn.Linear(900, 900)], base_folder=Path(sys.argv[1], name))
    manager.load()
    manager.save(1)
print("the end of the program")
"""


def test_f12_a_program_that_ends_without_close_keeps_its_save_or_says_why_not(tmp_path: Path) -> None:
    """The process ends only when saves have; what went wrong with one that nobody waited for is logged."""
    command = [sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.stdout == "the end of the program\n", ended.stderr
    assert (RunFolder(tmp_path) / "works").steps() == [1], ended.stderr
    assert (RunFolder(tmp_path) / "fails").steps() == []
    assert "step 1 was not saved: [Errno 28] No space left" in ended.stderr
    assert ended.stderr.count("is not there") == 1


def test_without_an_optimizer_a_save_returns_when_its_copy_is_taken(run_folder: RunFolder) -> None:
    """Nothing can tell the manager that weights are about to change, so they may change at once."""
    model = nn.Linear(1000, 1000)
    with manager(run_folder, "thread", model=model) as m:
        for step in range(1, 4):
            with torch.no_grad():
                model.weight.fill_(step)
            m.save(step)
            with torch.no_grad():
                model.weight.zero_()
            m.wait()
            stored = load(run_folder.read(step, "rank-00000.safetensors"))
            assert stored["model.weight"].eq(step).all()


def test_memory_for_the_first_copy_is_made_ready_before_the_first_save(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no save is due: the first one finds the plan and the memory that later ones use."""
    made: list[WritePlan] = []
    init = StagedFile.__init__

    def count(self: StagedFile, plan: WritePlan, **settings: bool) -> None:
        made.append(plan)
        init(self, plan, **settings)

    monkeypatch.setattr(StagedFile, "__init__", count)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save = SaveConfig(interval=2, async_mode="thread")
    with build(run_folder, model, optimizer, save=save) as m:
        for step in range(1, 5):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            assert m.save(step) is (step % 2 == 0)
            assert len(made) == 1
    assert run_folder.steps() == [2, 4]


def test_a_named_step_is_resumed_where_inodes_change_from_look_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a FUSE mount that draws new numbers for files that are not open."""
    with manager(RunFolder(tmp_path)) as first:
        for step in (1, 2):
            first.save(step)
    lstat, numbers = Path.lstat, itertools.count(1)

    def drawn(path: Path) -> os.stat_result:
        mode, _, *others = lstat(path)
        return os.stat_result([mode, next(numbers), *others])

    monkeypatch.setattr(Path, "lstat", drawn)
    with manager(RunFolder(tmp_path)) as second:
        assert second.load(1).step == 1
        second.save(2)


def test_a_schedule_of_an_optimizer_that_is_not_given_is_refused(tmp_path: Path) -> None:
    """The moments of that optimizer would be in no step, and a resume would begin them afresh without a word."""
    model = nn.Linear(2, 2)
    given, forgotten = (torch.optim.AdamW([parameter]) for parameter in model.parameters())

    def manager(optimizers: Sequence[torch.optim.Optimizer], schedule: Any, **config: Any) -> CheckpointManager:
        settings = CheckpointConfig(save=SaveConfig(interval=1), **config)
        return CheckpointManager(
            settings, model_parts=[model], optimizers=optimizers, lr_schedulers=[schedule], base_folder=tmp_path
        )

    rates = torch.optim.lr_scheduler
    for schedule in (rates.StepLR(forgotten, 1), rates.ReduceLROnPlateau(forgotten)):
        for optimizers in ([given], []):
            refused = rf"lr_schedulers\[0\] \({type(schedule).__name__}\) .*AdamW.*optimizers"
            with pytest.raises(LoadMismatchError, match=refused):
                manager(optimizers, schedule)
    manager([given, forgotten], rates.StepLR(forgotten, 1)).close()
    manager([], rates.StepLR(forgotten, 1), components=("model", "lr_scheduler")).close()


def test_settings_that_are_no_config_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="config is one dict: give a CheckpointConfig"):
        CheckpointManager({"folder": "checkpoints"}, model_parts=[nn.Linear(2, 2)], base_folder=tmp_path)  # type: ignore[arg-type]
