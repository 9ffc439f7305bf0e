"""unsaved_state: which objects of a run are exact, and which are refused by name."""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.unsaved_state import faults, function_faults
from titan_ckpt.components.watched import Watch
from titan_ckpt.errors import SaveError

MODEL = nn.Sequential(nn.Linear(2, 2))
SEEN = 0


class Plain:
    """Holds nothing that changes, and works on what it is given."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.every = 10

    def called(self, control: Any) -> None:
        control.stop = True
        control.count += 1


class Sets(Plain):
    def called(self, control: Any) -> None:
        self.last = control


class Counts(Plain):
    def called(self, control: Any) -> None:
        self.every += 1


class Within(Plain):
    def called(self, control: Any) -> None:
        def later() -> None:
            self.every += control

        later()


class SetsGlobal(Plain):
    def called(self, control: Any) -> None:
        global SEEN
        SEEN += 1


class Renamed(Plain):
    def called(this, control: Any) -> None:  # noqa: N805 - the name of the first argument does not matter
        this.last = control


class Numbered(Plain):
    number = 0

    def called(self, control: Any) -> None:
        Numbered.number += 1


class WithProperty(Plain):
    @property
    def smallest(self) -> int:
        self.every = 1
        return 1


def loss_functions() -> list[Any]:
    """Return functions that keep something around them: a list, counts, a tensor."""
    seen: list[Any] = []
    counts = {"n": 0}
    mean = torch.zeros(1)

    def with_list(loss: Any) -> Any:
        seen.append(loss)

    def with_counts(loss: Any) -> Any:
        counts["n"] += 1

    def with_tensor(loss: Any) -> Any:
        mean.lerp_(loss, 0.1)

    return [with_list, with_counts, with_tensor]


class OfLibrary(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def found(value: Any, **settings: Any) -> list[str]:
    settings.setdefault("known", {})
    settings.setdefault("allow", ())
    return [*faults([("callback", value)], **settings)]


@pytest.mark.parametrize("kind", [Sets, Counts, Within, SetsGlobal, Renamed, Numbered, WithProperty])
def test_code_that_sets_an_attribute_is_refused(kind: type) -> None:
    (line,) = found(kind())[:1]
    assert line.startswith(f"callback {class_name(kind())}: its code sets ")
    assert f'checkpoint.allow = ["{class_name(kind())}"]' in line


@pytest.mark.parametrize("value", loss_functions(), ids=class_name)
def test_code_that_fills_a_container_around_it_is_refused_where_nothing_is_watched(value: Any) -> None:
    (line,) = function_faults([("function of a stream", value)], [])
    assert f"function of a stream {class_name(value)}: its code changes " in line


def test_a_function_is_refused_however_often_it_is_looked_at() -> None:
    """A process may make a second manager, or load again."""

    def counts(batch: Any) -> Any:
        global SEEN
        SEEN += 1
        return batch

    first, second = ([*function_faults([("collate_fn", counts)], [])] for _ in range(2))
    assert "its code sets SEEN, which is outside of it" in first[0]
    assert second == first


def test_a_weight_around_a_loss_function_is_read_alone() -> None:
    weight = torch.ones(2)

    def weighted(outputs: Any, labels: Any) -> Any:
        labels[labels == -100] = 0
        return nn.functional.cross_entropy(outputs, labels, weight=weight)

    assert [*function_faults([("loss", weighted)], [])] == []


@pytest.mark.parametrize(
    "held",
    [
        torch.Generator(), nn.Linear(1, 1), iter([1]), np.random.default_rng(0), random.Random(0), Counts(),
        ("a", [nn.Linear(1, 1)]), {"a": SimpleNamespace(b=Counts())}, torch.optim.SGD(MODEL.parameters()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_can_change_is_refused_by_the_name_of_its_attribute(held: Any) -> None:
    (line,) = found(Plain(held), live=[MODEL])[:1]
    assert "self.held" in line
    assert "no step holds it" in line


@pytest.mark.parametrize(
    "held",
    [
        1,
        "a",
        None,
        (1, ("b",)),
        MODEL,
        MODEL[0],
        len,
        Plain,
        functools.partial(len),
        io.StringIO(),
        Plain(MODEL),
        Path(),
        logging.getLogger(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_change_and_what_the_run_saves_runs(held: Any) -> None:
    assert found(Plain(held), live=[MODEL]) == []


class Item:
    """A value of a class of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


