"""The state that a run's objects hand over and get back: of every shape, schedulers, generators, data position."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

from tests import world
from titan_ckpt import CheckpointManager, InitialLoadConfig, ResumeConfig
from titan_ckpt.errors import LoadMismatchError, StateEncodingError
from titan_ckpt.geometry.nested import give_tensors, take_tensors


class Holder:
    """A state that is whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict


def manager(folder: Path, model: nn.Module | None = None, **given: Any) -> CheckpointManager:
    optimizers = given.pop("optimizers", ())
    return world.manager(folder, model or nn.Linear(2, 2), *optimizers, **given)


def there_and_back(folder: Path, value: Any) -> Any:
    world.save(manager(folder, states={"it": Holder(value)}))
    found = Holder()
    world.load(manager(folder, states={"it": found}))
    return found.value


def flat(value: Any) -> Any:
    """Return nested state in a form that == compares bit for bit, types included."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, list(value.shape), value.tolist())
    if isinstance(value, dict):
        return (type(value), [(k, flat(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), [flat(v) for v in value])
    return (type(value), value)


NESTED = {
    "lists": {"history": [torch.arange(3.0), (torch.ones(2, 2), None)], "queue": deque([torch.ones(1)], maxlen=4)},
    "ordered": OrderedDict(b=torch.ones(2), a=torch.zeros(2)),
    "defaultdict": {"counts": defaultdict(int, {"x": 3})},
    "empty": {"a": {}, "b": [], "c": torch.empty(0, 4), "d": ()},
    "dots": {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}},
    "keys": {0: torch.tensor([1.0]), "0": torch.tensor([2.0]), (1, 2): torch.tensor([3.0]), None: 4},
    "dtypes": {
        "c": torch.tensor([1 + 2j]),
        "i": torch.tensor([2**40]),
        "b": torch.tensor([True]),
        "n": torch.tensor(3),
    },
    "nothing": {},
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_state_comes_back_with_its_types(tmp_path: Path, name: str) -> None:
    """Tensors at any depth, odd keys, empty containers: the same values of the same types."""
    assert flat(there_and_back(tmp_path, copy.deepcopy(NESTED[name]))) == flat(NESTED[name])


def test_large_tensors_in_lists_are_written_as_tensors(tmp_path: Path) -> None:
    """A tensor that is too large for JSON is no error, however deep it is."""
    big = torch.randn(5 << 20)
    back = there_and_back(tmp_path, {"deep": [OrderedDict(weights=big)]})
    assert torch.equal(back["deep"][0]["weights"], big)
    assert (tmp_path / "checkpoints/step-1/state.json").stat().st_size < 10_000


def test_a_state_name_with_a_dot_keeps_its_tensors(tmp_path: Path) -> None:
    """Names are the user's; nothing is parsed out of them."""
    value = {"weight": torch.arange(4.0)}
    world.save(manager(tmp_path, states={"ema.model": Holder(value)}))
    other = {"ema.model": Holder({"weight": torch.zeros(4)})}
    world.load(manager(tmp_path, states=other))
    assert torch.equal(other["ema.model"].value["weight"], value["weight"])


def test_the_placeholder_cannot_be_forged() -> None:
    """A state that looks like a tensor's placeholder is refused, not mixed up with one."""
    with pytest.raises(StateEncodingError, match=r"state\.a: '\$tensor_file' cannot be a key"):
        take_tensors({"a": {"$tensor_file": "model.weight"}}, "state", {})


def test_taking_changes_nothing_that_was_given() -> None:
    """The user's own containers stay as they are; giving puts equal ones together."""
    value: dict[str, Any] = {"a": [torch.ones(2)], "b": OrderedDict(c=torch.zeros(1))}
    before = copy.copy(value)
    tensors: dict[str, torch.Tensor] = {}
    taken = take_tensors(value, "s", tensors)
    assert value["a"] is before["a"] and isinstance(value["a"][0], torch.Tensor)
    assert flat(give_tensors(taken, tensors)) == flat(value)


