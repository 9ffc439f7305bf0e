"""A sampler of the user's own goes on exactly, or is refused before the first batch; a length may be an estimate.

Samplers and streams of libraries: test_loader_position.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from titan_ckpt.components.unsaved_state import class_name
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.loader_position import PositionedLoader

DATA = range(20)
LENGTHS = [3 * (n % 7) + 1 for n in DATA]


def steps(loader: PositionedLoader) -> Iterator[Any]:
    """Yield batches of epoch after epoch, each with a random number that is drawn after it, as a step draws some."""
    while True:
        for batch in loader:
            yield batch.tolist(), float(torch.rand(()))


class Own(Sampler[int]):
    """A sampler of the user whose order depends on the epoch alone."""

    def __init__(self) -> None:
        self.lengths, self.epoch = [*LENGTHS], 0

    def __len__(self) -> int:
        return 20

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(20).tolist())


class Counts(Own):
    def __iter__(self) -> Iterator[int]:
        self.calls = getattr(self, "calls", 0) + 1
        return iter(np.random.default_rng(self.calls).permutation(20).tolist())


class ShufflesInPlace(Own):
    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.lengths)
        return iter(range(20))


class DrawsItself(Own):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return (int(n) for n in self.random.permutation(20))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Counts, r"Counts: its code sets self\.calls, which no step holds"),
        (ShufflesInPlace, r"ShufflesInPlace: drawing an order changes self\.lengths, which no step holds"),
        (DrawsItself, r"DrawsItself: drawing an order changes self\.random, which no step holds"),
    ],
)
def test_a_sampler_of_ones_own_that_changes_is_refused_before_the_first_batch(
    sampler: type[Own], expected: str
) -> None:
    """With the name that allows it."""
    with pytest.raises(ConfigError, match=expected):
        next(iter(PositionedLoader(DataLoader(DATA, 2, sampler=sampler()))))  # type: ignore[arg-type]
    allow = [class_name(sampler())]
    assert next(iter(PositionedLoader(DataLoader(DATA, 2, sampler=sampler()), allow=allow))) is not None  # type: ignore[arg-type]


def test_a_sampler_of_ones_own_that_depends_on_the_epoch_runs() -> None:
    loader = PositionedLoader(DataLoader(DATA, 2, sampler=Own()))  # type: ignore[arg-type]
    run = steps(loader)
    whole = [next(run) for _ in range(13)]
    state = loader.state_dict()
    whole += [next(run) for _ in range(9)]
    resumed = PositionedLoader(DataLoader(DATA, 2, sampler=Own()))  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    run = steps(resumed)
    assert [next(run) for _ in whole[13:]] == whole[13:]


class Estimated(Own):
    """Batches of at most 12 tokens; how many there are is known after the last."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        batch: list[int] = []
        for index in DATA:
            if sum(LENGTHS[i] for i in (*batch, index)) > 30:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def test_a_length_that_is_an_estimate_loses_no_batch() -> None:
    """Every batch of each epoch is read, and a resume goes on after any of them."""

    def made() -> PositionedLoader:
        return PositionedLoader(DataLoader(DATA, batch_sampler=Estimated()))  # type: ignore[arg-type]

    expected = [*Estimated()]
    assert len(expected) > len(Estimated())
    loader = made()
    run, stored = steps(loader), []
    whole = []
    for _ in range(2 * len(expected)):
        whole.append(next(run)[0])
        stored.append(typed_json.dumps(loader.state_dict()))
    assert whole == 2 * expected
    for step in range(1, len(whole)):
        resumed = made()
        resumed.load_state_dict(typed_json.loads(stored[step - 1]))
        run = steps(resumed)
        assert [next(run)[0] for _ in whole[step:]] == whole[step:], f"after batch {step}"
