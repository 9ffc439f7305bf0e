"""Every sampler of the installed libraries and every operation of datasets' streams, in a loader that is resumed."""

from __future__ import annotations

import atexit
import functools
import importlib
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import data_loader as of_accelerate
from datasets import Dataset as HuggingFaceDataset
from datasets import Features, Value, concatenate_datasets, interleave_datasets
from datasets import IterableDataset as Streamed
from datasets.distributed import split_dataset_by_node
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as of_torchdata
from transformers import trainer_pt_utils as of_transformers
from trl.trainer.utils import RepeatSampler

from titan_ckpt.components.classes import class_name
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.loader_position import PositionedLoader


class Numbers(torch.utils.data.Dataset[float]):
    """Numbers with noise from all of the process's generators."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.read = length, []  # type: ignore[var-annotated]  # of int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        self.read.append(index)
        return index + random.random() / 8 + np.random.rand() / 8 + float(torch.rand(())) / 8  # noqa: NPY002


class Plain(torch.utils.data.Dataset[int]):
    """Numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Remembering(Plain):
    """Numbers that say how many were read before, which their state says."""

    num_read = 0

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        return index + 100 * self.num_read

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


class Stream(IterableDataset[Any]):
    """Rows one after another; its position is the next one."""

    def __init__(self, rows: Any = range(10)) -> None:
        self.rows, self.next = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Shared(Stream):
    """Numbers of a share, which a worker takes when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = 0, 10

    def __iter__(self) -> Iterator[int]:
        while self.start + self.next < self.end:
            self.next += 1
            yield self.start + self.next - 1
        self.next = 0


def take_share(number: int) -> None:
    """Give a worker its share of three or seven numbers, as torch's documentation does."""
    data = get_worker_info().dataset  # type: ignore[union-attr]  # this is a worker
    assert isinstance(data, Shared)
    data.start, data.end = [(data.start, 3), (3, data.end)][number]


class Turning(Sized):
    """Numbers in an order that it draws anew for each epoch, which its state says."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 3

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(self.seed)).tolist()
        yield from (order[number] for number in super().__iter__())
        self.seed += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.seed = state["next"], state["seed"]


class Noised(Stream):
    """Numbers with noise of the process's generator."""

    def __iter__(self) -> Iterator[float]:
        yield from (number + random.random() for number in super().__iter__())


class SizedNoised(Noised, Sized):
    """The same, with a length, by which the end of an epoch is known at its last batch."""


AROUND = random.Random(11)


class Noise:
    """An augmentation that draws from a generator of its own, and from one of the module."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __call__(self, number: int) -> float:
        return number + self.random.random() + AROUND.random()


class Augmented(Plain):
    """Numbers that go through several augmentations, one of them a function."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        draw = random.Random(7)
        drawn = partial(lambda scale, number: scale * number + draw.random(), 2)
        self.steps: list[Callable[[Any], Any]] = [Noise(), drawn]

    def __getitem__(self, index: int) -> Any:
        number: Any = index
        for step in self.steps:
            number = step(number)
        return number


class Around(Sampler[int]):
    """The order of another sampler, which it has by a name of its own."""

    def __init__(self) -> None:
        self.numbers = RandomSampler(Plain(10), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def by_own_generator() -> Any:
    return DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))