def around(held: Any) -> Any:
    """Return a function that uses a variable around it."""
    return lambda: held


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1], lambda held: held.append(2)),
    "dict": ({"a": 1}, lambda held: held.update(a=1.0)),
    "set": ({1}, lambda held: held.add(2)),
    "deque": (collections.deque([1], 2), lambda held: held.append(2)),
    "tensor": (torch.zeros(3), lambda held: held.add_(1)),
    "tensor by its data": (torch.zeros(3), lambda held: held.data.add_(1)),
    "large tensor": (torch.zeros(3 << 20), lambda held: held[1:2].add_(1)),
    "bfloat16": (torch.zeros(3, 2, dtype=torch.bfloat16).T, lambda held: held[0].add_(1)),
    "array": (np.zeros(3), lambda held: held.__setitem__(1, 2)),
    "bytearray": (bytearray(b"a"), lambda held: held.append(2)),
    "namespace": (SimpleNamespace(a=[1]), lambda held: held.a.append(2)),
    "within": (("a", [{"b": torch.zeros(1)}]), lambda held: held[1][0]["b"].add_(1)),
    "own object": (Item([1]), lambda held: held.value.append(2)),
    "function": (around([1]), lambda held: held().append(2)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("holder", [Plain, around])
def test_data_is_refused_at_the_save_that_sees_its_change(name: str, holder: Any) -> None:
    """Data that is set once runs, whether an object holds it or a function."""
    held, change = copy.deepcopy(CHANGES[name])
    held = around([1]) if name == "function" else held
    value, watch = holder(held), Watch()
    assert found(value, live=[MODEL], watch=watch) == []
    watch.refuse(1)
    change(held)
    attribute = "self.held" if holder is Plain else "the variable held"
    message = rf"step 2 is not saved: callback .*: {attribute} changed since(?s:.*)allow = \[\"{class_name(value)}\"\]"
    with pytest.raises(SaveError, match=message):
        watch.refuse(2)
    allowed = Watch()
    assert found(value, live=[MODEL], watch=allowed, allow=[class_name(value)]) == []
    change(held)
    allowed.refuse(3)


COLLECTED: list[int] = []


class Elsewhere(Plain):
    """Keeps what it has seen where reading its code shows no store."""

    of_class: list[int] = []  # noqa: RUF012 - it is the mistake

    def late(self) -> None:
        setattr(self, "best", 1)  # noqa: B010 - it is the mistake

    def by_name(self) -> None:
        vars(self)["held"] = 2

    def in_the_module(self) -> None:
        COLLECTED.append(1)

    def by_default(self, seen: list[int] = []) -> None:  # noqa: B006 - it is the mistake
        seen.append(1)


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (Elsewhere.late, "self.best"),
        (Elsewhere.by_name, "self.held"),
        (Elsewhere.in_the_module, "the variable COLLECTED"),
        (Elsewhere.by_default, "the variable seen"),
        (lambda value: value.of_class.append(1), "self.of_class"),
        (lambda value: value.held[0].add(2), "self.held"),
    ],
)
def test_what_code_keeps_where_no_store_shows_is_watched(keep: Callable[[Elsewhere], None], name: str) -> None:
    """Also in an object of an installed package, whose code could set anything: a configuration does not change."""
    value, watch = Elsewhere(importlib.import_module("sortedcontainers").SortedList([1])), Watch()
    assert found(value, watch=watch) == []
    watch.refuse(1)
    keep(value)
    with pytest.raises(SaveError, match=rf"Elsewhere: {name} changed"):
        watch.refuse(2)


