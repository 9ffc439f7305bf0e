"""Folders with the flat names of torchtitan's manager give a run their training state, in place or by path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests import world
from tests.world import differing, same
from titan_ckpt.config import ExportConfig, InitialLoadConfig, ResumeConfig, SaveConfig
from titan_ckpt.errors import CheckpointError, CommitConflictError, ConfigError, ExportError, LoadMismatchError
from titan_ckpt.manager import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class _Run:
    """A run with two parameter groups, a schedule, a counter and a data position named as torchtitan names its own."""

    dp_rank, dp_world_size = 0, 1

    def __init__(self, seed: int, decay: float = 0.1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        weights, biases = ([p for p in self.model.parameters() if (p.dim() > 1) is large] for large in (True, False))
        groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.epoch, self.step, self.position = 0, 0, b"\x80not a pickle"

    def train(self, steps: int) -> None:
        for _ in range(steps):
            world.step_on(self.model, self.optimizer, torch.ones(2, 4))
            self.epoch, self.step = self.epoch + 1, self.step + 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + self.epoch)

    def flat(self) -> dict[str, Any]:
        """Return the state dict that torchtitan's manager would hand to dcp.save."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        out: dict[str, Any] = {**self.model.state_dict()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                fqn, state = names[id(parameter)], self.optimizer.state[parameter]
                out |= {f"optimizer.state.{fqn}.{name}": value for name, value in state.items()}
                kept = {key: value for key, value in group.items() if key != "params"}
                out |= {f"optimizer.param_groups.{fqn}.{key}": value for key, value in kept.items()}
        out |= {"lr_scheduler.last_epoch": self.epoch, "train_state.step": self.step}
        return out | {"dataloader.dp_rank_0": self.position, "dataloader.world_size": 1}

    def manager(self, folder: Path, **settings: Any) -> CheckpointManager:
        settings.setdefault("save", SaveConfig(interval=1, async_mode="disabled"))
        return world.manager(
            folder,
            self.model,
            self.optimizer,
            **settings,
            lr_schedulers=[_Part(self, ("last_epoch", "epoch"))],
            dataloader=_Data(self),
            states={"train_state": _Part(self, ("step", "step"))},
        )


class _Part:
    """One number of a run as a state of its own: (its name in the state, the run's attribute)."""

    def __init__(self, run: _Run, *names: tuple[str, str]) -> None:
        self._run, self._names = run, names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._run, attribute) for name, attribute in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, attribute in self._names:
            setattr(self._run, attribute, state[name])


class _Data(_Part):
    dp_rank, dp_world_size = 0, 1

    def __init__(self, run: _Run) -> None:
        super().__init__(run, ("dp_rank_0", "position"), ("world_size", "dp_world_size"))


def _saved(folder: Path, steps: int = 3) -> _Run:
    run = _Run(seed=1)
    run.train(steps)
    dcp.save(run.flat(), checkpoint_id=folder, no_dist=True)
    return run


def _same(a: _Run, b: _Run) -> None:
    assert not (found := differing(a.flat(), b.flat())), found


def _from(step: Path) -> dict[str, Any]:
    """Return the setting that a run goes on from a step of another run."""
    return {"initial_load": [InitialLoadConfig(str(step), load="training_state")]}


def test_a_run_goes_on_from_a_folder_that_is_named(tmp_path: Path) -> None:
    """Weights, moments, hyperparameters, schedule, counters and data position are the saved ones."""
    saved = _saved(tmp_path / "theirs" / "step-3")
    run = _Run(seed=2)
    with run.manager(tmp_path / "ours", **_from(tmp_path / "theirs" / "step-3")) as manager:
        assert manager.load().step == 3
        _same(saved, run)
        saved.train(2)
        run.train(1)
        manager.save(4)
        run.train(1)
    _same(saved, run)
    assert world.load(run.manager(tmp_path / "ours")).step == 4


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_an_export_with_training_state_holds_what_torchtitan_would_save(
    tmp_path: Path, mode: Literal["disabled", "thread"]
) -> None:
    """Every name and value is what its manager would have handed to dcp.save, also of a step that is staged."""
    run = _Run(seed=1)
    export = ExportConfig("torchtitan", interval=2)
    save = SaveConfig(interval=2, async_mode=mode)
    with run.manager(tmp_path / "run", save=save, export=(export,)) as manager:
        manager.load()
        run.train(2)
        manager.save(2)
        expected = copy.deepcopy(run.flat())
        run.train(1)
    loaded = {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for n, v in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "run/exports/step-2", no_dist=True)
    assert same(loaded, expected)
    again = _Run(seed=2)
    source = _from(tmp_path / "run/exports/step-2")
    assert world.load(again.manager(tmp_path / "again", **source)).step == 2
    again.train(1)
    _same(run, again)


def test_an_export_that_cannot_hold_the_training_state_is_refused(tmp_path: Path) -> None:
    """Settings that contradict it, and state that is no plain data, are named; nothing is published."""
    with pytest.raises(ConfigError, match="dtype: a run that resumes needs each tensor's own"):
        ExportConfig("torchtitan", dtype="bfloat16")
    run = _Run(seed=1)
    run.position = object()  # type: ignore[assignment]
    with run.manager(tmp_path, save=None, export=(ExportConfig("torchtitan"),)) as manager:
        manager.load()
        run.train(1)
        with pytest.raises(ExportError, match=r"not plain data: dataloader\.dp_rank_0"):
            manager.export(1, last_step=True)
    assert not (tmp_path / "exports/step-1").exists()


