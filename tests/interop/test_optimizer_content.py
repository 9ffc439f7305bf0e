"""Optimizers that keep more than state of parameters: all of it comes back, or one error names it before step 1."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning_fabric import Fabric
from schedulefree import AdamWScheduleFree, ScheduleFreeWrapper
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests import world
from tests.zoo.optimizer_runs import Case, comparable, judge, start
from titan_ckpt import CheckpointManager
from titan_ckpt.components.items.optimizers import Optimizers
from titan_ckpt.components.optimizer import OptimizerState
from titan_ckpt.components.optimizer_content import steppers
from titan_ckpt.errors import CheckpointError, LoadMismatchError, SaveError, StateEncodingError

Pair = namedtuple("Pair", "a b")


class Plain(Optimizer):
    """Descends by `lr` times what `direction` returns for a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad, self.state[p]), alpha=-group["lr"])

    def begin(self) -> None:
        """Change state that belongs to no parameter."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        """Return the direction of a step."""
        return grad


class StringKeys(Plain):
    """Keeps a step count, and a tensor, in its state under text, and an entry under a number."""

    def begin(self) -> None:
        kept: Any = self.state
        kept["step"] = kept.get("step", 0) + 1
        kept.setdefault("noise", {"mean": torch.ones(3)})["mean"].mul_(0.5)

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        kept: Any = self.state
        state[0] = state.get(0, torch.zeros_like(p)) + grad
        state["of.step"] = torch.full((2,), kept["step"])
        return state[0] * kept["noise"]["mean"][0] / kept["step"]


class Returned(Optimizer):
    """Has some attributes in its state dict."""

    names: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {name: getattr(self, name) for name in self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        for name in self.names:
            setattr(self, name, rest.pop(name))
        super().load_state_dict(rest)


class Counts(Returned, Plain):
    """Keeps a count and a tensor in attributes, which its state dict includes."""

    names = ("count", "trace")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.trace = 0, torch.zeros(2)

    def begin(self) -> None:
        self.count += 1
        self.trace = self.trace * 0.5 + self.count

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
        return (momentum.mul_(0.9).add_(grad, alpha=float(self.trace[0]) / self.count)).to(p.dtype)


class Opaque(Counts):
    """Has a state dict of its own form."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": [dict(self.state[p]) for g in self.param_groups for p in g["params"]], "count": self.count,
                "trace": self.trace}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for g in self.param_groups for p in g["params"]]
        self.state.update(zip(parameters, state_dict["mine"], strict=True))
        self.count, self.trace = state_dict["count"], state_dict["trace"]


class History(Plain):
    """Keeps the last gradients in a deque, and text."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        state.setdefault("last", deque(maxlen=2)).append(grad.clone())
        state["kind"] = "history"
        return sum(state["last"], torch.zeros_like(p)) / len(state["last"])


class OwnHistory(Counts, History):
    """As History, given back by its own load_state_dict, which would drop the deque's length."""

    direction = History.direction


class Columns(Plain):
    """Keeps factors in column-major memory, as a preconditioner by torch.linalg does."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        if p.dim() < 2:
            return grad
        flat = grad.reshape(p.shape[0], -1)
        state["factor"] = (flat @ flat.T).T.contiguous().T
        state["factors"] = deque([state["factor"][:, :2].T, state["factor"].clone()])
        return (state["factor"] @ flat).reshape(p.shape)


class SharedStep(Plain):
    """Has one tensor as the step count of all parameters, and one buffer in two places."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        first = self.state[self.param_groups[0]["params"][0]]
        state["step"] = first.setdefault("step", torch.zeros(()))
        state.setdefault("a", torch.zeros_like(p))
        state.setdefault("b", state["a"])
        state["step"] += 1
        state["a"] += grad
        return state["b"] / state["step"]


