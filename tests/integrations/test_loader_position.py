"""PositionedLoader: a resumed loader goes on exactly where it was, and reads nothing that came before."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import IterableDataset as Streamed
from datasets import interleave_datasets
from requests import Session
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from transformers import DataCollatorForLanguageModeling

from tests import world
from tests.integrations.loader_cases import (
    DRAWING,
    KEPT,
    LOADERS,
    SAMPLED,
    STREAMS,
    Counting,
    Estimated,
    Jittered,
    Numbers,
    Own,
    Plain,
    Remembering,
    Shared,
    Sized,
    Stream,
    Told,
    by_own_generator,
    drawing,
    end_workers,
    interleaved,
    judge,
    judge_sampler,
    judge_stream,
    noisy,
    numbers,
    plain,
    shuffled,
    steps,
    take_share,
    with_noise,
)
from titan_ckpt.components.classes import class_name
from titan_ckpt.components.items.item import DataRank, Stored
from titan_ckpt.components.items.states import Generators
from titan_ckpt.components.known.loaders import unwrapped_faults
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.process import generators_kept

pytestmark = pytest.mark.usefixtures("cheap_forks", "workers_end")


@pytest.mark.parametrize("kind", [*LOADERS, *SAMPLED])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_resumed_loader_returns_the_same_batches(kind: str) -> None:
    assert judge_sampler((LOADERS | SAMPLED)[kind]) == ("exact", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves a .csv file open
@pytest.mark.parametrize("kind", [*STREAMS, *DRAWING])
def test_a_resumed_stream_returns_the_same_examples(kind: str) -> None:
    verdict, note = judge_stream((STREAMS | DRAWING)[kind])
    gc.collect()  # such a file is this test's and not the next one's
    assert verdict == "exact", note


def test_only_what_follows_is_read() -> None:
    """The dataset is asked for no sample of a skipped batch."""
    loader = PositionedLoader(by_own_generator())
    run = steps(loader)
    for _ in range(3):
        next(run)
    resumed = PositionedLoader(by_own_generator())
    resumed.load_state_dict(loader.state_dict())
    next(steps(resumed))
    next(run)
    assert resumed.inner.dataset.read == loader.inner.dataset.read[6:]


def share(rank: int, size: int) -> PositionedLoader:
    sampler: DistributedSampler[int] = DistributedSampler(Plain(24), size, rank, seed=5)
    return PositionedLoader(DataLoader(Plain(24), 2, sampler=sampler))


def test_a_loader_that_was_read_before_and_keeps_its_workers_goes_on_exactly() -> None:
    """Its iterator has an order of its own, as the one has that Lightning makes before the position is known."""

    def read() -> PositionedLoader:
        loader = DataLoader(Plain(10), 2, shuffle=True, num_workers=1, persistent_workers=True)
        next(iter(loader))
        return PositionedLoader(loader)

    whole = steps(before := read())
    next(whole), next(whole)
    resumed = read()
    resumed.load_state_dict(before.state_dict())
    expected = [next(whole) for _ in range(8)]
    rest = steps(resumed)
    assert [next(rest) for _ in range(8)] == expected


def test_another_number_of_ranks_goes_on_at_the_same_batch() -> None:
    """Two ranks' positions become four ranks' positions, if whole batches were read by then; else it is refused.

    The sampler says how many shares there are: ranks of tensor parallelism read the same one.
    """
    loaders = [share(rank, 2) for rank in range(2)]
    assert [(loader.dp_rank, loader.dp_world_size) for loader in loaders] == [(0, 2), (1, 2)]
    runs = [steps(loader) for loader in loaders]
    read = [number for _ in range(2) for run in runs for number in next(run)[0]]
    resumed = [share(rank, 4) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dicts([old.state_dict() for old in loaders])
    again = [steps(loader) for loader in resumed]
    rest = [number for run in again for _ in range(2) for number in next(run)[0]]
    assert sorted(read + rest) == [*range(24)]
    next(runs[0]), next(runs[1])
    with pytest.raises(LoadMismatchError, match="3 batches each, and 4 ranks cannot continue there"):
        share(0, 4).load_state_dicts([old.state_dict() for old in loaders])


def test_a_position_in_other_batches_is_refused() -> None:
    """A different batch size or length is named, with both values."""
    loader = PositionedLoader(DataLoader(Numbers(), 2))
    next(steps(loader))
    with pytest.raises(LoadMismatchError, match="length was 5, now 4; batch_size was 2, now 3"):
        PositionedLoader(DataLoader(Numbers(), 3)).load_state_dict(loader.state_dict())


def test_a_loop_that_leaves_the_rest_of_an_epoch_out_begins_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    """The sampler is told another epoch after a break, as Fabric tells it: its order is a new one.

    A step that was saved before is resumed within the epoch, so the log says what is left out.
    """
    loader = share(0, 2)
    for expected in range(3):
        next(iter(loader))
        assert (loader.epoch, loader.inner.sampler.epoch) == (expected, expected)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(",")[0] for line in said] == [
        f"data: the loop leaves epoch {n} after 1 batch" for n in (0, 1)
    ]
    assert "call the loader's next_epoch() before that save" in said[0]


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_random_numbers_between_a_save_at_an_epochs_end_and_the_next_epoch_are_told(
    generator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation draws a seed, which a run that is resumed there does not. They are told once."""
    loader = PositionedLoader(DataLoader(Plain(4), 2, shuffle=True))
    for epoch in range(4):
        for _ in loader:
            loader.state_dict()
        for _ in DataLoader(Plain(2), generator=generator) if epoch else ():
            pass
    said = [record.getMessage() for record in caplog.records]
    assert ["between a save after an epoch's last batch" in line for line in said] == [True] * (generator is None)