KEPT: Any = {"num_workers": 1, "persistent_workers": True}
LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), 2),
    "shuffled by the process's generator": lambda: DataLoader(Numbers(), 2, shuffle=True),
    "shuffled by its own generator": by_own_generator,
    "with replacement": lambda: DataLoader(Numbers(), 2, sampler=RandomSampler(Numbers(), replacement=True)),
    "one share of two": lambda: DataLoader(Numbers(20), 2, sampler=DistributedSampler(Numbers(20), 2, 1)),
    "without batches": lambda: DataLoader(Numbers(), None, shuffle=True),
    "a worker": lambda: DataLoader(Plain(10), 2, shuffle=True, **KEPT),
    "a worker, a generator of the sampler": lambda: DataLoader(Plain(10), 2, sampler=Around(), **KEPT),
    "a worker, a sampler with a state": lambda: DataLoader(Plain(10), 2, sampler=Giving(), **KEPT),
    "noise of workers": lambda: DataLoader(Numbers(), 2, shuffle=True, num_workers=2),
    "noise of a worker that is kept": lambda: DataLoader(Numbers(), 2, shuffle=True, **KEPT),
    "noise of a worker, without batches": lambda: DataLoader(Numbers(), None, shuffle=True, num_workers=1),
    "noise of a worker, stateful": lambda: StatefulDataLoader(Numbers(), 2, sampler=Around(), num_workers=1),
    "noise of a worker, a stream of one's own": lambda: StatefulDataLoader(Noised(), 2, num_workers=1),
    "noise of a worker that is kept, a stream of one's own": lambda: StatefulDataLoader(Noised(), 2, **KEPT),
    "noise of a worker, a sized stream of one's own": lambda: StatefulDataLoader(SizedNoised(), 2, num_workers=1),
    "noise of a worker that is kept, a sized stream of one's own": lambda: StatefulDataLoader(SizedNoised(), 2, **KEPT),
    "noise of a worker that is kept, a stream": lambda: DataLoader(numbers().map(noisy), 2, **KEPT),
    "a stream": lambda: DataLoader(Stream(), 2),
    "a stream with a length": lambda: DataLoader(Sized(), 2),
    "a stream with a smaller last batch": lambda: DataLoader(Stream(), 6),
    "a stream that draws its order": lambda: DataLoader(Turning(), 2),
    "augmentations": lambda: DataLoader(Augmented(10), 2),
    "a sampler around another": lambda: DataLoader(Plain(10), 2, sampler=Around()),
    "stateful": lambda: StatefulDataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "stateful, a sampler of torch": lambda: StatefulDataLoader(Plain(9), 2, sampler=RandomSampler(Plain(9))),
    "a loader of the user's own": lambda: Own(),
    "stateful, data with a state": lambda: StatefulDataLoader(Remembering(10), 2, sampler=Jumping()),
    "stateful, data with a state, a worker": lambda: StatefulDataLoader(Remembering(10), 2, sampler=Jumping(), **KEPT),
    "stateful, a stream with a length": lambda: StatefulDataLoader(Sized(), 2),
    "stateful, a worker": lambda: StatefulDataLoader(Plain(10), 2, sampler=RandomSampler(Plain(10)), **KEPT),
    "a shuffled stream, workers": lambda: DataLoader(shuffled(), 2, num_workers=2),
    "a shuffled stream, a worker that is kept": lambda: DataLoader(shuffled(), 2, **KEPT),
    "a stream, workers": lambda: DataLoader(numbers(), 1, num_workers=2),
    "a generator of the collator": lambda: DataLoader(Numbers(), 2, shuffle=True, collate_fn=Jittered()),
    "a generator of the collator of a stream that draws its order": lambda: DataLoader(
        Turning(), 2, collate_fn=partial(jittered, random.Random(5))
    ),
    "a generator of the collator of a shuffled stream": lambda: DataLoader(shuffled(), 2, collate_fn=Jittered()),
    "a shuffled stream that is mapped": lambda: DataLoader(shuffled().map(noisy), 2),
}


class Jittered:
    """Makes batches with noise of a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __call__(self, rows: list[Any]) -> list[float]:
        return jittered(self.random, rows)


def jittered(draw: random.Random, rows: list[Any]) -> list[float]:
    return [(row["a"] if isinstance(row, dict) else row) + draw.random() for row in rows]


class Estimated(BatchSampler):
    """Batches whose number `__len__` does not know."""

    def __len__(self) -> int:
        return 2


class Jumping(Sampler[int]):
    """A stateful sampler that returns to the middle of its order by itself, as torchdata asks for."""

    def __init__(self, samples: int = 10) -> None:
        self.samples, self.at, self.seed = samples, 0, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.seed).permutation(self.samples).tolist()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at, self.seed = 0, self.seed + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seed = state["at"], state["seed"]


class Own(Jumping):
    """The same as a loader of the user's own."""


class Early(Jumping):
    """Begins its next order when it returns the last entry of one."""

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.seed).permutation(self.samples).tolist()
        for number in range(self.at, self.samples):
            self.at = (number + 1) % self.samples
            self.seed += self.at == 0
            yield order[number]


class Told(Sampler[int]):
    """A sampler of the user whose order depends on the epoch alone, which it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(10).tolist())


class Counting(Sampler[int]):
    """Begins elsewhere in each epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter([(number + self.epochs) % 10 for number in range(10)])


