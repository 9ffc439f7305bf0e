"""A change of state that a user's module keeps beside the model's is refused; a change of an output is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import world
from tests.own_state_models import add_hooks
from titan_ckpt.components.known.own_modules import watch_modules
from titan_ckpt.components.watched import Watch
from titan_ckpt.errors import SaveError


class Part(nn.Module):
    """A module within the model."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(2), persistent=False)
        self.number = 0
        self.output: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * (1 + self.number) + self.running
        return out


class InBuffer(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running += x.detach().mean(0)
        return super().forward(x)


class InNumber(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return super().forward(x)


class Stored(InNumber):
    """Gives the state itself."""

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


class StoredByHook(InNumber):
    def __init__(self) -> None:
        super().__init__()
        add_hooks(self, self._store, self._restore)

    @staticmethod
    def _store(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}number"] = module.number

    @staticmethod
    def _restore(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.number = state.pop(f"{prefix}number")


class Outputs(Part):
    """Leaves outputs of its forward behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written = x.mean().item()
        self.output = self.inner(x).mean(0)
        added: torch.Tensor = super().forward(x) + self.output
        return added


class Below(nn.Linear):
    """Extends a module of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = getattr(self, "scale", 1.0) * 0.5
        out: torch.Tensor = super().forward(x) * self.scale
        return out


class Teacher(nn.Module):
    """Hides an average of its weights from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.teacher = [nn.Linear(2, 2)]

    @torch.no_grad()
    def follow(self) -> None:
        self.teacher[0].weight.lerp_(self.inner.weight, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        out: torch.Tensor = self.inner(x) + self.teacher[0](x).detach()
        return out


class Recurrent(Part):
    """Goes on from the state of the last step, which has a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = 0.0 if self.output is None else self.output.detach()
        out = super().forward(x) + last
        self.output = out
        return out


class InClass(Part):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        InClass.calls += 1
        return super().forward(x) * InClass.calls


num_calls = 0


class InGlobal(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global num_calls
        num_calls += 1
        return super().forward(x) * num_calls


class InSchedule(Part):
    class Schedule:
        calls = 0

        def __call__(self) -> int:
            self.calls += 1
            return self.calls

    def __init__(self) -> None:
        super().__init__()
        self.schedule = self.Schedule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.schedule()


class SetInOneBranch(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            self.number = int(x.sum())
        return super().forward(x) * self.number


class OfWeights(Part):
    """Keeps what it has computed from weights that change."""

    @cached_property
    def first(self) -> torch.Tensor:
        return self.inner.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.first


class Parent(nn.Module):
    """Reads an output of a part of it, whose first value is no output, and that has no graph after an evaluation."""

    class Router(Part):
        def __init__(self) -> None:
            super().__init__()
            self.balance: Any = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.balance = self.inner(x).mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.router = self.Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.router(x) + self.router.balance
        return out


class SetFirst(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = len(x)
        return super().forward(x) * self.rows


class Getter(Part):
    """Returns what it has seen last, to whom wants to plot it."""

    @property
    def seen_last(self) -> Any:
        return self.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.output = x.mean().item()
        return super().forward(x)


class InGetter(Getter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + (self.seen_last or 0))


class Property(Part):
    @cached_property
    def mask(self) -> torch.Tensor:
        return torch.ones(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.mask


def trained(part: nn.Module, folder: Path, allow: tuple[str, ...] = ()) -> None:
    """Train two steps, the second of which is saved."""
    model = nn.Sequential(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.manager(folder, model, optimizer, interval=2, async_mode="disabled", allow=allow) as manager:
        manager.load()
        for step in (1, 2):
            world.step_on(model, optimizer, torch.ones(3, 2))
            if step == 2:
                with torch.no_grad():
                    model(torch.zeros(1, 2))
            manager.save(step)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (InBuffer, "self.running"),
        (InNumber, "self.number"),
        (lambda: Below(2, 2), "self.scale"),
        (Teacher, "self.teacher"),
        (Recurrent, "self.output"),
        (InClass, "self.calls"),
        (InGlobal, "the variable num_calls"),
        (InSchedule, "self.schedule"),
        (SetInOneBranch, "self.number"),
        (OfWeights, "self.first"),
        (InGetter, "self.output"),
    ],
)
def test_what_a_module_keeps_beside_its_state_is_refused_after_the_first_step(
    make: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    part = make()
    own = f"{type(part).__module__}.{type(part).__qualname__}"
    with pytest.raises(SaveError, match=rf"step 1 is not saved: module 0, {own}: {name} changed .*persistent buffer"):
        trained(part, tmp_path / "refused")
    trained(make(), tmp_path / "allowed", (own,))
    assert (tmp_path / "allowed" / "checkpoints" / "step-2").is_dir()


def test_a_watch_over_thousands_of_modules_is_short() -> None:
    model, watch = nn.ModuleList(Part() for _ in range(1000)), Watch()
    began = time.process_time()
    watch_modules([model], (), watch, [])
    watch.refuse(1)
    assert time.process_time() - began < 4  # 32 s when each module's classes were read again


@pytest.mark.parametrize("kind", [Part, Stored, StoredByHook, Outputs, Parent, SetFirst, Property, Getter])
def test_what_is_stored_or_made_anew_by_each_step_runs(kind: type[nn.Module], tmp_path: Path) -> None:
    trained(kind(), tmp_path)
    assert (tmp_path / "checkpoints" / "step-2").is_dir()
