"""Packed data: what a sequence is, in which order they come, and where a resumed run goes on."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from titan_ckpt.errors import ConfigError, DataError, LoadMismatchError
from titan_ckpt.training.data.batch import IGNORED, Batch, checked, collate, to_device
from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.loader import build_dataloader
from titan_ckpt.training.data.sequences import DummyDataset, MapDataset, OrderedDataset, PackedDataset
from titan_ckpt.training.data.tokens import tokenise

TOKENS = torch.arange(1001, dtype=torch.int32)
STACK: Any = torch.stack


def loader(dataset: OrderedDataset, batch_size: int, num_workers: int = 0) -> Any:
    return build_dataloader(dataset, batch_size, collate, 0, num_workers)


def starts(dataset: PackedDataset, num: int) -> list[int]:
    """Return the first token of the next `num` sequences, which names the sequence."""
    return [int(item["tokens"][0]) for item in islice(dataset, num)]


def test_labels_are_the_next_tokens() -> None:
    """Every position predicts what follows it, across the cut between two sequences."""
    for item in islice(PackedDataset(TOKENS, 10, seed=0), 100):
        assert torch.equal(item["labels"], item["tokens"] + 1)
        assert item["tokens"].dtype == torch.int64


def test_an_epoch_holds_every_sequence_once_in_an_order_of_its_own() -> None:
    """Nothing is seen twice before all is seen once; the next epoch is shuffled anew; the seed decides."""
    order = starts(PackedDataset(TOKENS, 10, seed=3), 200)
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(0, 1000, 10))
    assert order[:100] != order[100:]
    assert order != sorted(order)
    assert order == starts(PackedDataset(TOKENS, 10, seed=3), 200)
    assert order != starts(PackedDataset(TOKENS, 10, seed=4), 200)


class Backwards(PackedDataset):
    """Has an order of its own."""

    def samples(self) -> Iterator[tuple[Batch, None]]:
        for index in self.indices():
            yield self.sequence(self.num_sequences - 1 - index % self.num_sequences), None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_d9_data_with_an_order_of_its_own_ends_with_its_epochs_too(num_workers: int) -> None:
    """The sequences that fill the last batch have no labels, and the position does not count them."""
    backwards = loader(Backwards(TOKENS[:31], 10, seed=0), 2, num_workers)
    assert backwards.end_after(1) == 3
    batches = [*islice(backwards, 2)]
    assert [int(tokens[0]) for batch in batches for tokens in batch["tokens"]] == [20, 10, 0, 20]
    assert [bool((labels == IGNORED).all()) for batch in batches for labels in batch["labels"]] == [False] * 3 + [True]
    assert backwards.state_dict()["next_index"] == 3


def test_a_loader_draws_no_random_numbers_of_the_run() -> None:
    """Creating an iterator and taking batches leaves torch's generator where it was."""
    batches = loader(PackedDataset(TOKENS, 10, seed=5), 4)
    before = torch.get_rng_state()
    next(iter(batches))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("num_workers", "state"),
    [
        (0, {"next_index": 8, "fingerprint": "x"}),
        (0, {"_snapshot": {}}),
        (2, {"_num_yielded": 3}),
        (2, {"_snapshot": {"_main_snapshot": {"_num_workers": 3}}}),
    ],
)
def test_d4_a_position_that_data_of_ones_own_cannot_take_is_refused(num_workers: int, state: Any) -> None:
    """That of built-in data, or of batches that were made by other processes; torchdata says so at the first batch."""
    own = build_dataloader(Own(), 4, collate, 0, num_workers)
    with pytest.raises(
        LoadMismatchError,
        match=rf"not one in data of your own with data\.num_workers = {num_workers}\. .* checkpoint\.resume\.exclude",
    ):
        own.load_state_dict(state)
    own = build_dataloader(Own(), 4, collate, 0, 0)
    next(iter(own))
    state = own.state_dict()
    again = build_dataloader(Own(), 4, collate, 0, 0)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["tokens"], torch.full((4, 3), 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_d8_the_position_after_the_end_of_ones_own_data_is_its_end(num_workers: int) -> None:
    """The same data has no more, and longer data goes on; torchdata would begin anew."""

    def made(num: int) -> Any:
        return build_dataloader(Own(num), 4, collate, 0, num_workers)

    ended = made(6)
    assert [len(batch["tokens"]) for batch in ended] == [4], "two samples fill no batch"
    for num, left in ((6, []), (9, [4 * [1]])):
        again = made(num)
        again.load_state_dict(ended.state_dict())
        again.state_dict()
        assert [batch["tokens"][:, 0].tolist() for batch in again] == left


def taken(loader: Any, num: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, num)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_d8_data_that_gives_no_state_is_read_again_at_every_resume(num_workers: int) -> None:
    """Nothing is left out or comes twice, however often it is resumed, before its first batch and at its end too."""

    def made(num: int = 31, draws: bool = False) -> Any:
        return build_dataloader(Stateless(num, draws), 2, STACK, 0, num_workers)

    for draws in (False, True)[: 1 + num_workers]:
        expected, found, state = taken(made(draws=draws), 99), [], None
        for num in (1, 0, 2, 1, 5, 99, 99):
            again = made(draws=draws)
            if state is not None:
                again.load_state_dict(json.loads(json.dumps(state)))
            again.state_dict()  # a step asks for it before its first batch
            found += taken(again, num)
            state = again.state_dict()
        assert found == expected and len(found) == 15


def test_d8_data_that_is_not_the_same_when_it_is_read_again_is_refused() -> None:
    """Data that is shorter now, and an order of the process's random numbers, in which a step draws too."""
    for workers in (0, 1):
        loader = build_dataloader(Stateless(31), 2, STACK, 0, workers)
        taken(loader, 5)
        shorter = build_dataloader(Stateless(3), 2, STACK, 0, workers)
        shorter.load_state_dict(loader.state_dict())
        with pytest.raises(DataError, match=r"1 problem.*\n.* it ends after 3 samples, and the position is after 10: "):
            taken(shorter, 1)
    drawing = build_dataloader(Stateless(31, True), 2, STACK, 0)
    assert len(taken(drawing, 3)) == 3, "a run that saves nothing may take it"
    with pytest.raises(ConfigError, match=r"Stateless draws from the process's random numbers"):
        drawing.state_dict()
    late = build_dataloader(Late(9), 2, STACK, 0)
    taken(late, 2)
    again = build_dataloader(Late(9), 2, STACK, 0)
    again.load_state_dict(late.state_dict())
    with pytest.raises(ConfigError, match="Late draws from the process's random numbers"):
        taken(again, 1)


def test_d4_a_count_is_no_state_of_ones_own_data() -> None:
    """Nor the other way: data that was given a state_dict since, and that of an earlier version."""
    counted, own = build_dataloader(Stateless(9), 2, STACK, 0), build_dataloader(Own(), 4, collate, 0)
    positions = counted.state_dict(), own.state_dict()
    for one, position in ((counted, positions[1]), (own, positions[0])):
        with pytest.raises(LoadMismatchError, match=r"the other counts what was read\. .*resume\.exclude"):
            one.load_state_dict(position)


class Stateless(IterableDataset[Any]):
    """Data of one's own without a state, in its order or in one that is drawn; each worker has a share of it."""

    def __init__(self, num: int, draws: bool = False) -> None:
        self.num, self.draws = num, draws

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        order = torch.randperm(self.num) if self.draws else torch.arange(self.num)
        yield from order if worker is None else order[worker.id :: worker.num_workers]


class Late(Stateless):
    """Data that draws a random number after its second sample."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.num):
            yield torch.tensor(number) + (torch.randint(9, ()) if number > 1 else 0)


class Own(IterableDataset[Batch]):
    """Data of one's own, which counts its samples."""

    def __init__(self, num: float = inf) -> None:
        self.number, self.num = 0, num

    def __iter__(self) -> Iterator[Batch]:
        while self.number < self.num:
            self.number += 1
            yield {name: torch.full((3,), (self.number - 1) // 4) for name in ("tokens", "labels")}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict["number"]


def test_d4_a_position_in_other_data_is_refused() -> None:
    """Another corpus, another length or another seed: the position means nothing there."""
    state = loader(PackedDataset(TOKENS, 10, seed=5), 4).state_dict()
    others = PackedDataset(TOKENS + 1, 10, 5), PackedDataset(TOKENS, 9, 5), PackedDataset(TOKENS, 10, 6)
    for other in (*others, PackedDataset(TOKENS, 10, 5, shuffle=False)):
        with pytest.raises(LoadMismatchError, match=r"checkpoint\.resume\.exclude"):
            loader(other, 4).load_state_dict(state)
    foreign: Any
    for foreign in ({}, {"at": 4}, None, [], 3, {"next_index": 4, "_snapshot": {}}):
        own = loader(PackedDataset(TOKENS, 10, seed=5), 4)
        for load in (partial(own.load_state_dict, foreign), partial(own.load_state_dicts, [foreign] * 2)):
            with pytest.raises(LoadMismatchError, match=r"checkpoint\.resume\.exclude"):
                load()


def test_a_corpus_shorter_than_one_sequence_is_a_config_error() -> None:
    """The message names both lengths."""
    with pytest.raises(ConfigError, match="2000 is too long for a corpus of 1001 tokens"):
        PackedDataset(TOKENS, 2000, seed=0)


def test_documents_are_tokenised_once(tmp_path: Path) -> None:
    """The second call maps the file of the first one and encodes nothing, until a file changes."""
    calls = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [ord(c) for c in text]

    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    for _ in range(2):
        tokens = tokenise(open_corpus(str(path)), encode, {}, tmp_path / "cache")
        assert tokens.tolist() == [97, 98, 99]
    assert calls == ["ab", "c"]
    path.write_text('{"text": "d"}\n')
    assert tokenise(open_corpus(str(path)), encode, {}, tmp_path / "cache").tolist() == [100]


def test_ranks_that_start_on_an_empty_cache_tokenise_it_once(tmp_path: Path) -> None:
    """One does, the others wait for it; if it fails, the next one tokenises. Nothing else is left."""
    path, counted = tmp_path / "a.txt", Counter[str]()
    path.write_text("a")

    def encode(text: str) -> list[int]:
        counted[text] += 1
        if counted[text] == 2:
            start()  # comes when the file of the lock that failed is gone
        time.sleep(0.1)  # the others come meanwhile
        if counted[text] == 1:
            raise InterruptedError
        return [7]

    def start() -> None:
        ends.append(ranks.submit(tokenise, open_corpus(str(path)), encode, {}, tmp_path / "cache"))

    ends: list[Future[torch.Tensor]] = []
    with ThreadPoolExecutor(4) as ranks:
        for _ in range(3):
            start()
        while len(ends) < 4 or not all(end.done() for end in ends):
            time.sleep(0.01)
    assert sorted(type(end.exception()).__name__ for end in ends) == ["InterruptedError", *3 * ["NoneType"]]
    assert [end.result().tolist() for end in ends if end.exception() is None] == 3 * [[7]]
    assert counted == {"a": 2}
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_the_lock_of_another_user_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of theirs that was killed has left it in a cache that users share."""
    path = tmp_path / "a.txt"
    path.write_text("a")
    opened = os.open

    def refusing(file: Any, *arguments: Any, **more: Any) -> int:
        if str(file).startswith(str(tmp_path / "cache")) and str(file).endswith(".lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *arguments, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert tokenise(open_corpus(str(path)), lambda _: [7], {}, tmp_path / "cache").tolist() == [7]


class Pair(NamedTuple):
    """An entry that somebody's own data returns."""

    name: str
    value: torch.Tensor


def test_d8_collate_pads_to_the_longest_and_keeps_what_else_there_is() -> None:
    """Padding has no loss; tensors of one shape are stacked, nested ones in their place; anything else is listed."""
    samples = [
        {"tokens": torch.arange(n), "labels": torch.arange(1, n + 1), "more": {"x": torch.ones(2), "name": str(n)}}
        for n in (2, 3)
    ]
    batch = collate(samples)
    assert batch["tokens"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch["labels"].tolist() == [[1, 2, IGNORED], [1, 2, 3]]
    assert batch["more"]["x"].shape == (2, 2) and batch["more"]["name"] == ["2", "3"]
    assert collate(samples, length=5)["tokens"].shape == (2, 5)
    more = {"list": [torch.ones(1), ("x", torch.ones(1))], "pair": Pair("x", torch.ones(1))}
    moved = to_device({**batch, **more}, torch.device("meta"))
    assert moved["more"]["x"].is_meta and moved["list"][1][1].is_meta and moved["list"][1][0] == "x"
    assert moved["pair"].name == "x" and moved["pair"].value.is_meta


def test_d8_dummy_data_is_the_same_for_the_same_seed() -> None:
    """Random tokens of the whole vocabulary, however many ranks take them."""
    alone = [item["tokens"].tolist() for item in islice(DummyDataset(50, 8, seed=1), 6)]
    second = [item["tokens"].tolist() for item in islice(DummyDataset(50, 8, 1, rank=1, num_ranks=2), 3)]
    assert second == alone[1::2]
    assert alone != [item["tokens"].tolist() for item in islice(DummyDataset(50, 8, seed=2), 6)]
    assert max(map(max, alone)) < 50 and len({token for row in alone for token in row}) > 20


GOOD = {"tokens": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, IGNORED]])}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 2), r'expected a dict with "tokens" and "labels", found a tuple'),
        ({"input_ids": 1}, r"tokens and labels missing; it has input_ids"),
        (
            {"tokens": [1], "labels": torch.ones(1, 2)},
            r"(?s)tokens: expected an int64.*list.*labels: .*float32",
        ),
        (
            GOOD | {"labels": torch.ones(1, 2, dtype=torch.int64)},
            r"labels: expected the shape of tokens, \(1, 3\), found",
        ),
        (GOOD | {"tokens": torch.tensor([[1, 9, 3]])}, r"tokens: expected ids from 0 to 8, .* found 1 to 9"),
        (GOOD | {"labels": torch.tensor([[2, -1, 3]])}, r"labels: .*or -100 for no loss; found -1 to 3"),
        (GOOD | {"labels": torch.tensor([[1, 2, IGNORED]])}, r"labels: they are the tokens themselves"),
    ],
)
def test_d8_the_first_batch_is_checked(batch: Any, expected: str) -> None:
    """One error says everything that it must be and is not; later batches are not looked at."""
    with pytest.raises(ConfigError, match=expected):
        next(checked(iter([batch]), 9))
    looked_at = checked(iter([GOOD, batch]), 9)
    assert [next(looked_at), next(looked_at)] == [GOOD, batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (3, 2), (4, 0)])