def end_load() -> None:
    """Set the process's generators to what they are, as a manager's load does last."""
    generators = Generators()
    generators.restore(Stored(1, {generators.key: generators.value({})}), {})


def test_runs_of_one_process_that_are_loaded_before_either_goes_on_have_the_numbers_of_their_own_steps() -> None:
    expected, resumed = [], []
    for _ in range(2):
        torch.manual_seed(1)
        loader = PositionedLoader(DataLoader(Plain(8), 2, shuffle=True))
        run = steps(loader)
        next(run)
        resumed.append(PositionedLoader(DataLoader(Plain(8), 2, shuffle=True)))
        resumed[-1].load_state_dict(loader.state_dict())
        end_load()
        expected.append([*islice(run, 7)])
    assert [[*islice(steps(loader), 7)] for loader in resumed] == expected


def test_loaders_of_one_load_go_on_in_turn_whatever_else_the_load_restores() -> None:
    """Between them a load may keep the process's generators, as it does where it begins a loader of torchdata."""

    def loaders() -> list[PositionedLoader]:
        return [
            PositionedLoader(DataLoader(Plain(8), 2, collate_fn=lambda rows: rows[0] + torch.rand(()))) for _ in "ab"
        ]

    before = loaders()
    run = zip(*map(steps, before), strict=True)
    next(run)
    again = loaders()
    for old, new in zip(before, again, strict=True):
        new.load_state_dict(old.state_dict())
        with generators_kept():
            torch.rand(())
    end_load()
    expected = [*islice(run, 3)]
    assert [*islice(zip(*map(steps, again), strict=True), 3)] == expected


def test_a_step_of_an_earlier_version_without_the_state_of_its_data_is_refused() -> None:
    state = PositionedLoader(DataLoader(Plain(10), 2)).state_dict()
    state["facts"] = {name: fact for name, fact in state["facts"].items() if "state_dict" not in name}
    PositionedLoader(DataLoader(Plain(10), 2)).load_state_dict(state)
    with pytest.raises(LoadMismatchError, match=r"datasets whose state_dict\(\) is stored was 0, now 1"):
        PositionedLoader(DataLoader(Remembering(10), 2)).load_state_dict(state)


class Working(Own):
    """A loader of the user's own that says how many workers it has."""

    num_workers = 2


@pytest.mark.parametrize("over", [Working, lambda: StatefulDataLoader(Unsaid(), num_workers=1)])
def test_what_draws_by_workers_is_judged_where_there_is_no_dataset_or_no_state(over: Callable[[], Any]) -> None:
    said = [*unwrapped_faults(over(), ())]
    assert len(said) == isinstance(over(), StatefulDataLoader), said
    PositionedLoader(over(), allow=[class_name(Unsaid())])


def test_a_generator_of_data_whose_state_this_process_cannot_ask_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"random\.Random: each worker process draws from a copy of its own"):
        PositionedLoader(StatefulDataLoader(OfWorker(), num_workers=1))


def left(loader: PositionedLoader, form: str, epochs: int, saved: list[Any]) -> list[Any]:
    """Return the batches of epochs that a loop leaves after two, or reads to their end, by next_epoch() at each end."""
    rows: list[Any] = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            if form == "at the top" and number == 2:
                break
            rows.append((plain(batch), float(torch.rand(()))))
            if loader.at_end if form == "to the end" else number == 1:
                loader.next_epoch()
                saved.append((len(rows), loader.state_dict(), torch.get_rng_state()))
                if form == "at once":
                    break
    end_workers(loader)
    return rows


