"""A watch sees every change of the values that objects hold, and takes nothing else for one."""

from __future__ import annotations

import collections
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_ckpt.components.watched import trace


@dataclass(slots=True)
class Slotted:
    best: int = 1


class Table:
    """Gives its values as an array, as tables of pandas do, and keeps them where nobody looks."""

    def __init__(self) -> None:
        rows: Any = np.array([1, 2])
        self.rows: Callable[[], Any] = lambda: rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.rows()


class Unequal(int):
    """Cannot be compared."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError


class Hidden:
    """Does not show its attributes."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


def put(value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__("b", value)


def fill_and_empty(held: set[int]) -> None:
    """Change the order in which the set is walked, and not its content."""
    for number in range(0, 7000, 7):
        held.add(number)
    held.intersection_update({7, 14})


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"b": np.float32(1)}, put(np.float32(2))),
        ({"b": np.int64(1)}, put(np.int64(2))),
        ({"b": 1.0}, put(1)),
        ({"b": Decimal(1)}, put(Decimal(2))),
        ({"b": date(2020, 1, 1)}, put(date(2020, 1, 2))),
        (Slotted(), lambda held: setattr(held, "best", 2)),
        (np.zeros(3_000_000), lambda held: held.__setitem__(1, 5)),
        (np.array([[1], "x"], dtype=object), lambda held: held[0].append(2)),
        ([*range(2000)], lambda held: held.__setitem__(1, 5)),
        (array("i", [1]), lambda held: held.append(2)),
        (collections.UserDict(b=1), put(2)),
        (collections.UserList([1]), lambda held: held.append(2)),
        (collections.ChainMap({"b": 1}), put(2)),
        (Table(), lambda held: held.rows().__setitem__(0, 9)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_change_is_seen(value: Any, change: Callable[[Any], Any]) -> None:
    before = trace(value)
    assert before == trace(value)
    change(value)
    assert before != trace(value)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"b": float("nan")}, put(float("nan"))),
        ({"b": Path("/a")}, put(Path("/a"))),
        ({"b": np.int64(1)}, put(np.int64(1))),
        ({7, 14}, fill_and_empty),
        (Hidden(), lambda held: None),
        (Unequal(3), lambda held: None),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), lambda held: None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_the_same_again_is_no_change(value: Any, change: Callable[[Any], Any]) -> None:
    before = trace(value)
    change(value)
    assert before == trace(value)


def test_a_value_of_many_parts_is_compared_in_part() -> None:
    """A save takes no longer for it, and sees that it has grown."""
    value: Any = [{"loss": [number]} for number in range(300_000)]
    looked_into: set[int] = set()
    before = trace(value, seen=looked_into)
    assert len(looked_into) < 20_000
    value[0]["loss"].append(1)
    assert before != trace(value)
    value[0]["loss"].pop()
    assert before == trace(value)
    value.append({})
    assert before != trace(value)