class Zeros(Plain):
    """Has numbers that are equal and not the same: 0.0 and -0.0."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        state["zero"] = -0.0 if p.dim() > 1 else 0.0
        state["zero_tensor"] = torch.tensor(state["zero"])
        return grad + torch.atan2(state["zero_tensor"], torch.tensor(-1.0)) + state["zero"]


class Around(Optimizer):
    """Wraps an optimizer, as its state and groups, and averages its directions in state of its own."""

    def __init__(self, params: Any) -> None:
        self.optimizer = SGD(params, lr=0.1, momentum=0.9)
        self.scales: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "scales": self.scales}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scales = state_dict["scales"]
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            if p.grad is not None:
                scale = self.scales.setdefault((0, i), torch.ones(1, dtype=p.dtype))
                p.grad.mul_(scale)
                scale.mul_(0.5).add_(p.grad.abs().mean())
        self.optimizer.step()


class Rows(Plain):
    """Keeps a factor for each row of a matrix."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
        if p.dim() != 2:
            return grad
        state["row"] = state.get("row", 1.0) * 0.5 + grad.square().mean(-1)
        return grad / (1 + state["row"].unsqueeze(-1))


def hooked(model: nn.Module) -> Optimizer:
    """Return AdamW with hooks that keep a count in its state dict."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    kept = {"count": 7.0}

    def post(_: Optimizer, state_dict: dict[str, Any]) -> None:
        kept["count"] += 1
        state_dict["count"] = kept["count"]

    def pre(_: Optimizer, state_dict: dict[str, Any]) -> None:
        kept["count"] = state_dict.pop("count")
        optimizer.param_groups[0]["seen"] = kept["count"]

    optimizer.register_state_dict_post_hook(post)
    optimizer.register_load_state_dict_pre_hook(pre)
    return optimizer


EXACT: list[type[Any]] = [
    StringKeys, Counts, Opaque, History, OwnHistory, Columns, SharedStep, Zeros, Around, Rows,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_what_an_optimizer_keeps_comes_back(kind: type[Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """State under other keys, in attributes, deques, column-major memory or twice: the next steps are the same."""
    case = Case(kind.__name__, lambda model: kind(model.parameters()), dtype, "plain")
    assert judge(case, tmp_path) == ("exact", "")


def test_a_group_without_parameters_keeps_its_settings(tmp_path: Path) -> None:
    """transformers makes one for an adapter, whose weights all decay; schedulefree counts the steps in each group."""

    def build(model: nn.Module) -> Any:
        return AdamWScheduleFree([{"params": [*model.parameters()]}, {"params": []}], lr=0.01)

    assert judge(Case("an empty group", build, kind="plain"), tmp_path) == ("exact", "")


def test_hooks_of_a_state_dict_are_called(tmp_path: Path) -> None:
    """An entry that a hook adds is given to the hook that takes it."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with manager(tmp_path, model, hooked(model)) as m:
        m.load()
        m.save(1)
    restored = hooked(other)
    world.load(manager(tmp_path, other, restored))
    assert restored.state_dict()["count"] >= 9.0


def manager(folder: Path, model: nn.Module, optimizer: Any, **settings: Any) -> CheckpointManager:
    return world.manager(folder, model, optimizer, async_mode="disabled", **settings)


@dataclass
class Statistics:
    mean: float = 0.0


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a namedtuple": lambda p: Pair(p.clone(), p.clone()),
    "a dataclass": lambda p: Statistics(),
    "a generator": lambda p: torch.Generator(),
    "a sparse tensor": lambda p: torch.eye(3).to_sparse(),
    "a function": lambda p: len,
}


@pytest.mark.parametrize("name", KEEPS)
def test_state_that_cannot_be_stored_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    """One error names the optimizer, the entry and its type; the run has taken no step and changed no generator."""

    class Keeps(Plain):
        def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
            state["kept"] = KEEPS[name](p)
            return grad

    model = nn.Linear(2, 2)
    before = comparable([dict(model.state_dict()), torch.get_rng_state()])
    world.load_fails(
        manager(tmp_path, model, Keeps(model.parameters())),
        StateEncodingError,
        r"Keeps: .*kept: a .*leave the optimizer out of checkpoints",
    )
    assert comparable([dict(model.state_dict()), torch.get_rng_state()]) == before