LEFT: dict[str, Callable[[], Any]] = {
    "in an order": by_own_generator,
    "workers": lambda: DataLoader(Numbers(), 2, shuffle=True, num_workers=2),
    "workers that are kept": LOADERS["noise of a worker that is kept"],
    "a sampler with a state": LOADERS["a sampler with a state"],
    "a StatefulDataLoader": LOADERS["noise of a worker, stateful"],
    "data with a state": lambda: StatefulDataLoader(Remembering(10), 2),
    "data with a state, workers": lambda: StatefulDataLoader(Remembering(10), 2, num_workers=2),
    "a stream": LOADERS["a stream with a length"],
    "a stream that is at its end": lambda: DataLoader(Stream(), 5),
    "a stream of datasets": lambda: StatefulDataLoader(numbers(), 2),
    "a shuffled stream": LOADERS["a shuffled stream, workers"],
}


@pytest.mark.parametrize("form", ["at once", "at the top", "to the end"])
@pytest.mark.parametrize("kind", LEFT)
def test_a_run_resumed_after_next_epoch_begins_the_epoch_that_the_loop_begins(kind: str, form: str) -> None:
    torch.manual_seed(1)
    saved: list[Any] = []
    rows = left(PositionedLoader(LEFT[kind]()), form, 3, saved)
    for epoch, (number, state, drawn) in enumerate(saved, 1):
        resumed = PositionedLoader(LEFT[kind]())
        resumed.load_state_dict(deepcopy(state))
        torch.set_rng_state(drawn)
        assert left(resumed, form, 3 - epoch, []) == rows[number:]


@pytest.mark.parametrize("kind", LEFT)
def test_next_epoch_right_after_a_load_leaves_the_epoch_that_was_resumed_or_is_refused(kind: str) -> None:
    """A step was saved before the loop left the epoch, and whoever resumes it leaves the epoch too."""
    torch.manual_seed(1)
    loader = PositionedLoader(LEFT[kind]())
    for number, _ in enumerate(loader):
        if number == 1:
            state, drawn = deepcopy(loader.state_dict()), torch.get_rng_state()
            loader.next_epoch()
    rows = left(loader, "at once", 2, [])
    resumed = PositionedLoader(LEFT[kind]())
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    if "stream" in kind:
        with pytest.raises(ConfigError, match=r"epoch 0, within which .* is not read on yet"):
            resumed.next_epoch()
    else:
        resumed.next_epoch()
        assert left(resumed, "at once", 2, []) == rows


@pytest.mark.parametrize(
    ("over", "name"),
    [
        (lambda: StatefulDataLoader(Stream(), 2), "Stream"),
        (lambda: StatefulDataLoader(Remembering(10), 2, **KEPT), "Remembering"),
        (Own, "Own"),
        (lambda: DataLoader(Plain(10), 2, sampler=StatefulDistributedSampler(Plain(10), 1, 0)), "StatefulDistributed"),
    ],
)
def test_data_that_does_not_say_where_it_begins_after_a_left_epoch_is_refused(
    over: Callable[[], Any], name: str
) -> None:
    """In the middle of an epoch; what is read to its end needs no call."""
    loader = PositionedLoader(over())
    for number, _ in enumerate(loader):
        if number == 1:
            with pytest.raises(ConfigError, match=f"next_epoch: .*{name}.* does not say where an epoch begins"):
                loader.next_epoch()
    assert loader.epoch == 1


def test_a_stream_that_workers_interleave_at_random_is_read_again_before_each_has_returned_a_batch() -> None:
    """Until then its state has the random numbers of the first worker for all of them."""
    run = steps(loader := PositionedLoader(StatefulDataLoader(interleaved(), 2, num_workers=2)))
    next(run)
    resumed = PositionedLoader(StatefulDataLoader(interleaved(), 2, num_workers=2))
    resumed.load_state_dict(loader.state_dict())
    expected = [*islice(run, 6)]
    assert [*islice(steps(resumed), 6)] == expected


def test_a_generator_that_the_run_had_and_has_no_more_is_refused_by_name() -> None:
    """The order would be drawn from other random numbers."""
    loader = PositionedLoader(DataLoader(Plain(10), 2, shuffle=True, generator=torch.Generator()))
    with pytest.raises(LoadMismatchError, match="of the loader and its samplers was 1, now 0"):
        PositionedLoader(DataLoader(Plain(10), 2, shuffle=True)).load_state_dict(loader.state_dict())


def test_batches_in_the_order_in_which_workers_are_done_are_refused() -> None:
    """One worker has an order."""
    assert len(PositionedLoader(DataLoader(Plain(10), 2, num_workers=1, in_order=False))) == 5
    with pytest.raises(ConfigError, match=r"in_order=False: .* would read some twice and others not at all"):
        PositionedLoader(DataLoader(Plain(10), 2, num_workers=2, in_order=False))


