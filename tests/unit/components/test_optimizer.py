"""Optimizer state by name: what is stored once, what is a tensor, and what comes back."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.world import step_on
from titan_ckpt.components.items.optimizers import Optimizers
from titan_ckpt.components.optimizer import OptimizerState, _placed, misfit
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.geometry.chunks import info_of
from titan_ckpt.weights.wrapper import ModelWrapper


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        step_on(model, optimizer, torch.randn(3, 4))
    return model, optimizer


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> OptimizerState:
    return OptimizerState(optimizers, ModelWrapper([model]).parameter_names())


def test_step_counts_that_differ_stay_tensors() -> None:
    """A parameter that joined later keeps its own count."""
    model, optimizer = trained()
    optimizer.state[model[0].weight]["step"] = torch.tensor(1.0)  # type: ignore[index]
    tensors, [[group]] = state_of(model, optimizer).split()
    assert tensors["optimizer.0.weight.step"].item() == 1
    assert tensors["optimizer.1.bias.step"].item() == 3
    assert "step" not in group["shared"]


def test_a_parameter_that_was_never_stepped_has_no_state() -> None:
    """It comes back without state, so that the optimizer initializes it at its first step."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tensors, groups = state_of(model, optimizer).split()
    fresh = torch.optim.AdamW(model.parameters())
    target = state_of(model, fresh)
    target.apply(target.destinations({k: info_of(v) for k, v in tensors.items()})[0], groups)
    assert model[0].weight in fresh.state
    assert model[1].weight not in fresh.state
    model(torch.randn(3, 4)).sum().backward()
    fresh.step()
    target.apply(target.destinations({k: info_of(v) for k, v in tensors.items()})[0], groups)
    assert model[1].weight not in fresh.state, "what a rollback undoes is gone"


def test_state_of_a_parameter_that_is_not_trained_here_is_named() -> None:
    """A checkpoint that trained more than this run does not load silently."""
    model, optimizer = trained()
    tensors, _ = state_of(model, optimizer).split()
    fewer = torch.optim.AdamW(model[0].parameters())
    _, strangers = state_of(model, fewer).destinations({k: info_of(v) for k, v in tensors.items()})
    assert {key.rpartition(".")[0] for key in strangers} == {"optimizer.1.weight", "optimizer.1.bias"}
    with pytest.raises(LoadMismatchError, match=r"2 trained there and not here: 1\.bias, 1\.weight.*exclude"):
        raise misfit(strangers)


def test_groups_find_each_other_by_their_parameters() -> None:
    """Groups in another order get the hyperparameters of the group that held their parameters."""
    model = layers()
    one, two = ({"params": list(model[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 1))
    _, groups = state_of(model, torch.optim.AdamW([one, two])).split()
    swapped = torch.optim.AdamW([{"params": list(model[i].parameters()), "lr": 9.0} for i in (1, 0)])
    state_of(model, swapped).apply({}, groups)
    assert [g["lr"] for g in swapped.param_groups] == [0.2, 0.1]


EVERY_KIND: dict[str, Any] = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "adafactor": lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.numel()], lr=1e-2),
    "tensor_lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=1e-2, history_size=3),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "group_each": lambda m: torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(m.parameters())]
    ),
    "named": lambda m: torch.optim.AdamW(m.named_parameters()),
}


