"""torchdata's StatefulDataLoader as it is, over drawn data, samplers and collate functions: exact, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests import world
from tests.integrations.loader_cases import (
    Early,
    Jumping,
    Plain,
    Shared,
    Stream,
    end_workers,
    interleaved,
    numbers,
    plain,
    take_share,
)
from tests.integrations.unwrapped_cases import COLLATES, DATA, Case, SeededAnew, drawn, loader_of, seeded
from titan_ckpt.components.items.data_position import DataPosition
from titan_ckpt.components.items.item import DataRank
from titan_ckpt.components.known.loaders import seed_workers_apart, unwrapped_faults
from titan_ckpt.errors import ConfigError, LoadMismatchError, refuse
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.process import RandomState


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
    for number, state, before, at in saved:
        again = loader_of(case)
        torch.rand(5)
        position(again).restore(stored(state), {})
        RandomState().load_state_dict(before)
        rest = steps(again, [at])
        if [next(rest) for _ in rows[number:]] != rows[number:]:
            return True
    return False


@pytest.mark.parametrize("look", [lambda loader: refuse(*unwrapped_faults(loader, ())), PositionedLoader])
def test_the_loader_of_torchdatas_nodes_is_refused_by_name(look: Callable[[Any], object]) -> None:
    """Each epoch of a sampler with a generator would be the first one again."""
    with pytest.raises(ConfigError, match=r"torchdata\.nodes\.loader\.Loader: its state leaves out the generators"):
        look(nodes.Loader(nodes.SamplerWrapper(range(4))))


def test_a_stream_that_several_workers_interleave_at_random_is_refused_by_name() -> None:
    """datasets shifts the numbers of each worker when it is read, and says those of the first one until then."""
    assert [*unwrapped_faults(StatefulDataLoader(interleaved(), 2, num_workers=1), ())] == []
    (line,) = unwrapped_faults(StatefulDataLoader(interleaved(), 2, num_workers=2), ())
    assert "RandomlyCyclingMultiSourcesExamplesIterable: before a worker has returned a batch" in line


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
        (("plain", "positioned", "torch", "", 0), "sampler .*Jumping: a StatefulDataLoader does not hold its order"),
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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("size", "drop_last"), [(2, False), (4, False), (4, True)])
@pytest.mark.parametrize("sampler", [lambda: SeedableRandomSampler(Plain(10), data_seed=3), Jumping, Early])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_sampler_that_counts_its_epochs_by_itself_goes_on(
    sampler: Callable[[], Any], size: int, drop_last: bool, workers: int
) -> None:
    """Within an epoch and at its end, which a smaller last batch, also a dropped one, and read-ahead are beyond."""

    def epochs(loader: Any) -> Iterator[Any]:
        for number in count():
            yield from ((number, plain(batch), float(torch.rand(()))) for batch in loader)
            yield number

    torch.manual_seed(1)
    new = partial(StatefulDataLoader, Plain(10), size, drop_last=drop_last, num_workers=workers)
    loader = new(sampler=sampler())
    run, rows, saved = epochs(loader), [], []
    for _ in range(10):
        rows.append(next(run))
        saved.append((deepcopy(position(loader).value({})), torch.get_rng_state()))
    for number, (state, before) in enumerate(saved[:-1], 1):
        again = new(sampler=sampler())
        position(again).restore(stored(state), {})
        torch.set_rng_state(before)
        rest = [row[1:] for row in islice(epochs(again), 20) if isinstance(row, tuple)]
        end_workers(again)
        expected = [row[1:] for row in rows[number:] if isinstance(row, tuple)]
        assert rest[: len(expected)] == expected, f"after {number}"


@pytest.mark.parametrize(
    ("stream", "begin", "kept"),
    [
        (Stream, None, False),
        (Stream, None, True),
        (Shared, take_share, False),
        (Shared, take_share, True),
        (numbers, None, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_have_returned_the_smaller_last_batch_of_a_stream_read_no_more_of_it(
    stream: Callable[[], Any], begin: Any, kept: bool
) -> None:
    """Each batch is read by a run of its own; a worker whose turn is not yet to come goes on where it was."""
    new = partial(StatefulDataLoader, num_workers=2, persistent_workers=kept, worker_init_fn=begin)
    run = steps(new(stream(), 6), [0])
    rows = [next(run) for _ in range(9)]
    state: Any = None
    before = RandomState().state_dict()
    for number, row in enumerate(rows):
        again = new(stream(), 6)
        if number:
            position(again).restore(stored(state), {})
            RandomState().load_state_dict(before)
        assert next(steps(again, [0]))[0] == row[0], number
        state, before = deepcopy(position(again).value({})), RandomState().state_dict()
        end_workers(again)


class Longer(Jumping):
    """Has more entries than its length says."""

    def __len__(self) -> int:
        return 8


def test_an_order_that_is_longer_than_its_length_goes_on_there() -> None:
    loader = StatefulDataLoader(Plain(10), 2, sampler=Longer())
    for number, _ in enumerate(loader, 1):
        if number == 4:
            state = deepcopy(position(loader).value({}))
    again = StatefulDataLoader(Plain(10), 2, sampler=Longer())
    position(again).restore(stored(state), {})
    assert (len([*again]), len([*again])) == (1, 5)


def count_up(started: Any, _: int) -> None:
    with started.get_lock():
        started.value += 1


@pytest.mark.parametrize("sampler", [Jumping, partial(StatefulDistributedSampler, Plain(10), 1, 0)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_load_within_an_epoch_starts_each_worker_once(sampler: Callable[[], Any]) -> None:
    """Also if a sampler gives its state, which it has after the load."""
    started = torch.multiprocessing.get_context("fork").Value("i", 0)
    new = partial(StatefulDataLoader, Plain(10), 2, num_workers=2, worker_init_fn=partial(count_up, started))
    run = iter(loader := new(sampler=sampler()))
    next(run)
    again = new(sampler=sampler())
    position(again).restore(stored(deepcopy(position(loader).value({}))), {})
    assert plain(next(iter(again))) == plain(next(run))
    assert started.value == 4


def test_generators_that_are_made_in_the_middle_of_a_run_are_refused() -> None:
    loader = loader_of(("drawn", "sequential", "", "", 0))
    state = position(loader).value({})
    with pytest.raises(LoadMismatchError, match=r"draws from 1 random generator .* this run's from 0"):
        position(loader_of(("plain", "sequential", "", "", 0))).check(stored(state))


def test_an_epoch_that_no_sampler_takes_is_refused() -> None:
    """The step has the epoch of a sampler that is told it, and this run's sampler is told none."""
    state = position(loader_of(("plain", "told", "", "", 0))).value({})
    with pytest.raises(LoadMismatchError, match=r"has 1 sampler with set_epoch\(\), this run's has 0"):
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


class Aware(Jumping):
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


class Mixed(Stream):
    """Holds streams of datasets."""

    def __init__(self, streams: Any) -> None:
        super().__init__()
        self.streams = streams


@pytest.mark.parametrize("held", [list, lambda streams: dict(enumerate(streams)), lambda streams: [[streams[-1]]]])
def test_every_stream_that_a_dataset_holds_is_looked_at(held: Callable[[Any], Any], tmp_path: Path) -> None:
    """Also the last of many, and those in a dict."""
    streams = [*(numbers() for _ in range(20)), numbers().shuffle(1, buffer_size=3)]
    with pytest.raises(ConfigError, match=r"leaves out the buffer of shuffle\(\)"):
        world.manager(
            tmp_path, torch.nn.Linear(1, 1), save=None, dataloader=StatefulDataLoader(Mixed(held(streams)), 2)
        )