def test_an_attribute_that_no_state_dict_has_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A count that steers the steps and is lost at a resume: named, where torch resumes with other steps."""

    class Forgets(Counts):
        state_dict = Optimizer.state_dict
        load_state_dict = Optimizer.load_state_dict

    model = nn.Linear(2, 2)
    world.load_fails(
        manager(tmp_path, model, Forgets(model.parameters())),
        StateEncodingError,
        r"Forgets: its steps change self.count, self.trace, and its state_dict",
    )


def test_state_of_an_optimizer_that_cannot_be_rehearsed_is_refused_after_its_first_step(tmp_path: Path) -> None:
    """An optimizer that reaches live objects is not copied; the first call of save names its state, due or not."""

    class Reaches(Plain):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters())
            self.model = model

        def direction(self, p: torch.Tensor, grad: torch.Tensor, state: dict[Any, Any]) -> Any:
            state["kept"] = Statistics()
            return torch.ones_like(p)

    model = nn.Linear(2, 2)
    optimizer = Reaches(model)
    with world.manager(tmp_path, model, optimizer, interval=100) as m:
        m.load()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        with pytest.raises(StateEncodingError, match=r"kept.*Statistics"):
            m.save(1)


def test_state_of_a_tensor_in_no_group_is_refused(tmp_path: Path) -> None:
    """torch's own state_dict raises a KeyError."""
    model = nn.Linear(2, 2)
    optimizer = SGD([model.weight], lr=0.1)
    optimizer.state[model.bias]["x"] = 1
    with manager(tmp_path, model, optimizer) as m, pytest.raises(StateEncodingError, match="in none of its parameter"):
        m.save(1)


def test_ranks_that_hold_different_state_of_a_parameter_are_refused() -> None:
    """A step count that differs between ranks would be one rank's after a resume."""
    model = nn.Linear(2, 2)
    of_ranks = []
    for step in (1.0, 2.0):
        optimizer = AdamW(model.parameters())
        for p in model.parameters():
            optimizer.state[p] = {"step": torch.tensor(step), "exp_avg": p.clone(), "exp_avg_sq": p.clone()}
        of_ranks.append(OptimizerState([optimizer], {p: n for n, p in model.named_parameters()}).split()[1])
    with pytest.raises(SaveError, match=r"different optimizer state of 2 parameters.*weight, ?;? ?bias|weight; bias"):
        Optimizers.merge(of_ranks)
    assert Optimizers.merge([of_ranks[0], of_ranks[0]]) == of_ranks[0]


def test_an_optimizer_of_accelerate_is_the_one_inside(tmp_path: Path) -> None:
    """The manager takes the result of Accelerator.prepare, and its step hook waits for staging."""
    case = Case("accelerate", lambda model: Accelerator(cpu=True).prepare(AdamW(model.parameters())), kind="plain")
    assert judge(case, tmp_path) == ("exact", "")
    inner = AdamW(nn.Linear(2, 2).parameters())
    assert steppers([Accelerator(cpu=True).prepare(inner)]) == [inner], "its hook runs before any weight changes"


def test_an_optimizer_of_fabric_is_the_one_inside(tmp_path: Path) -> None:
    """The manager takes the result of Fabric.setup, and stores its state under the parameters' names."""
    model = nn.Linear(2, 2)
    _, wrapped = Fabric(accelerator="cpu").setup(model, AdamW(model.parameters(), lr=0.1))
    model(torch.ones(2)).sum().backward()
    wrapped.step()
    world.save(manager(tmp_path, model, wrapped))
    fresh = AdamW(model.parameters())
    world.load(manager(tmp_path, model, fresh))
    assert comparable(fresh.state_dict()["state"]) == comparable(wrapped.state_dict()["state"])