def test_a_run_goes_on_from_a_step_of_another_run(tmp_path: Path) -> None:
    """Weights, moments, schedule, counters and data position are those of the step that is named."""
    first, second = _Run(seed=1), _Run(seed=2)
    with first.manager(tmp_path / "first") as manager:
        manager.load()
        first.train(2)
        manager.save(2)
        first.train(1)
    step = tmp_path / "first/checkpoints/step-2"
    source = _from(step)
    with second.manager(tmp_path / "second", **source) as manager:
        assert manager.load().step == 2
        second.train(1)
        manager.save(3)
    _same(first, second)
    assert world.load(_Run(seed=3).manager(tmp_path / "second", **source)).step == 3
    before = InitialLoadConfig(str(tmp_path / "second/checkpoints/step-3"))
    world.load_fails(
        _Run(seed=3).manager(tmp_path / "third", initial_load=(before, *source["initial_load"])),
        LoadMismatchError,
        "holds a whole model: leave the sources before it out",
    )
    step.rename(tmp_path / "copy")
    moved = _from(tmp_path / "copy")
    world.load_fails(_Run(seed=3).manager(tmp_path / "third", **moved), CheckpointError, "is not named step-N")


def test_a_run_goes_on_in_torchtitans_own_folder(tmp_path: Path) -> None:
    """The newest step is taken, whoever saved it; torchtitan's folders stay as they are."""
    for step in (2, 3):
        saved = _saved(tmp_path / "checkpoints" / f"step-{step}", step)
    run = _Run(seed=2)
    with run.manager(tmp_path) as manager:
        assert manager.load().step == 3
        _same(saved, run)
        run.train(1)
        manager.save(4)
    again = _Run(seed=3)
    assert world.load(again.manager(tmp_path)).step == 4
    _same(run, again)
    assert (tmp_path / "checkpoints/step-2/.metadata").is_file()


def test_a_step_that_was_not_finished_is_named_before_the_first_step(tmp_path: Path) -> None:
    """A save of step 3 would find torchtitan's unfinished folder in its way, so nothing is trained."""
    for step in (2, 3):
        _saved(tmp_path / "checkpoints" / f"step-{step}", step)
    (tmp_path / "checkpoints/step-3/.metadata").unlink()
    world.load_fails(
        _Run(seed=2).manager(tmp_path), CommitConflictError, "torchtitan's step 2, and step-3 would be in the way"
    )


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("lr_scheduler.", 'the checkpoint has no state for: lr_scheduler.*exclude = ."lr_scheduler"'),
        ("train_state.", 'the checkpoint has no state for: states.*exclude = ."states"'),
        ("dataloader.dp_rank_0", "its data position lacks dataloader.dp_rank_0"),
        ("0.bias", "1 missing: 0.bias"),
        ("optimizer.param_groups.0.", "none of its .* was trained there"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, lost: str, complaint: str) -> None:
    """Nothing of a folder that does not fit is loaded in part."""
    saved = _Run(seed=1)
    saved.train(3)
    flat = {name: value for name, value in saved.flat().items() if not name.startswith(lost)}
    if lost.startswith("optimizer"):
        flat = {name: value for name, value in flat.items() if not name.startswith("optimizer.param_groups")}
    dcp.save(flat, checkpoint_id=tmp_path / "step-3", no_dist=True)
    run = _Run(seed=2)
    before = world.whole(run.model.state_dict())
    source = _from(tmp_path / "step-3")
    world.load_fails(run.manager(tmp_path, **source), CheckpointError, complaint)
    assert same(run.model.state_dict(), before)


def test_groups_that_were_split_otherwise_are_refused(tmp_path: Path) -> None:
    """A live group whose parameters had several values of a hyperparameter is no group of the saved run."""
    _saved(tmp_path / "step-3")
    run = _Run(seed=2)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    source = _from(tmp_path / "step-3")
    world.load_fails(
        run.manager(tmp_path, **source),
        LoadMismatchError,
        "its parameters were in 2 groups with other hyperparameters",
    )
    exclude = ResumeConfig(exclude=("optimizer",))
    assert world.load(run.manager(tmp_path, **source, resume=exclude)).step == 3
    assert not run.optimizer.state


def test_an_optimizer_that_has_no_parameter_yet_is_none_of_the_folders(tmp_path: Path) -> None:
    """A library makes a group for weights without decay that may be empty, and a stage may have none at all."""
    saved = _saved(tmp_path / "step-3")
    run = _Run(seed=2)
    idle = torch.optim.SGD([{"params": []}], lr=0.5)
    manager = world.manager(
        tmp_path / "ours", run.model, run.optimizer, idle, **_from(tmp_path / "step-3"),
        resume=ResumeConfig(exclude=("lr_scheduler", "dataloader", "states")),
    )  # fmt: skip
    assert world.load(manager).step == 3
    assert same(run.model.state_dict(), saved.model.state_dict()) and idle.param_groups[0]["lr"] == 0.5


class _Counting(nn.Linear):
    """A module with extra state."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_a_folder_gives_the_model_to_a_run_that_leaves_it_out_of_its_own_steps(tmp_path: Path) -> None:
    """Its tensors and the extra state of its modules."""
    saved, model = _Counting(2, 2), _Counting(2, 2)
    saved.count = 7
    flat = {**saved.state_dict(), "lr_scheduler.last_epoch": 3, "train_state.step": 3}
    dcp.save(flat, checkpoint_id=tmp_path / "checkpoints/step-3", no_dist=True)
    components: Any = ("optimizer", "rng")
    run = world.manager(tmp_path, model, components=components, external_weights=lambda event: None)
    assert world.load(run).step == 3
    assert torch.equal(model.weight, saved.weight) and model.count == 7