class Giving(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Reseeding(Giving):
    """A sampler whose seed is a part of its state."""

    @property
    def seed(self) -> int:
        return self.epochs


class Giving20(Giving):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__(), *super().__iter__()])


def seeded() -> Any:
    return RandomSampler(Plain(20), generator=torch.Generator().manual_seed(3))


def wrapped(kind: Any, inner: Callable[[], Any] = seeded) -> Any:
    return kind(inner(), num_replicas=2, rank=1)


def samplers() -> dict[str, Callable[[], Any]]:
    """Return a loader with a sampler of each class that the installed libraries have, by its full name."""
    lengths = [3, 9, 1, 4, 8, 2, 7, 5, 6, 10]
    loops: Any = of_transformers.DistributedSamplerWithLoop
    share: Any = {"num_replicas": 2, "rank": 1}
    made: list[Callable[[], Any]] = [
        lambda: SequentialSampler(Plain(10)),
        lambda: RandomSampler(Plain(10)),
        lambda: SubsetRandomSampler(range(10)),
        lambda: WeightedRandomSampler(lengths, 10),
        lambda: DistributedSampler(Plain(20), 2, 1),
        lambda: ElasticDistributedSampler(Plain(23), start_index=3, **share),
        lambda: of_torchdata.RandomSampler(Plain(10), generator=torch.Generator().manual_seed(3)),
        lambda: of_torchdata.StatefulDistributedSampler(Plain(20), 2, 1),
        lambda: of_accelerate.SeedableRandomSampler(Plain(10), data_seed=3),
        lambda: loops(Plain(20), 2, **share),
        lambda: of_transformers.LengthGroupedSampler(2, lengths=lengths),
        lambda: of_transformers.DistributedLengthGroupedSampler(2, lengths=lengths * 2, **share),
        lambda: of_transformers.ShardSampler(Plain(20), 2, num_processes=2, process_index=1),
        lambda: RepeatSampler(Plain(5), 2, seed=3),
    ]
    batches: list[Callable[[], Any]] = [
        lambda: BatchSampler(RandomSampler(Plain(10)), 2, False),
        lambda: of_torchdata.BatchSampler(RandomSampler(Plain(10)), 2, False),
        lambda: of_accelerate.BatchSamplerShard(BatchSampler(Giving20(), 2, False), 2, 1),
        lambda: of_accelerate.SkipBatchSampler(BatchSampler(RandomSampler(Plain(14)), 2, False), 2),
        lambda: of_transformers.BatchRebalanceSampler(lengths * 2, 4, 2, 1, rank=1),
    ]
    for package in ("lightning.fabric", "lightning_fabric"):
        wrapper: Any = importlib.import_module(f"{package}.utilities.distributed").DistributedSamplerWrapper
        made.append(partial(wrapped, wrapper))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        of_package: Any = importlib.import_module(f"{package}.overrides.distributed")
        sequences: Any = importlib.import_module(f"{package}.demos.lstm").SequenceSampler
        made.append(partial(of_package.UnrepeatedDistributedSampler, Plain(20), **share))
        made.append(partial(wrapped, of_package.UnrepeatedDistributedSamplerWrapper, Giving20))
        batches.append(partial(sequences, Plain(10), 2))
    return {
        **{class_name(make()): partial(over, make) for make in made},
        **{class_name(make()): partial(over, make, batches=True) for make in batches},
    }


def over(make: Callable[[], Any], *, batches: bool = False) -> Any:
    """Return a loader of numbers in the order of a sampler."""
    return DataLoader(Numbers(20), batch_sampler=make()) if batches else DataLoader(Numbers(20), 2, sampler=make())


LOADERS |= {
    "an estimated length": lambda: DataLoader(Numbers(), batch_sampler=Estimated(RandomSampler(Numbers()), 2, False)),
    "a sampler with a state": lambda: DataLoader(Numbers(), 2, sampler=Giving()),
    "a sampler with a seed in its state": lambda: DataLoader(Numbers(), 2, sampler=Reseeding()),
    "a sampler that is told the epoch": lambda: DataLoader(Numbers(), 2, sampler=Told()),
}
SAMPLED = samplers()


def steps(loader: PositionedLoader) -> Iterator[Any]:
    """Yield batches of epoch after epoch, each with a random number that is drawn after it, as a step draws some."""
    while True:
        for batch in loader:
            yield plain(batch), float(torch.rand(()))


