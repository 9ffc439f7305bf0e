"""One optimizer of the zoo: built, stepped, saved by a manager, resumed, and compared with a run without a stop."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests import world
from titan_ckpt import CheckpointManager
from titan_ckpt.errors import CheckpointError

STEPS = 3


Kind = Literal["any", "plain", "sparse"]


class TinyModel(nn.Module):
    """An embedding, matrices large enough to be quantized, a convolution, a scale, and a parameter without gradient.

    plain: all memory is contiguous, and no parameter is a scalar. sparse: an embedding with sparse gradients alone.
    """

    def __init__(self, kind: Kind = "any") -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64, sparse=kind == "sparse")
        if kind == "sparse":
            return
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        memory = torch.contiguous_format if kind == "plain" else torch.channels_last
        self.filter = nn.Conv2d(2, 4, 3).to(memory_format=memory)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.ones((1,) if kind == "plain" else ()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        if self.embedding.sparse:
            return x
        x = self.down(self.up(x).tanh()) * self.scale
        return self.filter(x.view(-1, 2, 4, 8))  # type: ignore[no-any-return]


Build = Callable[[nn.Module], Any]
"""A model -> its optimizer, or a wrapper of one."""
Wrap = Callable[[nn.Module], object]
"""Shards a model, in place."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of an optimizer."""

    name: str
    build: Build
    dtype: torch.dtype = torch.float32
    kind: Kind = "any"
    """The parameters that the optimizer takes."""

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Run:
    """A model and its optimizer."""

    case: Case
    model: nn.Module
    optimizer: Any

    def step(self, number: int) -> None:
        """Take one step on data that depends on its number."""
        torch.manual_seed(number)
        tokens = torch.randint(0, 16, (4,))

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(tokens).float().square().mean()
            loss.backward()
            return loss

        if "closure" in inspect.signature(type(self.optimizer).step).parameters and _needs_closure(self.optimizer):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()

    def steps(self, first: int, last: int) -> None:
        """Take the steps `first` to `last`."""
        for number in range(first, last + 1):
            self.step(number)

    def manager(self, folder: Path) -> CheckpointManager:
        """Return a manager that saves in this thread."""
        return world.manager(folder, self.model, self.optimizer, async_mode="disabled")

    def state(self) -> Any:
        """Return the weights and the optimizer's own state dict in a form that == compares bit for bit."""
        own = self.optimizer.state_dict()
        if isinstance(own.get("state"), dict):  # an empty state is what a parameter has that was never stepped
            own = own | {"state": {key: value for key, value in own["state"].items() if value != {}}}
        return comparable([dict(self.model.state_dict()), own])


def _needs_closure(optimizer: Any) -> bool:
    parameter = inspect.signature(type(optimizer).step).parameters["closure"]
    return parameter.default is inspect.Parameter.empty


def start(case: Case, seed: int, wrap: Wrap) -> Run:
    """Return a run before its first step. `wrap` shards the model before the optimizer is built."""
    torch.manual_seed(seed)
    model = TinyModel(case.kind).to(case.dtype)
    wrap(model)
    optimizer = case.build(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return Run(case, model, optimizer)


@contextmanager
def quiet() -> Iterator[None]:
    """Run optimizers without their warnings, and without compiling them."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def judge(case: Case, folder: Path, wrap: Wrap = lambda _: None) -> tuple[str, str]:
    """Return ("exact" | "refused" | "different", note); "unbuilt" for what torch itself refuses."""
    with quiet():
        try:
            whole = start(case, 0, wrap)
            whole.steps(1, 2 * STEPS)
        except Exception as error:  # any error: a switch that does not work on this machine is no case of the zoo
            return "unbuilt", f"{type(error).__name__}: {error}"
        try:
            return _resumed(case, folder, whole, wrap)
        except CheckpointError as error:
            return "refused", str(error)


def _resumed(case: Case, folder: Path, whole: Run, wrap: Wrap) -> tuple[str, str]:
    first = start(case, 0, wrap)
    with first.manager(folder) as manager:
        manager.load()
        first.steps(1, STEPS)
        manager.save(STEPS)
    second = start(case, 1, wrap)
    assert world.load(second.manager(folder)).step == STEPS
    if first.state() != second.state():
        return "different", f"state after the load: {difference(first.state(), second.state())}"
    second.steps(STEPS + 1, 2 * STEPS)
    if whole.state() != second.state():
        return "different", f"state after {STEPS} more steps: {difference(whole.state(), second.state())}"
    return "exact", ""


def comparable(value: Any) -> Any:
    """Return nested state in a form that == compares bit for bit, with types, dtypes and the order of dims."""
    if isinstance(value, DTensor):
        return "DTensor", str(value.placements), comparable(value._local_tensor)
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return type(value).__name__, str(context), {name: comparable(getattr(value, name)) for name in names}
        strides = value.stride() if value.numel() > 1 else ()
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return "tensor", value.dtype, tuple(value.shape), strides, flat.numpy().tobytes()
    if isinstance(value, dict):
        return type(value).__name__, {key: comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        limit = value.maxlen if isinstance(value, deque) else None
        return type(value).__name__, limit, [comparable(item) for item in value]
    return type(value).__name__, repr(value)


def difference(a: Any, b: Any, path: str = "") -> str:
    """Return where two comparable values first differ."""
    if type(a) is type(b) and isinstance(a, dict) and a.keys() == b.keys():
        return next((difference(a[k], b[k], f"{path}.{k}") for k in a if a[k] != b[k]), "")
    if type(a) is type(b) and isinstance(a, (list, tuple)) and len(a) == len(b):
        return next((difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), "")
    return f"{path}: {a!r:.60} and {b!r:.60}"
