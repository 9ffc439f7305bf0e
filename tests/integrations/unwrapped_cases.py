"""Data, samplers and collate functions under torchdata's StatefulDataLoader as it is, and cases that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as of_torchdata

from tests.integrations.loader_cases import Augmented, Jittered, Jumping, Plain, Stream, Told, jittered, numbers
from titan_ckpt.process import RandomState


class Once(Plain):
    """Data whose generator only its constructor uses."""

    def __init__(self) -> None:
        super().__init__(10)
        self.random = np.random.default_rng(1)
        self.added = self.random.random(10)

    def __getitem__(self, index: int) -> Any:
        return index + float(self.added[index])


class Drawn(Plain):
    def __init__(self) -> None:
        super().__init__(10)
        self.random = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Any:
        return index + float(torch.rand((), generator=self.random)) / 2


class Stated(Drawn):
    """The same, which gives its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])


def table(own: random.Random | None = None) -> Any:
    data = Dataset.from_dict({"a": [*range(10)]})
    if own is None:
        return data
    return data.with_transform(lambda rows: {"a": [number + own.random() for number in rows["a"]]})


class Drawing(Sampler[int]):
    """Draws each order from a generator that it holds."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.permutation(10).tolist())


class DrawnOnce(Sampler[int]):
    """Keeps the order that its constructor has drawn."""

    def __init__(self) -> None:
        self.own = random.Random(1)
        self.order = self.own.sample(range(10), 10)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class SeededAnew(Told):
    """Seeds its generator by the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.epoch)
        yield from torch.randperm(10, generator=self.generator).tolist()


class Around(Drawing):
    """The order of a sampler of torchdata, whose iterator has a state."""

    def __init__(self) -> None:
        self.inner = of_torchdata.RandomSampler(range(10), generator=seeded())

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class Turned(Sampler[list[int]]):
    """Batches in an order of its own generator."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.generator = inner, seeded()

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*BatchSampler(self.inner, 2, False)]
        yield from (batches[number] for number in torch.randperm(5, generator=self.generator).tolist())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def around() -> Any:
    own = np.random.default_rng(2)
    return lambda rows: [(row["a"] if isinstance(row, dict) else row) + own.random() / 2 for row in rows]


DATA: dict[str, Callable[[], Any]] = {
    "plain": lambda: Plain(10), "once": Once, "drawn": Drawn, "stated": Stated, "augmented": lambda: Augmented(10),
    "subset": lambda: Subset(Drawn(), range(10)), "table": table, "drawn table": lambda: table(random.Random(5)),
}  # fmt: skip
STREAMS: dict[str, Callable[[], Any]] = {"stream": Stream, "of datasets": numbers}
COLLATES: dict[str, Callable[[], Any]] = {
    "": lambda: None, "object": Jittered, "closure": around, "partial": lambda: partial(jittered, random.Random(4)),
}  # fmt: skip
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(10)),
    "random": lambda: RandomSampler(range(10), generator=seeded()),
    "distributed": lambda: DistributedSampler(range(10), 1, 0),  # type: ignore[arg-type]  # a length is enough
    "torchdata": lambda: of_torchdata.RandomSampler(range(10)),
    "torchdata, seeded": lambda: of_torchdata.RandomSampler(range(10), generator=seeded()),
    "torchdata, replacing": lambda: of_torchdata.RandomSampler(range(10), replacement=True, generator=seeded()),
    "torchdata, distributed": lambda: of_torchdata.StatefulDistributedSampler(range(10), 1, 0),
    "told": Told, "drawing": Drawing, "drawn once": DrawnOnce, "seeded anew": SeededAnew, "positioned": Jumping,
    "around": Around,
}  # fmt: skip
BATCHES: dict[str, Callable[[Any], Any]] = {
    "": lambda sampler: {"sampler": sampler, "batch_size": 2},
    "torch": lambda sampler: {"batch_sampler": BatchSampler(sampler, 2, False)},
    "torchdata": lambda sampler: {"batch_sampler": of_torchdata.BatchSampler(sampler, 2, False)},
    "turned": lambda sampler: {"batch_sampler": Turned(sampler)},
}
Case = tuple[str, str, str, str, int]


def loader_of(case: Case) -> Any:
    data, sampler, batches, collate, workers = case
    RandomState().reseed(1)
    given: dict[str, Any] = {"collate_fn": COLLATES[collate](), "num_workers": workers}
    if data in STREAMS:
        return StatefulDataLoader(STREAMS[data](), 2, **given)
    if sampler == "shuffle":
        return StatefulDataLoader(DATA[data](), 2, shuffle=True, generator=seeded(), **given)
    return StatefulDataLoader(DATA[data](), **BATCHES[batches](SAMPLERS[sampler]()), **given)


def drawn(number: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(number)
    data = draw.choice([*DATA, *STREAMS])
    sampler = draw.choice(["shuffle", *SAMPLERS])
    workers = draw.choice([0, 0, 0, 0, 0, 2])
    return data, sampler, draw.choice([*BATCHES]), draw.choice([*COLLATES]), workers