def plain(batch: Any) -> Any:
    """Return a batch in a form that == compares."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def interleaved() -> Any:
    return interleave_datasets([numbers(), numbers(50)], probabilities=[0.4, 0.6], seed=3)


@functools.cache
def table(first: int, number: int) -> Any:
    return HuggingFaceDataset.from_dict({"a": [*range(first, first + number)]})


def shuffled() -> Any:
    return table(0, 40).to_iterable_dataset(3).shuffle(7, buffer_size=16)


def numbers(first: int = 0) -> Any:
    return table(first, 12).to_iterable_dataset(num_shards=3)


def generated(shards: list[int]) -> Iterator[dict[str, int]]:
    yield from ({"a": 4 * shard + number} for shard in shards for number in range(4))


def doubled(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"a": [value for number in rows["a"] for value in (number, -number)]}


@functools.cache
def files() -> dict[str, list[str]]:
    """Return three files of each kind that a stream reads, which are removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="zoo-")
    atexit.register(shutil.rmtree, folder)
    written: dict[str, list[str]] = {}
    for first in (0, 4, 8):
        rows = HuggingFaceDataset.from_dict({"a": [*range(first, first + 4)]})
        paths = {kind: f"{folder}/{first}.{kind}" for kind in ("csv", "json", "parquet", "txt")}
        rows.to_csv(paths["csv"])
        rows.to_json(paths["json"])
        rows.to_parquet(paths["parquet"])
        Path(paths["txt"]).write_text("".join(f"{number}\n" for number in rows["a"]))
        for kind, path in paths.items():
            written.setdefault(kind, []).append(path)
    HuggingFaceDataset.from_dict({"a": [*range(12)]}).save_to_disk(f"{folder}/arrow")
    return written | {"arrow": [f"{folder}/arrow/data-00000-of-00001.arrow"]}


def same(row: dict[str, Any]) -> dict[str, Any]:
    return {"b": row["a"]}


class OwnNoise:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.own = random.Random(1)

    def add(self, value: int) -> float:
        return value + self.own.random()


def with_noise(**batches: Any) -> Any:
    """Return a stream of which a function draws from a generator that an object around it holds."""
    noise = OwnNoise()
    if batches:
        return numbers().map(lambda rows: {"a": [noise.add(value) for value in rows["a"]]}, batched=True, **batches)
    return numbers().map(lambda row: {"a": noise.add(row["a"])})


def drawing(**given: Any) -> Any:
    """Return a stream of which a function draws from a generator itself, around it or as an argument."""
    draw = random.Random(3)
    if given:
        return numbers().map(lambda row, own: {"a": row["a"] + own.random()}, fn_kwargs=given)
    return numbers().map(lambda row: {"a": row["a"] + draw.random()})