class Scales(nn.Module):
    """Has a scalar parameter, an empty one and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale + self.empty.sum()
        return out


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(count):
        x = torch.randn(3, 4)

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def through_files(source: OptimizerState, target: OptimizerState) -> None:
    """Take state over as a checkpoint does: JSON for what is no tensor, other memory for what is."""
    tensors, groups = source.split()
    text = typed_json.dumps(groups)
    destinations, strangers = target.destinations({key: info_of(value) for key, value in tensors.items()}, groups)
    assert not strangers
    for key, value in destinations.items():
        value.copy_(tensors[key])
    target.apply(destinations, typed_json.loads(text))


def flat(value: Any) -> Any:
    """Return nested state in a form that == compares bit for bit, types included."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, list(value.shape), value.tolist())
    if isinstance(value, dict):
        return {k: flat(v) for k, v in value.items()}
    return [flat(v) for v in value] if isinstance(value, list) else (type(value), value)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_optimizer_of_torch_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    """All state comes back with its types, scalar, empty and unreached parameters included, and two steps agree."""
    model, other = Scales(), Scales()
    optimizer, restored = EVERY_KIND[name](model), EVERY_KIND[name](other)
    steps(model, optimizer, 3, seed=1)
    other.load_state_dict(model.state_dict())
    through_files(state_of(model, optimizer), state_of(other, restored))
    a, b = optimizer.state_dict(), restored.state_dict()
    assert flat(dict(a["state"])) == flat(dict(b["state"]))
    assert flat(a["param_groups"]) == flat(b["param_groups"])
    steps(model, optimizer, 2, seed=2)
    steps(other, restored, 2, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_step_aliases_nothing_that_was_split() -> None:
    """A learning rate that is a tensor is changed in place by its scheduler; what was taken stays."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    _, [[group]] = state_of(model, optimizer).split()
    optimizer.param_groups[0]["lr"].fill_(9.0)
    assert group["hyperparameters"]["lr"] == 0.5


def test_a_learning_rate_keeps_the_kind_this_run_chose() -> None:
    """A float from the checkpoint goes into this run's tensor, and the other way round."""
    model = nn.Linear(2, 2)
    as_float = torch.optim.AdamW(model.parameters(), lr=0.25)
    as_tensor = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    _, floats = state_of(model, as_float).split()
    _, tensors = state_of(model, as_tensor).split()
    state_of(model, as_tensor).apply({}, floats)
    state_of(model, as_float).apply({}, tensors)
    assert torch.equal(as_tensor.param_groups[0]["lr"], torch.tensor(0.25))
    assert as_float.param_groups[0]["lr"] == 0.5


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    """Their states would overwrite each other under one name."""
    model = nn.Linear(2, 2)
    with pytest.raises(LoadMismatchError, match=r"weight is trained by two optimizers"):
        state_of(model, torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters()))


def test_groups_of_pipeline_stages_become_one() -> None:
    """Each stage lists its own parameters: one optimizer over all gets them back, and so does a stage."""
    model = layers()
    stages = [torch.optim.AdamW(model[i].parameters(), lr=0.3, betas=(0.8, 0.9)) for i in (0, 1)]
    model(torch.randn(3, 4)).sum().backward()
    for stage in stages:
        stage.step()
    merged = Optimizers.merge([state_of(model, stage).split()[1] for stage in stages])
    assert [len(groups) for groups in merged] == [1]
    whole = torch.optim.AdamW(model.parameters())
    state_of(model, whole).apply({}, merged)
    assert whole.param_groups[0]["lr"] == 0.3
    assert {s["step"].item() for s in whole.state.values()} == {1.0}
    last = torch.optim.AdamW(model[1].parameters())
    state_of(model, last).apply({}, merged)
    assert last.param_groups[0]["betas"] == (0.8, 0.9)


