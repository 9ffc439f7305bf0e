"""Gradients that were accumulated across a save: refused by name, where a resumed run would have lost them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedulefree import ScheduleFreeWrapper
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from tests.world import Value, shard
from tests.world import manager as build
from titan_ckpt import RunGuard
from titan_ckpt.errors import SaveError
from titan_ckpt.testing import distributed

LOST = r"step \d+ is not saved: \d gradients?, such as that of .*zero_grad\(\) first if they are not to count"


class Run:
    """A model with one or two optimizers, and a manager that saves every step."""

    def __init__(self, folder: Path, *optimizers: Any, model: nn.Module | None = None, **given: Any) -> None:
        self.model = model or nn.Linear(3, 2)
        self.optimizers = list(optimizers) or [SGD(self.model.parameters(), lr=0.1)]
        self.manager = build(folder, self.model, *self.optimizers, async_mode="disabled", **given)
        self.number = 0

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(4, 3)).square().sum()
        loss.backward()
        return loss

    def save(self) -> None:
        self.number += 1
        self.manager.save(self.number)


ACTIONS = st.lists(st.sampled_from(["backward", "step", "zero", "none", "clip", "save"]), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(ACTIONS, st.sampled_from([None, "foreach", "manager built later"]))
def test_a_save_is_refused_exactly_while_gradients_are_not_used(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], how: str | None
) -> None:
    """Drawn loops: any order of backward, step, both kinds of zero_grad, clipping and saves."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, foreach=how == "foreach")
    if how == "manager built later":
        model(torch.ones(3)).sum().backward()
    run = Run(tmp_path_factory.mktemp("drawn"), optimizer, model=model)
    pending = False
    with run.manager:
        for action in actions:
            match action:
                case "backward":
                    run.backward()
                    pending = True
                case "step":
                    optimizer.step()
                    pending = False
                case "zero" | "none":
                    optimizer.zero_grad(set_to_none=action == "none")
                    pending = False
                case "clip":
                    if pending:
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                case "save" if pending:
                    with pytest.raises(SaveError, match=LOST):
                        run.save()
                case "save":
                    run.save()


WRAPPED: dict[str, Any] = {
    "AdamW": lambda m: AdamW(m.parameters(), fused=True),
    "accelerate": lambda m: Accelerator(cpu=True).prepare(AdamW(m.parameters())),
    "schedulefree": lambda m: ScheduleFreeWrapper(SGD(m.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_used_gradients_may_stay_until_the_next_step(name: str, tmp_path: Path) -> None:
    """An ordinary loop saves after step() and calls zero_grad() at the start of the next step."""
    model = nn.Linear(3, 2)
    run = Run(tmp_path, optimizer := WRAPPED[name](model), model=model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    with run.manager:
        for _ in range(3):
            optimizer.zero_grad()
            run.backward()
            optimizer.step()
            run.save()
        run.backward()
        with pytest.raises(SaveError, match=LOST):
            run.save()


class Around(SGD):
    """Has a method in place of step(), as SAM, which calls the optimizer inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inner = SGD(model.parameters(), lr=0.1)
        self.inner.param_groups = self.param_groups

    def second_step(self) -> None:
        self.inner.step()


def test_a_step_of_the_optimizer_inside_uses_gradients(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    run = Run(tmp_path, optimizer := Around(model), model=model)
    with run.manager:
        run.backward()
        optimizer.second_step()
        run.save()
        run.backward()
        with pytest.raises(SaveError, match=LOST):
            run.save()


def test_a_closure_and_a_step_that_a_scaler_left_out_are_no_accumulation(tmp_path: Path) -> None:
    """LBFGS makes gradients within its step; those that are not finite are in no later step."""
    model = nn.Linear(3, 2)
    optimizer = LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return run.backward()

    run = Run(tmp_path, optimizer, model=model)
    with run.manager:
        optimizer.step(closure)
        run.save()
        run.backward()
        assert model.bias.grad is not None
        model.bias.grad[0] = math.nan
        run.save()


def test_gradients_that_another_optimizers_loss_left_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The generator's loss of a GAN gives the discriminator gradients, which it clears before its own step."""
    generator, judge = nn.Linear(3, 3), nn.Linear(3, 1)
    of_generator, of_judge = SGD(generator.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    run = Run(tmp_path, of_generator, of_judge, model=model)
    with run.manager:
        for _ in range(3):
            of_judge.zero_grad()
            judge(generator(torch.randn(2, 3)).detach()).sum().backward()
            of_judge.step()
            of_generator.zero_grad()
            judge(generator(torch.randn(2, 3))).sum().backward()
            of_generator.step()
            run.save()
    told = [record.getMessage() for record in caplog.records if "no checkpoint holds gradients" in record.getMessage()]
    assert len(told) == 1 and "2 gradients, such as that of judge.weight" in told[0]


def test_the_save_of_a_guard_refuses_them_too(tmp_path: Path) -> None:
    """A signal may come in the middle of an accumulation, between two calls of save()."""
    run = Run(tmp_path)
    with run.manager as m, RunGuard(m) as guard:
        m.load()
        run.backward()
        guard.step_ended(1)
        with pytest.raises(SaveError, match=LOST):
            m.completed.save()
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
        guard.step_ended(2)
        run.backward()
        m.completed.save()
        assert m.completed.saved == 2


class Holding(Value):
    """Has gradients of its own in every step, as Lightning's progress has."""

    holds_gradients = True


@distributed(nproc=2, timeout_seconds=60)
def test_gradients_that_fsdp2_has_not_reduced_are_refused(tmp_path: Path) -> None:
    """set_requires_gradient_sync(False) keeps them where no optimizer, no zero_grad() and no state sees them."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    shard(model)
    holding = Holding()
    run = Run(tmp_path, optimizer := AdamW(model.parameters(), lr=0.1), model=model, states={"own": holding})
    with run.manager:
        model.set_requires_gradient_sync(False)
        run.backward()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(SaveError, match=r"step 1 is not saved: 4 gradients"):
            run.save()
        model.set_requires_gradient_sync(True)
        run.backward()
        optimizer.step()
        run.save()
        holding.holds_gradients = False
        run.backward()  # adds to gradients that were used
        with pytest.raises(SaveError, match=r"step 3 is not saved: 4 gradients"):
            run.save()