DRAWING: dict[str, Callable[[], Any]] = {
    "a map that draws from a generator": drawing,
    "a map that is given a generator": lambda: drawing(own=np.random.default_rng(4)),
    "a map that draws from an object's generator": with_noise,
    "a map that draws": lambda: numbers().map(noisy),
    "a filter that draws": lambda: numbers().filter(lambda _: random.random() < 0.7),
    "a map of a generator that draws": lambda: Streamed.from_generator(generated, gen_kwargs={"shards": [0, 1, 2]}).map(
        noisy
    ),
}
"""Streams that draw while they are read."""
STREAMS: dict[str, Callable[[], Any]] = {
    "add_column": lambda: numbers().add_column("b", [*range(12)]),
    "batch": lambda: numbers().batch(2).map(lambda row: {"a": sum(row["a"])}),
    "cast": lambda: numbers().cast(Features({"a": Value("int32")})),
    "cast_column": lambda: numbers().cast_column("a", Value("int32")),
    "concatenate_datasets": lambda: concatenate_datasets([numbers(), numbers(50)]),
    "concatenate_datasets, columns": lambda: concatenate_datasets(
        [numbers(), numbers().rename_column("a", "b")], axis=1
    ),
    "decode": lambda: numbers().decode(False),
    "filter": lambda: numbers().filter(lambda row: row["a"] % 3 != 1),
    "from_csv": lambda: Streamed.from_csv(files()["csv"]),
    "from_dict": lambda: Streamed.from_dict({"a": [*range(12)]}),
    "from_file": lambda: Streamed.from_file(files()["arrow"][0]),
    "from_generator": lambda: Streamed.from_generator(generated, gen_kwargs={"shards": [0, 1, 2]}),
    "from_json": lambda: Streamed.from_json(files()["json"]),
    "from_list": lambda: Streamed.from_list([{"a": number} for number in range(12)]),
    "from_pandas": lambda: Streamed.from_pandas(HuggingFaceDataset.from_dict({"a": [*range(12)]}).to_pandas()),
    "from_parquet": lambda: Streamed.from_parquet(files()["parquet"]),
    "from_text": lambda: Streamed.from_text(files()["txt"]),
    "interleave_datasets": lambda: interleave_datasets([numbers(), numbers(50)]),
    "interleave_datasets, random": lambda: interleave_datasets(
        [numbers(), numbers(50)], probabilities=[0.6, 0.4], seed=5
    ),
    "map": lambda: numbers().map(lambda row: {"a": row["a"] * 2}),
    "map, batched": lambda: numbers().map(doubled, batched=True, batch_size=4),
    "remove_columns": lambda: numbers().map(same).remove_columns("b"),
    "rename_column": lambda: numbers().rename_column("a", "b"),
    "rename_columns": lambda: numbers().rename_columns({"a": "b"}),
    "repeat": lambda: numbers().repeat(2),
    "reshard": lambda: numbers().reshard(),
    "select_columns": lambda: numbers().map(same).select_columns("a"),
    "shard": lambda: numbers().shard(3, 1),
    "shuffle": shuffled,
    "skip": lambda: numbers().skip(2),
    "split_dataset_by_node": lambda: split_dataset_by_node(numbers(), 1, 2),
    "take": lambda: numbers().take(9),
    "with_format": lambda: numbers().with_format("torch"),
}
"""Operation, and how it is called -> a stream. Each has at least two batches of two."""


def end_workers(loader: Any) -> None:
    """End the worker processes of a loader now: a collection of garbage waits 5 s for each that it comes upon."""
    for holder in (getattr(loader, "inner", loader), getattr(loader, "_reading", None)):
        iterator: Any = getattr(holder, "_iterator", None)
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def difference(make: Callable[[], Any], saved: Collection[int]) -> str:
    """Return where a resumed loader differs from one that was not stopped, "" if nowhere.

    It is resumed after the batches `saved`, in a process that has drawn numbers before, as callbacks do.
    """
    loader = PositionedLoader(make())
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    whole, run, stored = [], steps(loader), {}
    for step in range(1, max(saved) + 4):
        whole.append(next(run))
        if step in saved:
            stored[step] = typed_json.dumps(loader.state_dict())
    end_workers(loader)
    for step, state in stored.items():
        resumed = PositionedLoader(make())
        resumed.load_state_dict(typed_json.loads(state))
        torch.rand(3)
        run = steps(resumed)
        found = [next(run) for _ in whole[step:]]
        end_workers(resumed)
        if found != whole[step:]:
            return f"after batch {step}: {found} in place of {whole[step:]}"[:300]
    return ""


def judge(make: Callable[[], Any], saved: Collection[int]) -> tuple[str, str]:
    """Return the verdict on a loader and a note."""
    try:
        note = difference(make, saved)
    except ConfigError as error:
        return "refused", " ".join(str(error).split())
    return ("different" if note else "exact"), note


def judge_sampler(make: Callable[[], Any]) -> tuple[str, str]:
    """Resume within an epoch, at its end and in the next one."""
    return judge(make, (2, 5, 7, 10))


def in_pairs(kind: Any, make: Callable[[], Any]) -> Any:
    return kind(make(), 2)


def noisy(row: dict[str, int]) -> dict[str, Any]:
    return {"a": row["a"] + random.random()}


def judge_stream(make: Callable[[], Any]) -> tuple[str, str]:
    """Resume after each batch of an epoch and in the next one, in torch's loader, and after some in torchdata's."""
    loaders = ((DataLoader, range(1, 12)), (StatefulDataLoader, range(1, 12, 3)))
    verdicts = [judge(partial(in_pairs, kind, make), saved) for kind, saved in loaders]
    return next((verdict for verdict in verdicts if verdict[0] != "exact"), ("exact", ""))