def test_stages_with_other_hyperparameters_do_not_become_one() -> None:
    """One group cannot have two learning rates: named, and nothing is changed."""
    model = layers()
    stages = [torch.optim.SGD(model[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 1)]
    merged = Optimizers.merge([state_of(model, stage).split()[1] for stage in stages])
    whole = torch.optim.SGD(model.parameters(), lr=7.0)
    with pytest.raises(LoadMismatchError, match="in 2 groups with other hyperparameters"):
        state_of(model, whole).apply({}, merged)
    assert whole.param_groups[0]["lr"] == 7.0
    second = torch.optim.SGD(model[1].parameters(), lr=7.0)
    state_of(model, second).apply({}, merged)
    assert second.param_groups[0]["lr"] == 0.2


def test_stages_whose_optimizers_are_of_other_classes_do_not_become_one() -> None:
    """Each stage's parameters keep the class that trained them, and a class is named once for all its groups."""
    one, other = (type(name, (torch.optim.SGD,), {}) for name in ("One", "Other"))
    model = layers()
    stages = [kind(model[i].parameters(), lr=0.1) for i, kind in enumerate([one, other])]
    merged = Optimizers.merge([state_of(model, stage).split()[1] for stage in stages])
    assert [group["classes"] for group in merged[0]] == [["One", "SGD"], ["Other", "SGD"]]
    assert state_of(model, torch.optim.SGD(model.parameters())).replaced_classes(merged) == []
    [line] = state_of(model, one(model.parameters())).replaced_classes([*merged, *merged])
    assert line.startswith("the checkpoint's optimizer is of class Other, and this run's of class One, ")


def test_a_group_that_names_no_class_is_taken_over_in_silence() -> None:
    """Groups of torchtitan's folders and of earlier steps name none."""
    model = nn.Linear(2, 2)
    _, [[group]] = state_of(model, torch.optim.Adam(model.parameters())).split()
    state = state_of(model, torch.optim.RAdam(model.parameters()))
    assert len(state.replaced_classes([[group]])) == 1
    del group["classes"]
    assert state.replaced_classes([[group]]) == []


def test_a_group_that_was_not_trained_is_named() -> None:
    """Parameters that joined in a group of their own have no hyperparameters there."""
    model = layers()
    _, groups = state_of(model, torch.optim.SGD(model[0].parameters())).split()
    more = torch.optim.SGD([{"params": list(model[i].parameters())} for i in (0, 1)])
    with pytest.raises(LoadMismatchError, match=r"group 1 of optimizer 0: none of its 2 .* 1\.weight"):
        state_of(model, more).apply({}, groups)


def test_a_tensor_that_a_new_optimizer_shares_between_parameters_is_filled_once() -> None:
    """A constructor may give all parameters one tensor, which the steps replace; each gets its own stored state."""
    parameters = {nn.Parameter(torch.ones(2)): f"p{i}" for i in range(3)}
    saved, new = torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1)
    zeros, zero = torch.zeros(2), torch.zeros(())
    for i, parameter in enumerate(parameters):
        saved.state[parameter] = {"mean": torch.full((2,), float(i)), "count": torch.tensor(float(i))}
        new.state[parameter] = {"mean": zeros, "count": zero}
    through_files(OptimizerState([saved], parameters), OptimizerState([new], parameters))
    states = [new.state[parameter] for parameter in parameters]
    assert [state["mean"].tolist() for state in states] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert [state["count"].item() for state in states] == [0.0, 1.0, 2.0]


def test_state_that_a_new_optimizer_shares_with_its_parameter_is_not_read_into_the_parameter() -> None:
    """A constructor may take the parameter itself for its anchor, which the steps replace."""
    parameter = nn.Parameter(torch.ones(2))
    saved, new = torch.optim.SGD([parameter], lr=0.1), torch.optim.SGD([parameter], lr=0.1)
    saved.state[parameter] = {"anchor": torch.full((2,), 7.0)}
    new.state[parameter] = {"anchor": parameter.detach()}
    through_files(OptimizerState([saved], {parameter: "p"}), OptimizerState([new], {parameter: "p"}))
    assert parameter.tolist() == [1.0, 1.0]
    assert new.state[parameter]["anchor"].tolist() == [7.0, 7.0]


def test_a_scalar_that_was_moved_keeps_its_id() -> None:
    """If the tensor were freed, the next parameter's could have the same id and be taken for it."""
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    value = torch.ones(())
    of_value = weakref.ref(value)
    assert _placed("count", value, parameter, False, placed).is_meta
    del value
    assert of_value() is not None


def test_attaching_state_takes_time_by_the_number_of_parameters() -> None:
    """Parameters without state are looked up, not gone through for each parameter."""
    parameters = {nn.Parameter(torch.ones(1)): f"p{i}" for i in range(6_000)}
    state = OptimizerState([torch.optim.SGD(parameters, lr=0.1)], parameters)
    tensors, groups = state.split()
    started = time.process_time()
    state.apply(tensors, groups)
    assert time.process_time() - started < 1.0
