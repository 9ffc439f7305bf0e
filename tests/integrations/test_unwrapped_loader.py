"""torchdata's StatefulDataLoader as it is, over drawn data, samplers and collate functions: exact, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as of_torchdata

from tests import world
from tests.integrations.loader_cases import Augmented, Jittered, Plain, Stream, Told, jittered, numbers, plain
from titan_ckpt.components.items.data_position import DataPosition, DataRank
from titan_ckpt.components.known.loaders import seed_workers_apart, unwrapped_faults
from titan_ckpt.errors import ConfigError, LoadMismatchError, refuse
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.rng import RandomState


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


class Positioned(Drawing):
    """Returns to the middle of its order by its state."""

    def __init__(self) -> None:
        self.at = self.seed = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.seed).permutation(10).tolist()
        while self.at < 10:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.seed = 0, self.seed + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seed = state["at"], state["seed"]


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
    "told": Told, "drawing": Drawing, "drawn once": DrawnOnce, "seeded anew": SeededAnew, "positioned": Positioned,
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


def steps(loader: Any, epoch: list[int]) -> Iterator[Any]:
    """Yield batches of epoch after epoch, of which samplers are told, each with a number that is drawn after it."""
    around = loader.batch_sampler
    samplers: list[Any] = [getattr(around, "sampler", None), getattr(around, "inner", None)]
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch[0])
    for batch in loader:
        yield plain(batch), float(torch.rand(()))
    epoch[0] += 1
    yield from steps(loader, epoch)


def differs(case: Case) -> bool:
    """Return whether a run that is resumed within its first or second epoch reads or draws anything else."""
    loader, epoch = loader_of(case), [0]
    torch.rand(3)
    run, rows, saved = steps(loader, epoch), [], []
    for number in range(13):
        rows.append(next(run))
        if number in (1, 6):
            saved.append((number + 1, deepcopy(position(loader).value({})), RandomState().state_dict(), epoch[0]))
    for number, state, drawn, at in saved:
        again = loader_of(case)
        torch.rand(5)
        position(again).restore(stored(state), {})
        RandomState().load_state_dict(drawn)
        rest = steps(again, [at])
        if [next(rest) for _ in rows[number:]] != rows[number:]:
            return True
    return False


def position(loader: Any) -> DataPosition:
    return DataPosition(loader, lambda: DataRank(0, 1))


def stored(state: Any) -> Any:
    return SimpleNamespace(values={"dataloader": [state]})


@pytest.mark.parametrize("number", range(60))
def test_a_drawn_loader_goes_on_exactly_or_is_refused(number: int) -> None:
    case = drawn(number)
    is_refused = bool([*unwrapped_faults(loader_of(case), ())])
    assert is_refused == differs(case), case


@pytest.mark.parametrize(
    "case",
    [
        *((data, "sequential", "", "", 0) for data in DATA),
        *(("plain", "sequential", "", collate, 0) for collate in COLLATES),
        ("plain", "shuffle", "", "", 0), ("stated", "sequential", "", "", 2), ("once", "sequential", "", "", 2),
        ("plain", "distributed", "", "", 0), ("plain", "distributed", "", "", 2), ("plain", "told", "torchdata", "", 0),
        *(("plain", sampler, "", "", 0) for sampler in ("drawn once", "seeded anew", "positioned", "around")),
    ],
)  # fmt: skip
def test_what_is_exact_is_not_refused(case: Case) -> None:
    """Also what a generator or an epoch decides: steps hold the one, and a loop tells the other after the load."""
    assert not [*unwrapped_faults(loader_of(case), ())]
    assert not differs(case)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (("plain", "drawing", "", "", 0), r"sampler .*Drawing: .*titan_ckpt\.PositionedLoader"),
        (("plain", "positioned", "torch", "", 0), "sampler .*Positioned: a StatefulDataLoader does not hold its order"),
        (("plain", "torchdata", "torch", "", 0), "sampler .*RandomSampler: a StatefulDataLoader does not hold"),
        (("plain", "sequential", "turned", "", 0), "sampler .*Turned: a StatefulDataLoader does not hold"),
        (("drawn", "sequential", "", "", 2), r"a torch\._C\.Generator: each worker process draws from a copy"),
        (("stream", "", "", "object", 2), r"a random\.Random: each worker process draws from a copy"),
    ],
)
def test_what_differs_is_refused_by_name_and_can_be_allowed(case: Case, fault: str, tmp_path: Path) -> None:
    assert differs(case), "it is exact: let it run"
    with pytest.raises(ConfigError, match=f'{fault}(?s:.*)checkpoint.allow = \\["(.*)"\\]') as refused:
        world.manager(tmp_path, torch.nn.Linear(1, 1), save=None, dataloader=loader_of(case))
    name = str(refused.value).rpartition('["')[2].partition('"]')[0]
    assert not [*unwrapped_faults(loader_of(case), [name])]


def test_a_sampler_that_counts_its_epochs_by_itself_goes_on() -> None:
    """Within the second epoch, and at the end of the first one."""

    def new() -> Any:
        return StatefulDataLoader(Plain(10), 2, sampler=SeedableRandomSampler(Plain(10), data_seed=3))

    for number in (5, 7):
        loader, again = new(), new()
        run = chain.from_iterable(repeat(loader))
        for _ in range(number):
            next(run)
        position(again).restore(stored(deepcopy(position(loader).value({}))), {})
        rest = chain.from_iterable(repeat(again))
        assert [plain(next(rest)) for _ in range(9)] == [plain(next(run)) for _ in range(9)]


def test_generators_that_are_made_in_the_middle_of_a_run_are_refused() -> None:
    loader = loader_of(("drawn", "sequential", "", "", 0))
    state = position(loader).value({})
    with pytest.raises(LoadMismatchError, match=r"draws from 1 random generator .* this run's from 0"):
        position(loader_of(("plain", "sequential", "", "", 0))).check(stored(state))


class EachSeeded(Plain):
    """Makes its generator at the first sample, and seeds it for each."""

    own: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.own is None:
            self.own = torch.Generator()
        self.own.manual_seed(index)
        return index + float(torch.rand((), generator=self.own))


class EachSeededOwn(EachSeeded):
    """Has its generator from the beginning."""

    def __init__(self) -> None:
        super().__init__(10)
        self.own = torch.Generator()


class Named(Plain):
    """Takes names from the operating system's random numbers, which have no state."""

    def __init__(self) -> None:
        super().__init__(10)
        self.names = random.SystemRandom()

    def __getitem__(self, index: int) -> int:
        return index + 0 * self.names.randrange(9)