def test_an_attribute_called_scaler_need_not_be_a_grad_scaler(tmp_path: Path) -> None:
    """An optimizer may call a factor so."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.scaler = 2.0  # type: ignore[attr-defined]
    manager(tmp_path, model, optimizer).close()


def test_a_scaler_that_would_not_be_saved_is_refused(tmp_path: Path) -> None:
    """accelerate's wrapper steps by a GradScaler, whose scale a resume would lose."""
    Accelerator(cpu=True)
    model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    wrapped = AcceleratedOptimizer(SGD(model.parameters()), device_placement=False, scaler=scaler)
    with pytest.raises(LoadMismatchError, match=r'states=\{"scaler": accelerator.scaler\}'):
        manager(tmp_path, model, wrapped)
    manager(tmp_path, model, wrapped, states={"scaler": scaler}).close()


def test_d5_a_scaler_among_the_states_goes_on_with_its_scale(tmp_path: Path) -> None:
    """A loop of one's own in float16, whose first steps overflow: 3 and 4 steps are 7 steps, bit for bit."""

    def train(folder: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        optimizer = AdamW(model.parameters())
        with manager(folder, model, optimizer, states={"scaler": scaler}) as m:
            for step in range(m.load().step + 1, steps + 1):
                with torch.autocast("cpu", torch.float16):
                    loss = model(torch.randn(8, 4)).square().sum()
                scaler.scale(loss).backward()
                m.maybe_wait_for_staging()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                m.save(step)
        return model.state_dict(), scaler.state_dict()

    whole, scale = train(tmp_path / "whole", 7)
    train(tmp_path / "cut", 3)
    cut, again = train(tmp_path / "cut", 7)
    assert again == scale and scale["scale"] != 2.0**40
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


def test_a_wrapper_of_schedulefree_keeps_its_mode(tmp_path: Path) -> None:
    """A resume before train() does not interpolate the weights of training once more."""
    case = Case("wrapper", lambda model: ScheduleFreeWrapper(SGD(model.parameters(), lr=0.1)), kind="plain")
    first = start(case, 0, lambda _: None)
    with first.manager(tmp_path) as m:
        m.load()
        first.steps(1, 2)
        m.save(2)
    second = start(case, 1, lambda _: None)
    second.optimizer.train_mode = False
    world.load(second.manager(tmp_path))
    second.optimizer.train()
    assert first.state() == second.state()


@pytest.mark.parametrize("saved", ["wrapped", "plain"])
@pytest.mark.parametrize("resumed", ["wrapped", "plain"])
def test_the_optimizer_inside_a_wrapper_of_schedulefree_is_another_one(
    tmp_path: Path, saved: str, resumed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The classes inside are the same; one warning says that the state goes into, or comes out of, a wrapper."""

    def made(kind: str) -> Any:
        def build(model: nn.Module) -> Any:
            inner = SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
            return ScheduleFreeWrapper(inner) if kind == "wrapped" else inner

        return start(Case(kind, build, kind="plain"), 0, lambda _: None)

    first = made(saved)
    with first.manager(tmp_path) as m:
        m.load()
        first.steps(1, 1)
        m.save(1)
    world.load(made(resumed).manager(tmp_path))
    names = {"plain": "SGD", "wrapped": "SGD in schedulefree's wrapper"}
    said = f"optimizer is of class {names[saved]}, and this run's of class {names[resumed]}, which goes on with that"
    assert [said in text for text in caplog.messages if "of class" in text] == [True] * (saved != resumed)


def test_an_object_that_is_no_optimizer_is_named(tmp_path: Path) -> None:
    """One line says what to pass."""
    with pytest.raises(LoadMismatchError, match=r"Holder has no state and groups as a torch.optim.Optimizer"):
        manager(tmp_path, nn.Linear(2, 2), Holder())


class Holder:
    param_groups: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()


def test_a_load_that_an_optimizer_refuses_is_one_error(tmp_path: Path) -> None:
    """State of another class goes to load_state_dict(), which fails: named, with the next step."""
    model = nn.Linear(2, 2)
    world.save(manager(tmp_path, model, Plain(model.parameters())))
    world.load_fails(
        manager(tmp_path, model, Counts(model.parameters())),
        CheckpointError,
        r"Counts.load_state_dict\(\) does not take .*KeyError.*exclude",
    )
