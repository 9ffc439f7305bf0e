"""State that cannot be saved, of objects beside optimizers: the constructor or load() says so, not the first save."""

from __future__ import annotations

import enum
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from tests import world
from tests.unit.components.test_run_state import Holder, flat, manager
from titan_ckpt.errors import StateEncodingError
from titan_ckpt.testing import distributed

Pair = namedtuple("Pair", "a b")


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Statistics:
    mean: float = 0.0


class Own(torch.Tensor):
    pass


class Half:
    def state_dict(self) -> dict[str, Any]:
        return {}


LOADER: Any = DataLoader([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objects", "where"),
    [
        ({"states": {"loader": LOADER}}, r"states\['loader'\] \(torch.utils.data.dataloader.DataLoader\)"),
        ({"dataloader": LOADER}, r"dataloader \(torch.*DataLoader\).*PositionedLoader.*torchdata's StatefulDataLoader"),
        ({"states": {"sampler": RandomSampler([1]), "a": {}}}, r"'sampler'\].*RandomSampler.*'a'\] \(builtins.dict"),
        ({"states": {"half": Half()}}, r"states\['half'\]"),
        ({"states": {"class": Holder}}, r"states\['class'\]"),
        ({"states": {"generator": torch.Generator()}}, "Generator"),
        ({"lr_schedulers": [object()]}, r"lr_schedulers\[0\] \(builtins.object\)"),
    ],
)
def test_an_object_that_returns_no_state_is_refused_by_the_constructor(
    objects: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """One error names all of them, where a save would have ended in an AttributeError."""
    with pytest.raises(StateEncodingError, match=rf"no state_dict\(\) and load_state_dict\(\).*{where}"):
        manager(tmp_path, **objects)


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "enum": (lambda: Colour.RED, "Colour"),
    "named tuple": (lambda: Pair(1, torch.ones(2)), "Pair"),
    "dataclass": (Statistics, "Statistics"),
    "record": (lambda: np.zeros(2, [("x", "i4")]), "dtype"),
    "subclass of an array": (lambda: np.ma.array([1], mask=[False]), "MaskedArray"),
    "reversed": (lambda: np.arange(3)[::-1], "reversed"),
    "parameter": (lambda: nn.Parameter(torch.ones(2)), r"Parameter.*\.detach\(\)\.clone\(\)"),
    "0-d parameter": (lambda: nn.Parameter(torch.tensor(1.0)), "Parameter"),
    "requires gradients": (lambda: torch.ones(2, requires_grad=True), "requires gradients"),
    "with a graph": (lambda: torch.tensor(1.0, requires_grad=True) * 2, "requires gradients"),
    "subclass of a tensor": (lambda: torch.ones(2).as_subclass(Own), "Own"),
    "expanded": (lambda: torch.ones(1).expand(3), r"expanded to \[3\]"),
    "conjugated": (lambda: torch.tensor([1 + 2j]).conj(), "conjugated"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "dense|nested"),
    "on meta": (lambda: torch.ones(2, device="meta"), "meta"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_would_not_come_back_is_refused_when_the_manager_is_made(name: str, tmp_path: Path) -> None:
    """The path and the kind are named, and the generators are where they were."""
    make, said = VALUES[name]

    class Draws(Holder):
        def state_dict(self) -> Any:
            random.random()
            return {"deep": [make()]}

    before = random.getstate()
    with pytest.raises(StateEncodingError, match=rf"(?s)states\.it\.deep.*{said}"):
        manager(tmp_path, states={"it": Draws()})
    assert random.getstate() == before


def test_a_state_that_is_made_later_is_looked_at_by_the_save(tmp_path: Path) -> None:
    """Nothing is known of it before; then the same error."""
    later = Holder({})
    with manager(tmp_path, states={"it": later}) as m:
        m.load()
        later.value = {"w": nn.Parameter(torch.ones(2))}
        with pytest.raises(StateEncodingError, match=r"states\.it\.w: a torch\.nn\.parameter\.Parameter"):
            m.save(1)


def test_a_state_that_has_none_yet_and_a_loader_are_not_in_the_way(tmp_path: Path) -> None:
    """An error of state_dict() before the first step says nothing; an object that is iterated is not asked."""

    class Fails(Holder):
        def state_dict(self) -> Any:
            raise RuntimeError("no step yet")

    class Loader(Fails):
        def __iter__(self) -> Any:
            return iter(())

    with manager(tmp_path, states={"a": Fails(), "b": Loader()}) as m:
        m.load()
        with pytest.raises(StateEncodingError, match=r"states\['a'\]: .*Fails\.state_dict\(\) failed: .* no step"):
            m.save(1)


def test_methods_that_need_other_arguments_are_refused_when_the_manager_is_made(tmp_path: Path) -> None:
    """state_dict() is called without any, and load_state_dict() with the state."""

    class Into(Holder):
        def state_dict(self, destination: Any) -> Any:  # type: ignore[override]
            return destination

    with pytest.raises(StateEncodingError, match=r"no state_dict\(\) and load_state_dict\(\).*states\['it'\]"):
        manager(tmp_path, states={"it": Into({})})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans())
def test_arrays_and_tensors_in_states_keep_the_order_of_their_axes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], of_torch: bool
) -> None:
    """Any order of axes in memory, as of a column-major array, is that of the state that was saved."""
    axes = data.draw(st.permutations(range(len(shape))))
    array = np.random.default_rng(0).random(shape).transpose(axes)
    value: Any = torch.from_numpy(array) if of_torch else array
    folder = tmp_path_factory.mktemp("axes")
    world.save(manager(folder, states={"it": Holder({"v": value})}))
    found = Holder({})
    world.load(manager(folder, states={"it": found}))
    back = found.value["v"]
    strides = [(v.stride() if of_torch else v.strides) for v in (back, value)]
    assert type(back) is type(value) and (back == value).all()
    assert all(a == b for a, b, size in zip(*strides, value.shape, strict=True) if size > 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [lambda m: torch.jit.trace(m, torch.ones(3, 2)), torch.jit.script])
def test_a_traced_model_is_saved_and_filled(make: Any, tmp_path: Path) -> None:
    """Its parameters and buffers are those that it computes with."""
    first, second = (make(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) for _ in range(2))
    first(torch.randn(5, 2))
    with manager(tmp_path, first) as m:
        m.load()
        m.save(1)
    assert world.load(manager(tmp_path, second)).step == 1
    assert flat(dict(first.state_dict())) == flat(dict(second.state_dict()))
    assert torch.equal(first(torch.ones(3, 2)), second(torch.ones(3, 2)))


@distributed(nproc=2)
def test_ranks_may_have_different_states(tmp_path: Path) -> None:
    """One rank has a state, another one none: both make their managers, save, and resume."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    for step in (1, 2):
        states = {"own": Holder(step)} if dist.get_rank() == 0 else {}
        with manager(tmp_path, model, states=states, timeout_seconds=20) as made:
            assert made.load().step == step - 1
            made.save(step)
