"""State that optimizers keep in attributes, inner optimizers included: all of it comes back, or load() names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests import world
from tests.interop.test_optimizer_content import Plain, Returned
from tests.zoo.optimizer_runs import Case, comparable, judge
from titan_ckpt import CheckpointManager
from titan_ckpt.errors import SaveError, StateEncodingError


class Sam(Optimizer):
    """Sharpness-aware minimisation as davda54/sam has it: its state dict leaves out the base optimizer."""

    def __init__(self, params: Any, base: Any = SGD, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "sharpness-aware minimisation requires a closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            if p.grad is not None:
                self.state[p]["old_p"] = p.clone()
                p.add_(p.grad, alpha=self.param_groups[0]["rho"])
        torch.enable_grad()(closure)()
        for p in parameters:
            if p.grad is not None:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class WholeSam(Sam):
    """Returns the state of the base optimizer, too."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"base": self.base_optimizer.state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        base = rest.pop("base")
        super().load_state_dict(rest)
        numbered = [p for group in self.param_groups for p in group["params"]]
        self.base_optimizer.state.update({numbered[i]: dict(own) for i, own in base.items()})


class Lookahead(Plain):
    """Keeps slow weights in a list and a count, and uses both at every fifth step alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 5 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    p.copy_(s.lerp_(p, 0.5))


class SlowAlone(Lookahead):
    """Counts in its groups, so that the list is all that is lost."""

    count = property(
        lambda self: self.param_groups[0].get("count", 0), lambda self, n: self.param_groups[0].update(count=n)
    )


class WholeLookahead(Returned, Lookahead):
    names = ("slow", "count")


class Lion(Plain):
    """Keeps momenta in a dict of its own, by parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        momentum = self.momenta.setdefault(p, torch.zeros_like(p))
        return momentum.lerp_(grad, 0.1).sign()


class Trace(Plain):
    """Keeps one tensor in an attribute, and changes it in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.trace = torch.zeros(3)

    def begin(self) -> None:
        self.trace += 1

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return grad * self.trace[0]


class Large(Trace):
    """Keeps a tensor that is too large to be rehearsed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.trace = torch.zeros(5000)


class Calls(Plain):
    """Counts, and holds an object of a class of its own, so that it is not rehearsed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule, self.count = nn.Identity(), 0

    def begin(self) -> None:
        self.count += 1

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return grad / self.count


class Constant(Plain):
    """Holds parameters, numbers and tensors that never change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.factor, self.eye = 0.5, torch.eye(2)

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return grad * self.factor * self.eye[0, 0]


class Rare(Plain):
    """Halves a factor, which it keeps in an attribute, at every 15th step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factor, self.others = 1.0, [p for group in self.param_groups for p in group["params"]]

    def begin(self) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        if group["count"] % 15 == 0:
            self.factor /= 2

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return grad * self.factor


class WholeRare(Returned, Rare):
    names = ("factor",)


class HalfRare(WholeRare):
    """Returns the state of something else."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"factor": 1.0}


class UnseenRare(Plain):
    """Holds a function, so that it is not rehearsed; changes a tensor in place at every 15th step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factor, self.schedule = torch.ones(1), comparable

    def begin(self) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        if group["count"] % 15 == 0:
            self.factor.div_(2)


class Scratch(Plain):
    """Computes in memory that it makes at its first step, and clears a flag, as fused optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.overflow, self.work = torch.zeros(1, dtype=torch.int32), None

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        if self.work is None:
            self.work = torch.zeros(64)  # type: ignore[assignment]  # it was None
        self.overflow.zero_()
        return grad + self.work[:1].copy_(grad.reshape(-1)[:1])  # type: ignore[index]  # as above


class SetAside(Plain):
    """Holds more memory than is rehearsed, and clears a flag."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.overflow, self.work = torch.zeros(1, dtype=torch.int32), torch.zeros(5000)

    def begin(self) -> None:
        self.overflow.zero_()


class Calibrated(Plain):
    """Sums up its first gradients at the parameters themselves, and needs their sum at the fifth step alone."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        state["count"] = count = state.get("count", 0) + 1
        own: Any = p
        own.total = getattr(own, "total", 0) + grad
        if count == 5:
            state["scale"] = own.total.abs() + 1
        return grad / state.get("scale", 1)