def loss(seen: list[int], scale: float) -> float:
    seen.append(1)
    return scale


def test_what_a_partial_gives_to_a_function_is_watched() -> None:
    watch = Watch()
    given = functools.partial(loss, [], scale=2.0)
    assert [*function_faults([("loss", given)], (), watch=watch)] == []
    watch.refuse(1)
    given()
    with pytest.raises(SaveError, match=r"loss .*loss: its arguments changed(?s:.*)allow = \[\".*\.loss\"\]"):
        watch.refuse(2)


def test_an_objects_own_method_in_its_attribute_is_no_state() -> None:
    """Lightning puts a module's `forward` back so after each step of several ranks."""
    value, watch = Plain(()), Watch()
    assert found(value, watch=watch) == []
    vars(value)["again"] = MethodType(found, value)
    watch.refuse(1)


def test_a_function_that_is_gone_leaves_its_place_to_no_other() -> None:
    """Its id may be given to another function, which is watched, too."""
    watch = Watch()
    for _ in range(3):
        held: list[int] = []
        assert [*function_faults([("loss", around(held))], (), watch=watch)] == []
    watch.refuse(1)
    held.append(1)
    with pytest.raises(SaveError, match="the variable held changed"):
        watch.refuse(2)


class Begins(Plain):
    """Sets attributes when every start calls a hook, and one before the load."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.first = value, None
        self.made: Any = None

    def prepare(self) -> None:
        self.made = torch.zeros(2)

    def begin(self) -> None:
        self.first = self.value


def test_what_every_start_sets_anew_runs_if_it_is_no_data(caplog: pytest.LogCaptureFixture) -> None:
    """A time does, and the log says so; a copy of weights would be one of other weights after a resume."""
    hooks: dict[str, Any] = {"builds": ("prepare",), "begins": ("begin",)}
    for held, expected in (
        (time.time(), []),
        (torch.ones(2), ["self.first, a Tensor, anew in begin"]),
    ):
        value: Any = Begins(held)
        watch = Watch()
        assert found(value, **hooks) == []
        value.prepare()
        value.begin()
        lines = found(value, **hooks, watch=watch)
        assert len(lines) == len(expected) and all(part in lines[0] for part in expected)
        watch.refuse(1)
    assert "every start sets self.first anew, and no step holds it" in caplog.text


def test_an_object_that_gives_its_state_runs() -> None:
    assert found(Counts(), gives_state=lambda value: isinstance(value, Counts)) == []


def test_a_class_of_a_library_is_exact_only_if_it_is_listed() -> None:
    sampler, name = RandomSampler([1]), "torch.utils.data.sampler.RandomSampler"
    (line,) = found(sampler)
    assert line.startswith(f"callback {name}: it was not proved to continue exactly")
    assert found(sampler, known={name: ""}) == []
    (line,) = found(sampler, known={name: "it keeps an epoch"})
    assert line.startswith(f"callback {name}: it keeps an epoch, or allow")
    assert found(SequentialSampler([1]), known={name: ""}), "another class of the same package"


def test_a_class_that_extends_one_of_a_library_needs_that_one_listed() -> None:
    own, name = OfLibrary([1]), "torch.utils.data.sampler.RandomSampler"
    assert f"its base {name} was not proved" in found(own)[0]
    assert f"its base {name} was not proved" in found(own, gives_state=lambda _: True)[0]
    assert found(own, known={name: ""}) == [], "what RandomSampler sets is proved with it"
    own.seen = nn.Linear(1, 1)  # type: ignore[attr-defined]
    assert found(own, known={name: ""})[0].startswith(f"callback {class_name(own)}: self.seen is a Linear")


def test_a_name_that_is_allowed_runs_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert found(Counts(), allow=(class_name(Counts()),)) == []
    assert f"{class_name(Counts())}: its code sets self.every" in caplog.text
    assert "checkpoint.allow lets it run" in caplog.text
