"""Optimizers of torch, torchao, transformers and schedulefree: a resumed run is exact, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
import torchao.optim
import transformers
from torch import nn
from torch.optim import Optimizer

from tests.zoo.optimizer_runs import Case, Kind, judge
from tests.zoo.sample import chosen
from tests.zoo.worlds import Row, judged

FLOORS = {"": 130}
"""Optimizers with their settings that are exact at the least."""
LIBRARIES = (torch.optim, torchao.optim, transformers.optimization, schedulefree)
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "momentum": (0.9,),
    "weight_decay": (0.1,),
    "warmup_steps": (2,),
    "warmup_init": (True,),
    "initial_accumulator_value": (0.5,),
    "beta1": (0.9,),
    "history_size": (2,),
    "line_search_fn": ("strong_wolfe",),
    "adjust_lr_fn": ("match_rms_adamw",),
    "betas": ((0.8, 0.9),),
    "r": (1.0,),
    "block_size": (128,),
    "lambd": (0.1,),
    "dampening": (0.1,),
}
"""Values of numeric switches that take another path through an optimizer than their defaults do."""
_TOGETHER: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9}, "dampening": {"momentum": 0.9},
    "relative_step": {"lr": None}, "warmup_init": {"relative_step": True, "lr": None},
}  # fmt: skip
"""Switches that need others."""
_NOT_HERE = ("capturable", "differentiable")
"""Switches that need an accelerator, or a loop that differentiates through the step."""
_ALWAYS: dict[type[Any], dict[str, Any]] = {
    torch.optim.LBFGS: {"max_iter": 4}, torch.optim.Muon: {"lr": 1e-3},
    transformers.optimization.Adafactor: {"relative_step": False},
}  # fmt: skip
_TENSORS: dict[type[Any], Kind] = {torch.optim.SparseAdam: "sparse", torch.optim.LBFGS: "plain"}
REFUSED = ("transformers.LayerWiseDummyOptimizer",)
"""Trains a parameter of its own, and hands the others to optimizers inside hooks."""


def classes() -> list[type[Any]]:
    """Return every optimizer class that the libraries show, once."""
    kinds = (
        value
        for library in LIBRARIES
        for name, value in vars(library).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer and name[0] != "_"
    )
    return list(dict.fromkeys(kinds))


def switches(kind: type[Any]) -> Iterator[dict[str, Any]]:
    """Yield the defaults of an optimizer, each switch of its constructor by itself, and a tensor as learning rate."""
    parameters = inspect.signature(kind).parameters
    yield {}
    for name, parameter in parameters.items():
        flag = (isinstance(parameter.default, bool) or name in ("foreach", "fused")) and name not in _NOT_HERE
        others = [value for value in (True, False) if value is not parameter.default] if flag else []
        yield from (_TOGETHER.get(name, {}) | {name: value} for value in [*others, *_SETTINGS.get(name, ())])
    if "foreach" in parameters:
        yield {"lr": torch.tensor(1e-2), "foreach": False}


def _builder(kind: type[Any], settings: dict[str, Any]) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        own = {"lr": 1e-2} | _ALWAYS.get(kind, {}) | settings
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        parameters = [p for p in model.parameters() if kind is not torch.optim.Muon or p.dim() == 2]
        if kind is torch.optim.LBFGS:  # takes one group
            return kind(parameters, **own)
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": own["lr"]}]
        return kind([group for group in groups if group["params"]], **own)

    return build


def _wrapped(base: type[Any], **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: schedulefree.ScheduleFreeWrapper(base(model.parameters(), lr=1e-2), **settings)


def cases() -> list[Case]:
    """Return every optimizer with each of its switches, in float32, and by default in bfloat16."""
    out = []
    for kind in classes():
        tensors = _TENSORS.get(kind, "any")
        for settings in switches(kind):
            text = ", ".join(f"{name}={value}" for name, value in settings.items())
            name = f"{kind.__module__.split('.')[0]}.{kind.__name__}({text})"
            out.append(Case(name, _builder(kind, settings), kind=tensors))
            if not settings and tensors != "sparse":
                out.append(Case(f"{name} in bfloat16", _builder(kind, settings), torch.bfloat16, tensors))
    wrapper = "schedulefree.ScheduleFreeWrapper"
    decay = _wrapped(torch.optim.SGD, weight_decay_at_y=0.1, r=1.0)
    out = list({case.name: case for case in out}.values())  # a switch and what it needs may be those of a second one
    return [
        *out,
        Case(f"{wrapper}(SGD)", _wrapped(torch.optim.SGD), kind="plain"),
        Case(f"{wrapper}(SGD, weight_decay_at_y=0.1, r=1.0)", decay, kind="plain"),
    ]


@pytest.mark.parametrize("case", chosen(cases(), 30), ids=str)
def test_an_optimizer_resumes_exactly(case: Case, tmp_path: Path) -> None:
    """Three steps after a resume give the bits of a run without a stop, and the same state."""
    verdict, note = judge(case, tmp_path)
    if verdict == "unbuilt":
        pytest.skip(note)
    assert verdict == ("refused" if case.name.startswith(REFUSED) else "exact"), note


def rows() -> list[Row]:
    """Return the row of every optimizer that works on this machine."""
    return judged(rows_of, [str(case) for case in cases()])


def rows_of(name: str, folder: Path) -> list[Row]:
    """Return the row of an optimizer; none if it does not work on this machine."""
    (case,) = (case for case in cases() if str(case) == name)
    verdict, note = judge(case, folder)
    return [] if verdict == "unbuilt" else [(name, verdict, note)]