def test_an_averaged_model_is_a_state(tmp_path: Path) -> None:
    """EMA of a model: parameters, buffers and its counter."""
    ema = AveragedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), use_buffers=True)
    ema.update_parameters(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    world.save(manager(tmp_path, states={"ema": ema}))
    other = AveragedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), use_buffers=True)
    world.load(manager(tmp_path, states={"ema": other}))
    assert flat(dict(other.state_dict())) == flat(dict(ema.state_dict()))


@pytest.mark.parametrize("scheduled", [False, True])
def test_settings_of_the_optimizer_that_a_resume_replaces_are_one_log_line(
    tmp_path: Path, scheduled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint's learning rate and betas go on, and the log says instead of which, and how not to."""
    model = nn.Linear(2, 2)
    world.save(manager(tmp_path, model, **objects(model, scheduled, lr=0.1, betas=(0.8, 0.9))))
    model = nn.Linear(2, 2)
    world.load(
        manager(tmp_path, model, **(resumed := objects(model, scheduled, lr=0.3, weight_decay=0.5, foreach=False)))
    )
    assert resumed["optimizers"][0].param_groups[0]["lr"] == 0.1
    lines = [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]
    rate, others = "lr = 0.1 and not 0.3", "betas = (0.8, 0.9) and not (0.9, 0.999); weight_decay = 0.01 and not 0.5"
    said = 'the {} goes on with the checkpoint\'s {}; with checkpoint.resume.exclude = ["{}"] it starts afresh with'
    said += " this run's"
    if scheduled:
        assert lines == [
            said.format("optimizer", others, "optimizer"), said.format("lr scheduler", rate, "lr_scheduler")
        ]  # fmt: skip
    else:
        assert lines == [said.format("optimizer", f"{rate}; {others}", "optimizer")]


def objects(model: nn.Module, scheduled: bool, **settings: Any) -> dict[str, Any]:
    """Return an optimizer, and a schedule that falls with each step."""
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    return {
        "optimizers": [optimizer],
        "lr_schedulers": [schedules.ExponentialLR(optimizer, 0.5)] if scheduled else [],
    }


def steps(objects: dict[str, Any], *metrics: float) -> list[float]:
    """Return the rates of two steps."""
    found = []
    for _ in range(2):
        found.append(objects["optimizers"][0].param_groups[0]["lr"])
        objects["optimizers"][0].step()
        objects["lr_schedulers"][0].step(*metrics)
    return found


class Warmup(schedules.LRScheduler):
    """A schedule of the user's own, with one setting."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int) -> None:
        self.warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * min(1.0, (self.last_epoch + 1) / self.warmup) for rate in self.base_lrs]


class Falling:
    """A factor that is an object, so that torch stores its attributes."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


class OwnSchedule:
    """An object of the user's own that is no LRScheduler, and has the state of those that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        self.held = schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer), schedules.StepLR(optimizer, 2)], [2]
        )
        self.step, self.state_dict = self.held.step, self.held.state_dict
        self.load_state_dict = self.held.load_state_dict


CHANGED_SCHEDULES: dict[str, tuple[Callable[[Any, Any], Any], Any, Any, str]] = {
    "lambda": (lambda o, v: schedules.LambdaLR(o, Falling(v)), 0.5, 0.9,
               "lr_lambda = [{'factor': 0.5}] and not [{'factor': 0.9}]"),
    "step": (schedules.StepLR, 2, 3, "step_size = 2 and not 3"),
    "milestones": (schedules.MultiStepLR, [3, 5], [3, 9], "milestones = [3, 5] and not [3, 9]"),
    "cosine": (schedules.CosineAnnealingLR, 5, 9, "T_max = 5 and not 9"),
    "restarts": (schedules.CosineAnnealingWarmRestarts, 3, 4, "T_0 = 3 and not 4"),
    "polynomial": (lambda o, v: schedules.PolynomialLR(o, power=v), 1.0, 2.0, "power = 1.0 and not 2.0"),
    "plateau": (lambda o, v: schedules.ReduceLROnPlateau(o, patience=v), 0, 7, "patience = 0 and not 7"),
    "plateau_floor": (lambda o, v: schedules.ReduceLROnPlateau(o, min_lr=[v]), 0.01, 0.02,
                      "min_lr = 0.01 and not 0.02"),
    "cyclic": (lambda o, v: schedules.CyclicLR(o, 0.1, v), 0.2, 0.4, "max_lr = 0.2 and not 0.4"),
    "cyclic_length": (lambda o, v: schedules.CyclicLR(o, 0.1, 0.2, step_size_up=v), 2, 4,
                      "steps of a cycle = 4.0 and not 8.0"),
    "one_cycle": (lambda o, v: schedules.OneCycleLR(o, v, total_steps=20, div_factor=10), 0.1, 0.5,
                  "initial_lr = 0.01 and not 0.05; max_lr = 0.1 and not 0.5; min_lr = 1e-06 and not 5e-06"),
    "one_cycle_rise": (lambda o, v: schedules.OneCycleLR(o, 0.1, total_steps=20, pct_start=v), 0.3, 0.5,
                       "last steps of its phases = [5.0, 19] and not [9.0, 19]"),
    "one_cycle_length": (lambda o, v: schedules.OneCycleLR(o, 0.1, total_steps=v, pct_start=2 / v), 20, 40,
                         "total_steps = 20 and not 40; last steps of its phases = [1.0, 19] and not [1.0, 39]"),
    "chained": (lambda o, v: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.ExponentialLR(o, v)]),
                0.9, 0.8, "gamma = 0.9 and not 0.8"),
    "sequential": (lambda o, v: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.StepLR(o, 2)], [v]), 2, 3,
                   "milestones = [2] and not [3]"),
    "swa": (SWALR, 0.05, 0.01, "swa_lr = 0.05 and not 0.01"),
    "own": (Warmup, 4, 6, "warmup = 4 and not 6"),
    "no_scheduler_of_torch": (OwnSchedule, 0.1, 0.2, "lr = 0.1 and not 0.2"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # a SequentialLR warns about its own calls
@pytest.mark.parametrize("how", ["changed", "same", "afresh"])
@pytest.mark.parametrize("name", CHANGED_SCHEDULES)
def test_settings_of_a_schedule_that_a_resume_replaces_are_one_log_line(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with the checkpoint's, and the line says what differs; one that is left out starts as in a new run."""
    build, before, now, line = CHANGED_SCHEDULES[name]
    now = before if how == "same" else now

    def run(value: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizers": [optimizer], "lr_schedulers": [build(optimizer, value)]}

    def rates(objects: dict[str, Any]) -> list[float]:
        return [*steps(objects, *([2.0] if "plateau" in name else [])), objects["optimizers"][0].param_groups[0]["lr"]]

    with manager(tmp_path, **(saved := run(before))) as m:
        rates(saved)
        m.save(1)
    resumed = run(now)
    world.load(manager(tmp_path, resume=ResumeConfig(exclude=("lr_scheduler",) if how == "afresh" else ()), **resumed))
    lines = [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]
    assert [text.partition("; with checkpoint.resume")[0] for text in lines] == (
        [f"the lr scheduler goes on with the checkpoint's {line}"] if how == "changed" else []
    )
    assert rates(resumed) == rates(run(now) if how == "afresh" else saved)


def test_a_setting_of_another_kind_of_number_is_no_other_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that computes a rate or a length with numpy goes on as one that writes the number; nothing is said."""

    def run(kind: Any, number: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=kind(0.1), momentum=kind(0.5))
        schedule = schedules.CosineAnnealingLR(optimizer, number(5), eta_min=kind(0.01))
        return {"model": model, "optimizers": [optimizer], "lr_schedulers": [schedule]}

    world.save(manager(tmp_path, **run(float, int)))
    world.load(manager(tmp_path, **run(np.float64, np.int64)))
    assert not [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]


@pytest.mark.parametrize("rate", [1.0, 0.01, 3.0])
def test_a_plateau_says_a_rate_to_which_it_cannot_have_lowered_this_runs(
    tmp_path: Path, rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It stores no rate that it started from: 0.01 may be 1 after two reductions, and is not 3 after any."""

    def run(rate: float) -> dict[str, Any]:
        made = objects(model := nn.Linear(2, 2), False, lr=rate)
        plateau = schedules.ReduceLROnPlateau(made["optimizers"][0], patience=0)
        return {"model": model, **made, "lr_schedulers": [plateau]}

    with manager(tmp_path, **(saved := run(1.0))) as m:
        for loss in (1.0, 2.0, 3.0):
            saved["lr_schedulers"][0].step(loss)
        m.save(1)
    world.load(manager(tmp_path, **run(rate)))
    said = "the lr scheduler goes on with the checkpoint's lr = 0.010000000000000002 and not 3.0"
    assert (said in caplog.text) == (rate == 3.0) and ("goes on" in caplog.text) == (rate == 3.0)


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    """SGD would keep AdamW's moments beside none of its own; one error says the settings, and how to start afresh."""
    model = nn.Linear(2, 2)
    world.save(manager(tmp_path, model, **objects(model, True, lr=0.1)))
    model = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with manager(tmp_path, model, optimizers=[sgd]) as m, pytest.raises(LoadMismatchError, match="momentum") as raised:
        m.load()
    assert "SGD has the settings dampening, momentum, nesterov, and the checkpoint's optimizer amsgrad, betas" in str(
        raised.value
    )
    assert 'checkpoint.resume.exclude = ["optimizer"]' in str(raised.value)
    assert not sgd.state and all(map(torch.equal, before, model.parameters()))


def test_adamw_does_not_go_on_as_adam(tmp_path: Path) -> None:
    """Both have the same settings and state; Adam's would let AdamW add the decay to the gradient, in silence."""
    model = nn.Linear(2, 2)
    world.save(manager(tmp_path, model, optimizers=[torch.optim.Adam(model.parameters(), weight_decay=0.1)]))
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    said = "AdamW has decoupled_weight_decay = True, and the checkpoint's optimizer False"
    world.load_fails(manager(tmp_path, model, optimizers=[adamw]), LoadMismatchError, said)
    assert adamw.param_groups[0]["decoupled_weight_decay"]


class Sign(torch.optim.Optimizer):
    """Has the same settings as `Mean`, so that the class alone tells the two apart."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Mean(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class OwnAdamW(torch.optim.AdamW):
    pass


class FurtherAdamW(OwnAdamW):
    pass


class OtherAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("before", "now", "warns"),
    [
        (torch.optim.Adam, torch.optim.RAdam, True),
        (Mean, Sign, True),
        (OwnAdamW, OtherAdamW, True),
        (torch.optim.AdamW, torch.optim.AdamW, False),
        (torch.optim.AdamW, FurtherAdamW, False),
        (FurtherAdamW, torch.optim.AdamW, False),
    ],
)
def test_state_of_another_class_with_the_same_settings_is_one_warning(
    tmp_path: Path, before: Any, now: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The names of classes say what no setting does; a class and one derived from it are the same optimizer."""

    def run(kind: Any) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        parts = [[{"params": [model[0].weight]}, {"params": [model[0].bias]}], [*model[1:].parameters()]]
        return {"model": model, "optimizers": [kind(part) for part in parts]}

    world.save(manager(tmp_path, **run(before)))
    assert world.load(manager(tmp_path, **run(now))).step == 1
    assert world.load(manager(tmp_path, resume=ResumeConfig(exclude=("optimizer",)), **run(now))).step == 1
    said = (
        f"the checkpoint's optimizer is of class {before.__name__}, and this run's of class {now.__name__}, which goes "
        f"on with that state as it is. If these are not two names of one optimizer, start it afresh: "
        'checkpoint.resume.exclude = ["optimizer"]'
    )
    lines = [record.getMessage() for record in caplog.records if "of class" in record.getMessage()]
    assert lines == ([said] if warns else [])


@pytest.mark.parametrize("new", [0, 1, 2])
def test_parameters_that_join_a_group_are_named_once(
    tmp_path: Path, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They start without state; the groups are compared several times in a load, and the log says it once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [*model.parameters()]
    world.save(manager(tmp_path, model, optimizers=[torch.optim.AdamW(parameters[new:])]))
    world.load(manager(tmp_path, model, optimizers=[torch.optim.AdamW(parameters)]))
    said = ["1 parameter starts without optimizer state: 0.weight"]
    said.append("2 parameters start without optimizer state: 0.weight, 0.bias")
    assert [text for text in caplog.messages if "without optimizer state" in text] == said[new - 1 : new]


@pytest.mark.parametrize("left_out", ["optimizer", "lr_scheduler"])
def test_a_schedule_that_starts_afresh_does_so_from_this_runs_rate(
    tmp_path: Path, left_out: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that computes each rate from the one before. A schedule that goes on says so without the optimizer."""
    model = nn.Linear(2, 2)
    with manager(tmp_path, model, **(saved := objects(model, True, lr=0.1))) as m:
        steps(saved)
        m.save(2)
    model = nn.Linear(2, 2)
    resume = ResumeConfig(exclude=(left_out,))
    world.load(manager(tmp_path, model, resume=resume, **(resumed := objects(model, True, lr=0.3))))
    lines = [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]
    if left_out == "lr_scheduler":
        assert steps(resumed) == [0.3, 0.15]
        assert lines == []
    else:
        assert [line.partition(";")[0] for line in lines] == [
            "the lr scheduler goes on with the checkpoint's lr = 0.1 and not 0.3"
        ]


def test_a_plateau_that_starts_afresh_does_so_from_this_runs_rate(tmp_path: Path) -> None:
    """It has no rates that it starts from, and lowers the optimizer's own."""

    def run(rate: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        made = {"model": model, **objects(model, False, lr=rate)}
        plateau = schedules.ReduceLROnPlateau(made["optimizers"][0], factor=0.1, patience=0)
        for loss in (1.0, 2.0):
            plateau.step(loss)
        return {**made, "lr_schedulers": [plateau]}

    world.save(manager(tmp_path, **run(0.5)))
    resumed = run(3.0)
    world.load(manager(tmp_path, resume=ResumeConfig(exclude=("lr_scheduler",)), **resumed))
    assert resumed["optimizers"][0].param_groups[0]["lr"] == pytest.approx(0.3)


@pytest.mark.parametrize("rates", [0.1, None], ids=str)
def test_a_scheduler_of_another_library_may_name_its_state_as_torch_does(tmp_path: Path, rates: float | None) -> None:
    """The log line on rates is for those of torch, and no load fails for it."""
    saved, resumed = Holder({"base_lrs": rates, "step": 3}), Holder({"base_lrs": rates, "step": 0})
    world.save(manager(tmp_path, lr_schedulers=[saved]))
    world.load(manager(tmp_path, lr_schedulers=[resumed]))
    assert resumed.value["step"] == 3


def test_schedulers_of_more_stages_take_the_state_they_all_had(tmp_path: Path) -> None:
    """Two equal schedulers resume as one and as three; two that differ do not."""
    world.save(manager(tmp_path / "same", lr_schedulers=[Holder({"n": 1}), Holder({"n": 1})]))
    for count in (1, 3):
        holders = [Holder() for _ in range(count)]
        world.load(manager(tmp_path / "same", lr_schedulers=holders))
        assert [h.value for h in holders] == [{"n": 1}] * count
    world.save(manager(tmp_path / "other", lr_schedulers=[Holder({"n": 1}), Holder({"n": 2})]))
    world.load_fails(manager(tmp_path / "other", lr_schedulers=[Holder()]), LoadMismatchError, "lr_sched")


@pytest.mark.parametrize("name", ["states", "a.states.b", ""])
def test_a_state_that_is_lacking_is_named_whatever_its_name(tmp_path: Path, name: str) -> None:
    """Also one that is called as the component is."""
    world.save(manager(tmp_path, nn.Linear(2, 2)))
    lacking = manager(tmp_path, nn.Linear(2, 2), states={name: world.Value()})
    assert f"no state for: states ('{name}')." in world.load_fails(lacking, LoadMismatchError)


def test_a_component_that_is_lacking_is_named_before_anything_is_touched(tmp_path: Path) -> None:
    """A run with a scheduler and a state over a step without them: one error, the weights as they were."""
    world.save(manager(tmp_path, torch.nn.Linear(2, 2)))
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    world.load_fails(
        manager(tmp_path, model, lr_schedulers=[Holder()], states={"it": Holder()}),
        LoadMismatchError,
        r'lr_scheduler, states.*exclude = \["lr_scheduler", "states"\]',
    )
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("component", ["model", "optimizer", "lr_scheduler", "dataloader", "rng", "states"])
def test_each_component_can_be_left_out(tmp_path: Path, component: Any) -> None:
    """An excluded component stays as this run made it, extra state of modules included; everything else comes back."""

    class Counts(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return torch.tensor([self.count])

        def set_extra_state(self, state: Any) -> None:
            self.count = int(state)

    def build(value: int) -> tuple[Counts, dict[str, Any]]:
        torch.manual_seed(value)
        model = Counts(2, 2)
        model.count = value
        optimizer = torch.optim.SGD(model.parameters(), lr=value)
        return model, {
            "optimizers": [optimizer],
            "lr_schedulers": [Holder(value)],
            "dataloader": Holder(value),
            "states": {"it": Holder(value)},
        }

    def values(model: Counts, objects: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": [model.weight.tolist(), model.count],
            "optimizer": objects["optimizers"][0].param_groups[0]["lr"],
            "lr_scheduler": objects["lr_schedulers"][0].value,
            "dataloader": objects["dataloader"].value,
            "states": objects["states"]["it"].value,
            "rng": torch.get_rng_state().tolist(),
        }

    model, objects = build(1)
    world.save(manager(tmp_path, model, **objects))
    saved = values(model, objects)
    model, objects = build(2)
    own = values(model, objects)
    world.load(manager(tmp_path, model, resume=ResumeConfig(exclude=(component,)), **objects))
    assert values(model, objects) == {**saved, component: own[component]}


def test_extra_state_that_is_a_tensor_reaches_its_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a fresh tensor each time it is asked for: filling it would fill nothing. An initial load leaves it out."""

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor([self.scale])

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.scale = state.item()

    world.save(manager(tmp_path, nn.Sequential(Scaled(0.5), nn.Linear(2, 2))))
    other = nn.Sequential(Scaled(0.0), nn.Linear(2, 2))
    world.load(manager(tmp_path, other))
    assert other[0].scale == 0.5
    more = nn.Sequential(Scaled(0.0), nn.Linear(2, 2), Scaled(0.0))
    world.load_fails(manager(tmp_path, more), LoadMismatchError, r"extra state of 1 .*2\._extra_state")
    source = InitialLoadConfig(str(tmp_path / "checkpoints/step-1"))
    weights = nn.Sequential(Scaled(0.25), nn.Linear(2, 2))
    world.load(manager(tmp_path / "fresh", weights, initial_load=(source,)))
    assert weights[0].scale == 0.25
    assert "extra state of 1 module stays as the model was built: 0._extra_state" in caplog.text


def test_a_dataloader_that_draws_when_asked_for_its_state_disturbs_nothing(tmp_path: Path) -> None:
    """StatefulDataLoader makes its iterator then: saved and restored generators stand where the run goes on."""

    class Loader(Holder):
        def state_dict(self) -> Any:
            torch.rand(1)
            return {"n": 1}

    with manager(tmp_path, dataloader=Loader()) as m:
        m.save(1)
        after = torch.get_rng_state()
    with manager(tmp_path, dataloader=Loader()) as m:
        m.load()
        assert torch.equal(torch.get_rng_state(), after)