class SeededByAnother(SeededAnew):
    """Seeds its generator in a method that its order calls."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def order(self) -> list[int]:
        self.generator.manual_seed(self.epoch)
        return torch.randperm(10, generator=self.generator).tolist()


class Aware(Positioned):
    """Knows its epoch by its state, and is told it."""

    def set_epoch(self, epoch: int) -> None:
        self.seed = epoch


class Rising(Plain):
    """Adds a number that the loop raises, which is its state."""

    added = 0

    def __getitem__(self, index: int) -> int:
        return index + self.added

    def state_dict(self) -> dict[str, int]:
        return {"added": self.added}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.added = state["added"]


def noise_of(data: Any) -> float:
    return float(torch.rand((), generator=data.noise))


class Helped(Plain):
    def __init__(self) -> None:
        super().__init__(10)
        self.noise = seeded()

    def __getitem__(self, index: int) -> Any:
        return index + noise_of(self)


class Settings:
    def __init__(self) -> None:
        self.noise = seeded()


class Holding(Plain):
    """Draws from what an object of another class holds."""

    def __init__(self) -> None:
        super().__init__(10)
        self.settings = Settings()

    def __getitem__(self, index: int) -> Any:
        return index + noise_of(self.settings)


@pytest.mark.parametrize(
    "over",
    [
        lambda: StatefulDataLoader(EachSeededOwn(), 2, num_workers=2),
        lambda: StatefulDataLoader(EachSeeded(10), 2),
        lambda: StatefulDataLoader(Named(), 2),
        lambda: StatefulDataLoader(Plain(10), 2, sampler=SeededByAnother()),
    ],
)
def test_generators_without_a_past_are_neither_refused_nor_stored(over: Callable[[], Any]) -> None:
    assert not [*unwrapped_faults(over(), ())]
    loader = over()
    run = steps(loader, [0])
    for _ in range(4):
        next(run)
    state = position(loader).value({})
    again = over()
    position(again).check(stored(state))
    position(again).restore(stored(state), {})
    assert next(steps(again, [0]))[0] == next(run)[0]


def test_data_and_samplers_have_their_states_after_a_load() -> None:
    """A loop begins at the epoch that they know."""
    loader = StatefulDataLoader(Rising(10), 2, sampler=Aware())
    loader.dataset.added, loader.sampler.seed = 7, 3
    next(iter(loader))
    again = StatefulDataLoader(Rising(10), 2, sampler=Aware())
    position(again).restore(stored(position(loader).value({})), {})
    assert (again.dataset.added, again.sampler.seed) == (7, 3)


def test_what_begins_an_epoch_after_a_load_at_the_end_of_one_is_not_undone() -> None:
    """Such as data that changes by the epoch, and a number that is drawn for it."""

    def run(loader: Any) -> Any:
        loader.dataset.added += 100
        return float(torch.rand((), generator=loader.generator)), [plain(batch) for batch in loader]

    def new() -> Any:
        return StatefulDataLoader(Rising(10), 2, shuffle=True, generator=seeded())

    loader, again = new(), new()
    run(loader)
    position(again).restore(stored(deepcopy(position(loader).value({}))), {})
    assert run(again) == run(loader)


@pytest.mark.parametrize("data", [Helped, Holding])
@pytest.mark.parametrize(
    "faults",
    [
        lambda data: PositionedLoader(DataLoader(data, 2, num_workers=2)),
        lambda data: refuse(*unwrapped_faults(StatefulDataLoader(data, 2, num_workers=2), ())),
    ],
)
def test_generators_that_others_draw_from_are_found(data: Callable[[], Any], faults: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="each worker process draws from a copy"):
        faults(data())


def test_a_step_of_workers_that_are_kept_loads_where_nobody_seeds_them_apart() -> None:
    """A run without saves does not."""

    def new() -> Any:
        return StatefulDataLoader(Plain(10), 2, num_workers=1, persistent_workers=True)

    loader = new()
    seed_workers_apart(loader)
    position(new()).check(stored(position(loader).value({})))
