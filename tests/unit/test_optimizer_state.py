"""Optimizer state by name: what is stored once, what is a tensor, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.optimizer_state import OptimizerState
from titan_ckpt.tensors import info_of


def trained(make: Any, steps: int = 3, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = make(model)
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> OptimizerState:
    return OptimizerState(optimizers, ModelWrapper([model]).parameter_names())


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "tensor_lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_comes_back_into_a_fresh_optimizer(name: str) -> None:
    """Tensors, shared scalars and hyperparameters are the same, and so is the next step."""
    model, optimizer = trained(OPTIMIZERS[name])
    tensors, groups = state_of(model, optimizer).split()
    other_model, other = trained(OPTIMIZERS[name], steps=0, seed=7)
    other_model.load_state_dict(model.state_dict())
    target = state_of(other_model, other)
    destinations = target.destinations({key: info_of(value) for key, value in tensors.items()})
    for key, value in destinations.items():
        value.copy_(tensors[key])
    target.apply(destinations, groups)
    for m, o in ((model, optimizer), (other_model, other)):
        torch.manual_seed(3)
        m(torch.randn(3, 4)).square().sum().backward()
        o.step()
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_count_that_all_share_is_stored_once() -> None:
    """AdamW: two tensors per parameter, one step for the group."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    tensors, [[group]] = state_of(model, optimizer).split()
    assert sorted(tensors) == sorted(
        f"optimizer.{i}.{p}.{s}" for i in (0, 1) for p in ("weight", "bias") for s in ("exp_avg", "exp_avg_sq")
    )
    assert group["shared"]["step"].item() == 3
    assert group["fqns"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_step_counts_that_differ_stay_tensors() -> None:
    """A parameter that joined later keeps its own count."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    optimizer.state[model[0].weight]["step"] = torch.tensor(1.0)  # type: ignore[index]
    tensors, [[group]] = state_of(model, optimizer).split()
    assert tensors["optimizer.0.weight.step"].item() == 1
    assert tensors["optimizer.1.bias.step"].item() == 3
    assert "step" not in group["shared"]


def test_a_parameter_that_was_never_stepped_has_no_state() -> None:
    """It comes back without state, so that the optimizer initialises it at its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tensors, groups = state_of(model, optimizer).split()
    fresh = torch.optim.AdamW(model.parameters())
    target = state_of(model, fresh)
    target.apply(target.destinations({k: info_of(v) for k, v in tensors.items()}), groups)
    assert model[0].weight in fresh.state
    assert model[1].weight not in fresh.state


def test_state_of_a_parameter_that_is_not_trained_here_is_named() -> None:
    """A checkpoint that trained more than this run does not load silently."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    tensors, _ = state_of(model, optimizer).split()
    fewer = torch.optim.AdamW(model[0].parameters())  # type: ignore[index]
    with pytest.raises(LoadMismatchError, match=r"2 trained there and not here: 1\.bias, 1\.weight.*exclude"):
        state_of(model, fewer).destinations({k: info_of(v) for k, v in tensors.items()})


def test_another_number_of_groups_is_named() -> None:
    """Nothing is applied where the groups cannot be matched."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    tensors, groups = state_of(model, optimizer).split()
    split = torch.optim.AdamW([{"params": list(model[i].parameters())} for i in (0, 1)])  # type: ignore[index]
    with pytest.raises(LoadMismatchError, match=r"\[1\] parameter groups, this run 1 with \[2\]"):
        state_of(model, split).apply(tensors, groups)


def test_groups_find_each_other_by_their_parameters() -> None:
    """Groups in another order get the hyperparameters of the group that held their parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    one, two = ({"params": list(model[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 1))
    _, groups = state_of(model, torch.optim.AdamW([one, two])).split()
    swapped = torch.optim.AdamW([{"params": list(model[i].parameters()), "lr": 9.0} for i in (1, 0)])
    state_of(model, swapped).apply({}, groups)
    assert [g["lr"] for g in swapped.param_groups] == [0.2, 0.1]


def test_a_parameter_of_no_model_part_is_refused() -> None:
    """An optimizer over something else cannot be addressed by name."""
    model, _ = trained(OPTIMIZERS["adamw"], steps=0)
    with pytest.raises(LoadMismatchError, match="model_parts"):
        state_of(model, torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