@pytest.mark.parametrize("kind", ["in an order", "a stream", "workers"])
def test_a_loop_that_breaks_off_after_one_batch_more_than_a_save_goes_on(kind: str) -> None:
    """It says by the loader's count where; the run that is resumed reads that batch too."""

    def rows_of(loader: PositionedLoader, epochs: int, saved: list[Any]) -> list[Any]:
        rows: list[Any] = []
        for left in range(epochs, 0, -1):
            for batch in loader:
                if loader.num_batches == 4:
                    break
                rows.append((plain(batch), float(torch.rand(()))))
                saved.append((len(rows), deepcopy(loader.state_dict()), torch.get_rng_state(), left))
        end_workers(loader)
        return rows

    torch.manual_seed(1)
    saved: list[Any] = []
    rows = rows_of(PositionedLoader(LEFT[kind]()), 3, saved)
    for number, state, drawn, left in saved[2::3]:
        resumed = PositionedLoader(LEFT[kind]())
        resumed.load_state_dict(state)
        torch.set_rng_state(drawn)
        assert rows_of(resumed, left, []) == rows[number:]


class Long(Sized):
    """A stream that goes on after as many numbers as its length says."""

    def __iter__(self) -> Iterator[int]:
        while self.next < 16:
            self.next += 1
            yield self.next - 1
        self.next = 0


def until_length(loader: PositionedLoader) -> Iterator[Any]:
    """Yield batches of epochs that the loop leaves after as many as there are, without asking for more."""
    while True:
        for batch in islice(loader, len(loader)):
            yield loader.epoch, plain(batch), float(torch.rand(()))


@pytest.mark.parametrize(("stream", "length"), [(Sized, 10), (Long, 16)])
def test_a_loop_that_stops_at_the_length_of_a_stream_loses_nothing(stream: Callable[[], Any], length: int) -> None:
    """The next epoch begins after what it has read, or anew if that was all; so does one that is resumed there."""
    torch.manual_seed(1)
    loader = PositionedLoader(DataLoader(stream(), 5))
    run, rows, saved = until_length(loader), [], []
    for _ in range(9):
        rows.append(next(run))
        saved.append((len(rows), deepcopy(loader.state_dict()), torch.get_rng_state()))
    numbers = [number for _, batch, _ in rows for number in batch]
    assert numbers == [number % length for number in range(len(numbers))]
    for number, state, drawn in saved[1::2]:
        resumed = PositionedLoader(DataLoader(stream(), 5))
        resumed.load_state_dict(state)
        torch.set_rng_state(drawn)
        again = until_length(resumed)
        assert [next(again) for _ in rows[number:]] == rows[number:]