class Accumulated(Plain):
    """Sums up two gradients at the parameters themselves, and uses their sum."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        state["count"] = count = state.get("count", 0) + 1
        own: Any = p
        last, own.total = getattr(own, "total", 0), grad.clone()
        return torch.zeros_like(grad) if count % 2 else last + grad


class Planned(Plain):
    """Has a rate for each of fifteen steps, and no more; sets an attribute before it uses it."""

    def begin(self) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        self.rate = [*range(1, 16)][group["count"] - 1]

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return grad * self.rate


Build = Callable[[nn.Module], Any]
_OTHER_STEPS = "after a resume its steps would not be those of a run without a stop"
LOSES: dict[str, tuple[Build, str]] = {
    "sam": (lambda m: Sam(m.parameters(), lr=0.1, momentum=0.9), "self.base_optimizer"),
    "sam of AdamW": (lambda m: Sam(m.parameters(), AdamW, lr=0.1), "self.base_optimizer"),
    "lookahead": (lambda m: Lookahead(m.parameters()), "self.slow, self.count"),
    "slow weights": (lambda m: SlowAlone(m.parameters()), "self.slow"),
    "lion": (lambda m: Lion(m.parameters()), "self.momenta"),
    "a tensor": (lambda m: Trace(m.parameters()), "its steps change self.trace"),
    "a large tensor": (lambda m: Large(m.parameters()), "its code sets self.trace"),
    "needed early alone": (lambda m: Calibrated(m.parameters()), _OTHER_STEPS),
    "needed at every second step": (lambda m: Accumulated(m.parameters()), _OTHER_STEPS),
    "not rehearsed": (lambda m: Calls(m.parameters()), "its code sets self.count"),
}


def manager(folder: Path, model: nn.Module, optimizer: Any, allow: tuple[str, ...] = ()) -> CheckpointManager:
    return world.manager(folder, model, optimizer, async_mode="disabled", allow=allow)


@pytest.mark.parametrize("name", LOSES)
def test_what_an_optimizer_keeps_in_attributes_alone_is_refused_before_the_first_step(
    name: str, tmp_path: Path
) -> None:
    """Numbers, tensors, containers and inner optimizers alike: the class and the attribute are named."""
    build, said = LOSES[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build(model)
    world.load_fails(
        manager(tmp_path, model, optimizer), StateEncodingError, rf"(?s)\.{type(optimizer).__qualname__}: .*({said})"
    )


def test_attributes_that_may_be_lost_are_allowed_by_the_class(tmp_path: Path) -> None:
    """The run goes on, as for callbacks."""
    model = nn.Linear(2, 2)
    world.load(manager(tmp_path, model, Lookahead(model.parameters()), (f"{__name__}.Lookahead",)))


EXACT: dict[str, Build] = {
    "sam": lambda m: WholeSam(m.parameters(), lr=0.1, momentum=0.9),
    "sam of AdamW": lambda m: WholeSam(m.parameters(), AdamW, lr=0.1),
    "lookahead": lambda m: WholeLookahead(m.parameters()),
    "constant": lambda m: Constant(m.parameters()),
    "scratch": lambda m: Scratch(m.parameters()),
    "planned": lambda m: Planned(m.parameters()),
    "scratch, not rehearsed": lambda m: SetAside(m.parameters()),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_optimizer_that_returns_all_of_it_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """Base optimizers, slow weights and counts in the state dict; attributes that never change are in no one's way."""
    assert judge(Case(name, EXACT[name], kind="plain"), tmp_path) == ("exact", "")


def trained(folder: Path, kind: type[Any], last: int, allow: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Return the weights of a run that saves every step."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with manager(folder, model, optimizer := kind(model.parameters()), allow) as m:
        for step in range(m.load().step + 1, last + 1):
            world.learn(optimizer, model(torch.full((1, 2), float(step))).sum())
            m.save(step)
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("kind", [Rare, HalfRare, UnseenRare])
def test_an_attribute_that_changes_later_is_refused_at_the_save_that_sees_it(kind: type[Any], tmp_path: Path) -> None:
    """The steps before it are saved; it can be allowed."""
    message = (
        rf"step 15 is not saved: .*{kind.__name__}: self\.factor changed(?s:.*)allow = \[\"{__name__}\.{kind.__name__}"
    )
    with pytest.raises(SaveError, match=message):
        trained(tmp_path, kind, 16)
    assert (tmp_path / "checkpoints" / "step-14").exists()
    trained(tmp_path / "allowed", kind, 16, (f"{__name__}.{kind.__name__}",))


def test_an_attribute_that_changes_later_and_is_in_the_state_dict_comes_back(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", WholeRare, 20)
    trained(tmp_path / "resumed", WholeRare, 17)
    assert all(map(torch.equal, whole, trained(tmp_path / "resumed", WholeRare, 20)))


class CallsAlone(Plain):
    """Holds a function, so that it is not rehearsed, and keeps nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.reduce = torch.sign

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        return self.reduce(grad)


def test_what_a_scheduler_of_torch_notes_in_an_optimizer_is_no_state(tmp_path: Path) -> None:
    """It sets an attribute at the first step, which a watch of attributes finds changed."""
    model = nn.Linear(2, 2)
    optimizer = CallsAlone(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = {"lr_schedulers": [scheduler]}
    with world.manager(tmp_path, model, optimizer, async_mode="disabled", **given) as m:
        m.load()
        world.step_on(model, optimizer, torch.ones(1, 2))
        scheduler.step()
        assert m.save(1)