def test_d8_map_style_data_is_dealt_as_distributed_sampler_deals_it(
    shuffle: bool, drop_last: bool, ranks: int, workers: int
) -> None:
    """The same samples on every rank in each of three epochs; they end with the last one."""
    data = [torch.tensor(number) for number in range(11)]
    for rank in range(ranks):
        own = mapped(data, rank, ranks, shuffle, drop_last)
        batches = build_dataloader(own, 2, STACK, 0, workers)
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle, 5, drop_last)  # type: ignore[arg-type]
        expected = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected += [*sampler]
        assert batches.end_after(3) == len(expected) * ranks
        assert [int(number) for batch in batches for number in batch] == expected
        assert batches.state_dict()["next_index"] == 33 and batches.epoch == 3


def mapped(data: Any, rank: int, ranks: int, shuffle: bool = True, drop_last: bool = False) -> MapDataset:
    return MapDataset(data, 5, rank=rank, num_ranks=ranks, shuffle=shuffle, drop_last=drop_last)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (4, 2), (2, 2)])
def test_d8_map_style_data_goes_on_with_the_next_sample_on_any_number_of_ranks(before: int, after: int) -> None:
    """No sample of the epoch is lost, and none comes twice but those that fill its end."""
    data = [torch.tensor(number) for number in range(13)]
    loaders = [build_dataloader(mapped(data, rank, before), 2, STACK, 0) for rank in range(before)]
    taken = [int(number) for one in loaders for number in next(iter(one))]
    states = json.loads(json.dumps([one.state_dict() for one in loaders]))
    rest = []
    for rank in range(after):
        again = build_dataloader(mapped(data, rank, after), 2, STACK, 0)
        again.load_state_dict(states[0]) if before == after else again.load_state_dicts(states)
        assert again.end_after(1) == -(-(13 - len(taken)) // after) * after
        rest += [int(number) for batch in again for number in batch]
    assert {*taken, *rest} == {*range(13)} and 0 <= len(taken) + len(rest) - 13 < after
    other = build_dataloader(mapped(data[:-1], 0, 1), 2, STACK, 0)
    with pytest.raises(LoadMismatchError, match="number of samples"):
        other.load_state_dict(states[0])


def test_d8_too_few_samples_are_refused() -> None:
    """No rank may be without any."""
    with pytest.raises(ConfigError, match=r"its 2 samples leave none for each of 3 ranks, by drop_last"):
        mapped([0, 1], 0, 3, drop_last=True)
    with pytest.raises(ConfigError, match=r"its 0 samples leave none"):
        mapped([], 0, 1)


@pytest.mark.parametrize(("ranks", "batch_size", "workers"), [(2, 3, 0), (2, 3, 2)])
def test_d4_batches_made_ahead_by_workers_are_not_lost_to_other_ranks(
    ranks: int, batch_size: int, workers: int
) -> None:
    """However far workers are ahead, another number of ranks goes on right after what was handed out."""
    loaders = [loader(PackedDataset(TOKENS, 10, 5, rank=r, num_ranks=ranks), batch_size, workers) for r in range(ranks)]
    in_turn: list[int] = []
    batches = [iter(one) for one in loaders]
    for _ in range(5):
        in_turn += [int(s) for turn in zip(*(next(b)["tokens"][:, 0] for b in batches), strict=True) for s in turn]
    states = json.loads(json.dumps([one.state_dict() for one in loaders]))
    again = loader(PackedDataset(TOKENS, 10, 5, rank=1, num_ranks=ranks), batch_size, workers)
    again.load_state_dict(states[1])
    assert torch.equal(next(iter(again))["tokens"], next(batches[1])["tokens"])
    alone = loader(PackedDataset(TOKENS, 10, 5), 7)
    alone.load_state_dicts(states)
    in_turn += next(iter(alone))["tokens"][:, 0].tolist()
    assert in_turn == starts(PackedDataset(TOKENS, 10, 5), len(in_turn))
    states[1]["next_index"] += 1
    with pytest.raises(LoadMismatchError, match="not in step"):
        alone.load_state_dicts(states)