def test_a_step_that_was_saved_before_the_end_of_a_stream_was_noted_goes_on() -> None:
    """Such a step has the position of a stream that is at its end, which was read when the next epoch began."""
    torch.manual_seed(1)
    run = steps(loader := PositionedLoader(DataLoader(Sized(), 5)))
    next(run), next(run)
    state = deepcopy(loader.state_dict())
    state = {name: value for name, value in state.items() if name not in ("is_ended", "is_unread")} | {
        "epoch": 1, "batches": 0, "start": None, "ahead": None, "source": {"next": 10}
    }  # fmt: skip
    drawn, expected = torch.get_rng_state(), next(run)
    resumed = PositionedLoader(DataLoader(Sized(), 5))
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert (next(steps(resumed)), resumed.epoch) == (expected, 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_step_that_was_saved_before_the_end_of_a_stateful_loader_was_read_has_no_empty_epoch(workers: int) -> None:
    """Such a step has the state of a loader that has returned its last batch, and the number of the next epoch."""

    def new() -> Any:
        return StatefulDataLoader(Sized(), 5, num_workers=workers)

    before = iter(inner := new())
    next(before), next(before)
    torch.manual_seed(1)
    run = steps(loader := PositionedLoader(new()))
    next(run), next(run)
    state, drawn = {**deepcopy(loader.state_dict()), "source": deepcopy(inner.state_dict())}, torch.get_rng_state()
    expected = [next(run) for _ in range(2)]
    resumed = PositionedLoader(new())
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert ([(plain(batch), float(torch.rand(()))) for batch in resumed], resumed.epoch) == (expected, 2)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("stream", "workers", "begin"), [(Stream, 2, None), (Sized, 1, None), (Shared, 2, take_share)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_have_returned_the_smaller_last_batch_of_a_stream_read_no_more_of_it(
    stream: Callable[[], Any], workers: int, begin: Any, kept: bool
) -> None:
    """One after another, and all of them at the end of the epoch, within it and when its end was read."""

    def loader() -> Any:
        return StatefulDataLoader(stream(), 6, num_workers=workers, persistent_workers=kept, worker_init_fn=begin)

    assert judge(loader, (1, 2, 3, 4, 7)) == ("exact", "")
    torch.manual_seed(1)
    run = steps(whole := PositionedLoader(loader()))
    rows = [next(run) for _ in range(8)]
    end_workers(whole)
    torch.manual_seed(1)
    state: Any = None
    for number, row in enumerate(rows):  # each in a run of its own
        position = PositionedLoader(loader())
        if state is not None:
            position.load_state_dict(state)
        assert next(steps(position)) == row, number
        state = deepcopy(position.state_dict())
        end_workers(position)


def test_a_save_right_after_a_load_is_of_the_position_that_was_loaded() -> None:
    """A stream goes there when it is read."""
    for batches in (2, 4, 5):
        run = steps(loader := PositionedLoader(DataLoader(Stream(), 3)))
        for _ in range(batches):
            next(run)
        state = deepcopy(loader.state_dict())
        resumed = PositionedLoader(DataLoader(Stream(), 3))
        resumed.load_state_dict(state)
        again = PositionedLoader(DataLoader(Stream(), 3))
        again.load_state_dict(deepcopy(resumed.state_dict()))
        assert next(steps(again))[0] == next(run)[0]


def test_a_sampler_with_a_state_begins_the_next_epoch_at_its_start_after_a_resume_within_a_longer_one() -> None:
    """A batch after as many as the length says; torchdata's sampler takes a state for its next order."""

    def new() -> PositionedLoader:
        order = StatefulDistributedSampler(Plain(10), 1, 0)
        return PositionedLoader(DataLoader(Plain(10), batch_sampler=Estimated(order, 3, False)))

    run = steps(loader := new())
    next(run), next(run)
    resumed = new()
    resumed.load_state_dict(deepcopy(loader.state_dict()))
    rest = steps(resumed)
    assert [next(rest)[0] for _ in range(6)] == [next(run)[0] for _ in range(6)]


def test_ranks_whose_last_batches_differ_in_size_are_in_the_same_epoch() -> None:
    """Only the rank of the smaller one sees that the stream has ended."""
    loaders = [
        PositionedLoader(DataLoader(Streamed.from_generator(range_of, gen_kwargs={"end": n}), 4)) for n in (7, 8)
    ]
    for loader in loaders:
        next(run := steps(loader)), next(run)
    assert [(loader.epoch, loader.num_batches, loader.at_end) for loader in loaders] == [(0, 2, False)] * 2
    states = [loader.state_dict() for loader in loaders]
    assert [(state["epoch"], state["batches"]) for state in states] == [(0, 2)] * 2


def range_of(end: int) -> Iterator[dict[str, int]]:
    yield from ({"a": number} for number in range(end))


def test_an_evaluation_over_the_data_of_the_training_within_an_epoch_ends_no_loop() -> None:
    loader = PositionedLoader(DataLoader(Plain(10), 2))
    read = []
    for batch in loader:
        read += batch.tolist()
        assert len([*loader]) == 5
    assert read == [*range(10)]


def test_an_evaluation_after_next_epoch_does_not_let_the_epoch_go_on() -> None:
    loader = PositionedLoader(DataLoader(Plain(10), 2))
    read = []
    for batch in loader:
        read += batch.tolist()
        loader.next_epoch()
        assert len([*loader]) == 5
    assert read == [0, 1]


def test_another_number_of_ranks_reads_the_same_samples() -> None:
    """A position in a dataset of a different size means nothing, although the ranks' lengths differ anyway."""
    loaders = [share(rank, 2) for rank in range(2)]
    sampler: DistributedSampler[int] = DistributedSampler(Plain(40), 4, 0, seed=5)
    other = PositionedLoader(DataLoader(Plain(40), 2, sampler=sampler))
    with pytest.raises(LoadMismatchError, match="samples was 24, now 40"):
        other.load_state_dicts([old.state_dict() for old in loaders])


class Blocks(DistributedSampler[int]):
    """Gives each rank a block of the data."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * 12, self.rank * 12 + 12))


@pytest.mark.parametrize("loader", [lambda rank: DataLoader(Plain(24), 2), lambda rank: over_blocks(rank)])
def test_data_that_is_not_dealt_in_turn_needs_the_same_number_of_ranks(loader: Callable[[int], Any]) -> None:
    """Two ranks that have read a batch each have not read the first two batches of one rank."""
    loaders = [PositionedLoader(loader(rank), data_rank=DataRank(rank, 2)) for rank in range(2)]
    for position in loaders:
        next(iter(position))
    with pytest.raises(LoadMismatchError, match="1 ranks cannot continue there, because no DistributedSampler divides"):
        PositionedLoader(loader(0), data_rank=DataRank(0, 1)).load_state_dicts([p.state_dict() for p in loaders])


def over_blocks(rank: int) -> Any:
    return DataLoader(Plain(24), 2, sampler=Blocks(Plain(24), 2, rank))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"shuffle": True}, {}, "RandomSampler.* now .*SequentialSampler"),
        ({"sampler": DistributedSampler(Plain(24), 1, 0)},
         {"sampler": DistributedSampler(Plain(24), 1, 0, shuffle=False)},
         r"shuffle was \[True\], now \[False\]"),
    ],
)  # fmt: skip
def test_a_position_in_another_order_is_refused(before: dict[str, Any], now: dict[str, Any], said: str) -> None:
    """The batch of the same number has other samples."""
    loader = PositionedLoader(DataLoader(Plain(24), 2, **before))
    next(iter(loader))
    with pytest.raises(LoadMismatchError, match=said):
        PositionedLoader(DataLoader(Plain(24), 2, **now)).load_state_dict(loader.state_dict())


def seeded() -> Any:
    tokenizer: Any = None
    return DataCollatorForLanguageModeling(tokenizer, mlm=False, seed=1)


class Unknown(IterableDataset[int]):
    """A stream that does not know where it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Unsaid(Unknown):
    """The same, with a generator."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter([self.random.randrange(9)])


class OfWorker(Unsaid):
    """The same, with a state that worker processes alone can give."""

    def state_dict(self) -> dict[str, Any]:
        return {"of": get_worker_info().id, "random": self.random.getstate()}  # type: ignore[union-attr]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])


class Stated(Plain):
    """Data with a generator in its state, for which torch's own loader asks no worker."""

    def __init__(self) -> None:
        super().__init__(9)
        self.random = np.random.default_rng(0)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.random.bit_generator.state = state_dict["random"]


@pytest.mark.parametrize(
    ("loader", "fault"),
    [
        (lambda: DataLoader(Unknown()), "Unknown is an IterableDataset without state_dict"),
        (
            lambda: StatefulDataLoader(numbers(), 2, num_workers=1, persistent_workers=True),
            "persistent_workers: .* would begin each later epoch of the stream at the position of the resume",
        ),
        (lambda: DataLoader(Stream(), num_workers=1), "Stream is read by 1 worker processes"),
        (lambda: DataLoader(Stated(), num_workers=1), "draws from a numpy.*Generator: each worker process draws from"),
        (lambda: StatefulDataLoader(Stated(), num_workers=1, collate_fn=Jittered()), "each worker process draws from"),
        (lambda: StatefulDataLoader(Stream(), num_workers=1, collate_fn=Jittered()), "each worker process draws from"),
        (lambda: [1, 2], "list is no DataLoader"),
        (lambda: DataLoader(Plain(2), collate_fn=seeded()), "its seed"),
    ],
)
def test_data_without_a_position_is_refused(loader: Callable[[], Any], fault: str) -> None:
    """Nothing is replayed in silence: the message says what has no position, and what to use."""
    with pytest.raises(ConfigError, match=fault):
        PositionedLoader(loader())


def test_an_epoch_has_all_batches_of_a_sampler_whose_length_is_an_estimate() -> None:
    """Also the one that comes after as many as `__len__` says."""
    loader = PositionedLoader(LOADERS["an estimated length"]())
    assert [[len([*loader]) for _ in range(2)], loader.epoch] == [[5, 5], 2]


class Holding(Stream):
    """A stream of the user's that holds one of datasets."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Lazy(Sampler[int]):
    """Draws each index when it is asked for."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        left = [*range(10)]
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


def noisy_rows(rows: dict[str, list[int]]) -> dict[str, Any]:
    return {"a": [number + random.random() for number in rows["a"]]}


def noisy_generator(shards: list[int]) -> Iterator[dict[str, float]]:
    yield from ({"a": shard + random.random()} for shard in shards)


def read_once() -> Any:
    """Return a stream of an iterator that was made outside of it."""
    numbers = iter([*range(5)])
    return Streamed.from_generator(lambda: ({"a": number} for number in numbers))


class Numbering:
    """Numbers the batches that it makes."""

    number = 0

    def __call__(self, rows: list[int]) -> tuple[int, list[int]]:
        self.number += 1
        return self.number, rows


COUNT = count()


def joined(row: dict[str, int]) -> dict[str, int]:
    return {"a": row["a"] + next(COUNT)}


class Drawing(Plain):
    """Numbers with noise of a generator of their own."""

    def __init__(self) -> None:
        super().__init__(9)
        self.random = random.Random(5)

    def __getitem__(self, index: int) -> Any:
        return index + self.random.random()


class Turned(Plain):
    """Numbers that the epoch changes, which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


_AGAIN = "it reads examples once more after a resume"


@pytest.mark.parametrize(
    ("loader", "fault"),
    [
        (lambda: DataLoader(Numbers(), 2, sampler=Counting()), r"sampler .*Counting: its code sets self\.epochs"),
        (
            lambda: StatefulDataLoader(Plain(9), 2, sampler=Counting()),
            r"sampler .*Counting: its code sets self\.epochs",
        ),
        (lambda: DataLoader(numbers().map(noisy).shuffle(7), 2), f"BufferShuffled.*{_AGAIN}"),
        (lambda: DataLoader(numbers().shuffle(), 2), "BufferShuffled.*: no seed is given"),
        (
            lambda: DataLoader(interleave_datasets([numbers()] * 2, [0.5, 0.5]), 2),
            "Randomly.*: no seed is given",
        ),
        (lambda: DataLoader(Holding(shuffled()), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: DataLoader(numbers().map(noisy_rows, batched=True, batch_size=4), 2), f"MappedExamples.*{_AGAIN}"),
        (lambda: DataLoader(interleave_datasets([numbers().map(noisy)]), 2), f"CyclingMultiSources.*{_AGAIN}"),
        (lambda: DataLoader(Streamed.from_generator(noisy_generator, gen_kwargs={"shards": [1, 2]})), _AGAIN),
        (lambda: DataLoader(read_once(), 2), r"list_iterator: a function of the stream reads from it"),
        (lambda: DataLoader(numbers().map(joined), 2), "count: a function of the stream reads from it"),
        (
            lambda: DataLoader(Plain(9), 2, collate_fn=Numbering()),
            r"collate_fn .*Numbering: its code sets self\.number",
        ),
        (lambda: DataLoader(with_noise(batch_size=4), 2), "it reads examples once more after a resume, and the random"),
        (
            lambda: DataLoader(Turned(9), 2, num_workers=1, persistent_workers=True),
            "data: .*Turned: its set_epoch does not reach worker processes that are kept",
        ),
        (
            lambda: DataLoader(Drawing(), 2, num_workers=1),
            r"draws from a random\.Random: each worker .* a copy of its own",
        ),
        (lambda: StatefulDataLoader(drawing(), 2, num_workers=1), "draws from a random.Random: .*without worker"),
        (lambda: StatefulDataLoader(with_noise(), 2, num_workers=1), "draws from a random.Random: .*without worker"),
    ],
)
def test_what_would_continue_elsewhere_is_refused_and_can_be_allowed(loader: Callable[[], Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f'{fault}(?s:.*)checkpoint.allow = \\["(.*)"\\]') as refused:
        PositionedLoader(loader())
    PositionedLoader(loader(), allow=[str(refused.value).rpartition('["')[2].partition('"]')[0]])


def test_a_stream_whose_function_uses_an_http_session_runs() -> None:
    session = Session()
    stream = Streamed.from_generator(lambda: ({"a": len(session.headers)} for _ in range(3)))
    assert len([*PositionedLoader(DataLoader(stream, None))]) == 3


def test_no_example_is_read_to_judge_a_stream_that_reads_each_once() -> None:
    loader = PositionedLoader(DataLoader(read_once(), None), allow=["builtins.list_iterator"])
    assert [row["a"] for row in loader] == [*range(5)]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (shuffled, r"leaves out the buffer of shuffle\(\)"),
        (lambda: StatefulDataLoader(shuffled(), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: StatefulDataLoader(Plain(9), 2, sampler=RandomSampler(Plain(9))), r"Random.*does not hold its order"),
        (lambda: StatefulDataLoader(Plain(9), 2, sampler=Counting()), r"Counting: a StatefulDataLoader does not hold"),
    ],
)
def test_a_loop_of_ones_own_is_told_to_wrap_what_loses_its_order(
    data: Callable[[], Any], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{fault}.*titan_ckpt.PositionedLoader"):
        world.manager(tmp_path, torch.nn.Linear(1, 1), save=None, dataloader=data())


def test_a_loop_of_ones_own_is_told_what_torchdata_leaves_out_after_a_second_resume(tmp_path: Path) -> None:
    """It counts twice what it reads again of data that gives no state."""
    found: list[int] = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        loader = StatefulDataLoader(Unknown(), None)
        if state is not None:
            loader.load_state_dict(state)
        found.append(next(iter(loader)))
        state = loader.state_dict()
    assert found == [0, 1, 3], "torchdata is mended: let such data run"
    with pytest.raises(ConfigError, match=r"Unknown: it has no state_dict .* after a second resume it leaves samples"):
        world.manager(tmp_path, torch.nn.Linear(1, 1), save=None, dataloader=StatefulDataLoader(Unknown(), None))


def test_a_stream_with_another_seed_is_refused() -> None:
    """Its examples come in another order."""
    loader = PositionedLoader(DataLoader(shuffled(), 2))
    next(iter(loader))
    other = PositionedLoader(DataLoader(numbers().shuffle(8), 2))
    with pytest.raises(LoadMismatchError, match=r"seed was \[7\], now \[8\]"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("over", [lambda stream: stream, lambda stream: StatefulDataLoader(stream, None)])
def test_later_epochs_of_a_loop_of_ones_own_begin_at_the_start(over: Callable[[Any], Any], tmp_path: Path) -> None:
    """A position is one of an epoch; datasets would begin each later epoch there too."""
    data = over(numbers())
    with world.manager(tmp_path, torch.nn.Linear(1, 1), dataloader=data) as first:
        first.load()
        run = iter(data)
        assert [next(run)["a"] for _ in range(5)] == [*range(5)]
        first.save(1)
    resumed = over(numbers())
    with world.manager(tmp_path, torch.nn.Linear(1, 1), dataloader=resumed) as second:
        second.load()
        assert [[row["a"] for row in resumed] for _ in range(3)] == [[*range(5, 12)], [*range(12)], [*range(12)]]


class ShufflesInPlace(Told):
    """Draws an order by changing what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [*range(10)]

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.numbers)
        return iter(self.numbers)


class DrawsItself(Told):
    """Draws an order by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return (int(n) for n in self.numbers.permutation(10))


@pytest.mark.parametrize("kind", [ShufflesInPlace, DrawsItself])
def test_a_sampler_that_its_order_changes_is_refused_before_the_first_batch(kind: type[Any]) -> None:
    """With the name that allows it."""
    fault = rf'{kind.__name__}: drawing an order changes self\.numbers, which no step holds(?s:.*)allow = \["(.*)"\]'
    with pytest.raises(ConfigError, match=fault):
        next(iter(PositionedLoader(DataLoader(Plain(10), 2, sampler=kind()))))
    allow = [class_name(kind())]
    assert len([*PositionedLoader(DataLoader(Plain(10), 2, sampler=kind()), allow=allow)]) == 5


def test_a_sampler_that_draws_in_the_middle_of_an_order_is_refused() -> None:
    """Steps draw from the same numbers in between."""
    run = steps(PositionedLoader(DataLoader(Plain(10), 2, sampler=Lazy())))
    next(run)  # an order may be drawn whole, at its first index
    with pytest.raises(ConfigError, match=r"Lazy: it draws from the process's random numbers in the middle"):
        next(run)


def test_a_sampler_of_another_class_is_another_order() -> None:
    loader = PositionedLoader(by_own_generator())
    next(steps(loader))
    with pytest.raises(LoadMismatchError, match=r"samplers was .*RandomSampler.*, now .*SequentialSampler"):
        PositionedLoader(DataLoader(Numbers(), 2)).load_state_dict(loader.state_dict())


def values_of(rows: list[dict[str, int]]) -> list[int]:
    return [row["a"] for row in rows]


@pytest.mark.parametrize(
    "kind", ["indices", "indices, a worker", "a stream", "a stream, a worker", "the stream itself"]
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loop_over_torchdatas_loader_or_a_stream_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    """With the random numbers of the whole run, and with all of each later epoch.

    torchdata's iterator draws a seed when it is made; datasets would begin every epoch at the position that was loaded.
    """

    def run(interval: int, begin: int = -1) -> list[Any]:
        torch.manual_seed(0)
        streamed, workers = "stream" in kind, int("worker" in kind)
        data: Any = numbers() if streamed else Plain(10)
        loader: Any = StatefulDataLoader(
            data, 2, shuffle=not streamed, num_workers=workers, collate_fn=values_of if streamed else None
        )
        position = loader
        if kind == "the stream itself":
            position = data
            loader = DataLoader(data, 2, collate_fn=values_of, generator=torch.Generator())
        with world.manager(tmp_path, torch.nn.Linear(1, 1), dataloader=position, interval=interval) as manager:
            step, seen = manager.load(begin).step, []
            while step < 13:
                for batch in loader:
                    step += 1
                    seen.append(([*map(int, batch)], float(torch.rand(()))))
                    manager.save(step)
                    if step == 13:
                        break
        end_workers(loader)
        return seen

    whole = run(1)
    for step in (3, 5, 6, 8):
        assert run(99, step) == whole[step:], f"after step {step}"
