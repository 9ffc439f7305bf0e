"""PositionedLoader: a resumed loader goes on exactly where it was, and reads nothing that came before."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import data_loader as of_accelerate
from datasets import Dataset as HuggingFaceDataset
from datasets import IterableDataset as Streamed
from datasets import concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from datasets.iterable_dataset import _BaseExamplesIterable
from lightning.fabric.utilities import distributed as of_lightning
from lightning.pytorch.demos.lstm import SequenceSampler
from lightning.pytorch.overrides import distributed as of_overrides
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
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as of_torchdata
from transformers import trainer_pt_utils as of_transformers
from trl.trainer.utils import RepeatSampler

from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.components.known.streams import PARTS
from titan_ckpt.components.unsaved_state import LIBRARIES
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.data_order import SAMPLERS
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


class Stream(IterableDataset[int]):
    """Numbers one after another; its position is the next one."""

    def __init__(self) -> None:
        self.next, self.read = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 10:
            self.next += 1
            self.read += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Sized(Stream):
    def __len__(self) -> int:
        return 10


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
    "a stream": lambda: DataLoader(Stream(), 2),
    "a stream with a length": lambda: DataLoader(Sized(), 2),
    "a stream that draws its order": lambda: DataLoader(Turning(), 2),
    "augmentations": lambda: DataLoader(Augmented(10), 2),
    "a sampler around another": lambda: DataLoader(Plain(10), 2, sampler=Around()),
    "stateful": lambda: StatefulDataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
}


class Estimated(BatchSampler):
    """Batches whose number `__len__` does not know."""

    def __len__(self) -> int:
        return 3


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


class Giving20(Giving):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__(), *super().__iter__()])


def samplers() -> dict[str, Callable[[], Any]]:
    """Return a sampler of each class that the installed libraries have, by its name."""
    lengths = [3, 9, 1, 4, 8, 2, 7, 5, 6, 10]
    loops: Any = of_transformers.DistributedSamplerWithLoop
    share: Any = {"num_replicas": 2, "rank": 1}
    made: dict[str, Callable[[], Any]] = {
        "sampler.SequentialSampler": lambda: SequentialSampler(Plain(10)),
        "sampler.RandomSampler": lambda: RandomSampler(Plain(10)),
        "sampler.SubsetRandomSampler": lambda: SubsetRandomSampler(range(10)),
        "sampler.WeightedRandomSampler": lambda: WeightedRandomSampler(lengths, 10),
        "DistributedSampler": lambda: DistributedSampler(Plain(20), 2, 1),
        "torchdata.stateful_dataloader.sampler.RandomSampler": lambda: of_torchdata.RandomSampler(
            Plain(10), generator=torch.Generator().manual_seed(3)
        ),
        "StatefulDistributedSampler": lambda: of_torchdata.StatefulDistributedSampler(Plain(20), 2, 1),
        "SeedableRandomSampler": lambda: of_accelerate.SeedableRandomSampler(Plain(10), data_seed=3),
        "DistributedSamplerWithLoop": lambda: loops(Plain(20), 2, **share),
        "transformers.trainer_pt_utils.LengthGroupedSampler": lambda: of_transformers.LengthGroupedSampler(
            2, lengths=lengths
        ),
        "DistributedLengthGroupedSampler": lambda: of_transformers.DistributedLengthGroupedSampler(
            2, lengths=lengths * 2, **share
        ),
        "ShardSampler": lambda: of_transformers.ShardSampler(Plain(20), 2, num_processes=2, process_index=1),
        "RepeatSampler": lambda: RepeatSampler(Plain(5), 2, seed=3),
        "utilities.distributed.DistributedSamplerWrapper": lambda: of_lightning.DistributedSamplerWrapper(
            RandomSampler(Plain(20), generator=torch.Generator().manual_seed(3)), **share
        ),
        "UnrepeatedDistributedSampler": lambda: of_overrides.UnrepeatedDistributedSampler(Plain(20), **share),
        "UnrepeatedDistributedSamplerWrapper": lambda: of_overrides.UnrepeatedDistributedSamplerWrapper(
            Giving20(), **share
        ),
    }
    batches: dict[str, Callable[[], Any]] = {
        "BatchSampler": lambda: BatchSampler(RandomSampler(Plain(10)), 2, False),
        "torchdata.stateful_dataloader.sampler.BatchSampler": lambda: of_torchdata.BatchSampler(
            RandomSampler(Plain(10)), 2, False
        ),
        "BatchSamplerShard": lambda: of_accelerate.BatchSamplerShard(BatchSampler(Giving20(), 2, False), 2, 1),
        "SkipBatchSampler": lambda: of_accelerate.SkipBatchSampler(BatchSampler(RandomSampler(Plain(14)), 2, False), 2),
        "BatchRebalanceSampler": lambda: of_transformers.BatchRebalanceSampler(lengths * 2, 4, 2, 1, rank=1),
        "SequenceSampler": lambda: SequenceSampler(Plain(10), 2),
    }
    return {
        **{name: partial(over, make) for name, make in made.items()},
        **{name: partial(over, make, batches=True) for name, make in batches.items()},
    }


def over(make: Callable[[], Any], *, batches: bool = False) -> Any:
    """Return a loader of numbers in the order of a sampler."""
    return DataLoader(Numbers(20), batch_sampler=make()) if batches else DataLoader(Numbers(20), 2, sampler=make())


LOADERS |= {
    "an estimated length": lambda: DataLoader(Numbers(), batch_sampler=Estimated(RandomSampler(Numbers()), 2, False)),
    "a sampler with a state": lambda: DataLoader(Numbers(), 2, sampler=Giving()),
    **samplers(),
}


def steps(loader: PositionedLoader) -> Iterator[Any]:
    """Yield batches of epoch after epoch, each with a random number that is drawn after it, as a step draws some."""
    while True:
        for batch in loader:
            yield batch.tolist() if isinstance(batch, torch.Tensor) else batch, float(torch.rand(()))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_resumed_loader_returns_the_same_batches(kind: str) -> None:
    """Within an epoch, at its end and in the next one, also if the resumed process has drawn numbers before."""
    loader = PositionedLoader(LOADERS[kind]())
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    whole, run, stored = [], steps(loader), {}
    for step in range(1, 13):
        whole.append(next(run))
        if step in (2, 5, 7, 10):
            stored[step] = typed_json.dumps(loader.state_dict())
    for step, state in stored.items():
        resumed = PositionedLoader(LOADERS[kind]())
        resumed.load_state_dict(typed_json.loads(state))
        torch.rand(3)  # such as callbacks draw before the first batch
        run = steps(resumed)
        assert [next(run) for _ in whole[step:]] == whole[step:], f"after batch {step}"


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


def test_a_loop_that_leaves_the_rest_of_an_epoch_out_begins_the_next_one() -> None:
    """The sampler is told another epoch after a break, as Fabric tells it: its order is a new one."""
    loader = share(0, 2)
    for expected in range(3):
        next(iter(loader))
        assert (loader.epoch, loader.inner.sampler.epoch) == (expected, expected)


def test_another_number_of_ranks_reads_the_same_samples() -> None:
    """A position in a dataset of a different size means nothing, although the ranks' lengths differ anyway."""
    loaders = [share(rank, 2) for rank in range(2)]
    sampler: DistributedSampler[int] = DistributedSampler(Plain(40), 4, 0, seed=5)
    other = PositionedLoader(DataLoader(Plain(40), 2, sampler=sampler))
    with pytest.raises(LoadMismatchError, match="samples was 24, now 40"):
        other.load_state_dicts([old.state_dict() for old in loaders])


class Unknown(IterableDataset[int]):
    """A stream that does not know where it is."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("loader", "fault"),
    [
        (lambda: DataLoader(Unknown()), "Unknown is an IterableDataset without state_dict"),
        (lambda: DataLoader(Stream(), num_workers=1), "Stream is read by 1 worker processes"),
        (lambda: [1, 2], "list is no DataLoader"),
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


def shuffled() -> Any:
    return HuggingFaceDataset.from_dict({"a": [*range(40)]}).to_iterable_dataset().shuffle(buffer_size=16)


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


def noisy(row: dict[str, int]) -> dict[str, Any]:
    return {"a": row["a"] + random.random()}


def noisy_rows(rows: dict[str, list[int]]) -> dict[str, Any]:
    return {"a": [number + random.random() for number in rows["a"]]}


def noisy_generator(shards: list[int]) -> Iterator[dict[str, float]]:
    yield from ({"a": shard + random.random()} for shard in shards)


def counted() -> Any:
    draw = random.Random(3)
    return numbers().map(lambda row: {"a": row["a"] + draw.random()})


_AGAIN = "it reads examples once more after a resume"


@pytest.mark.parametrize(
    ("loader", "fault"),
    [
        (lambda: DataLoader(Numbers(), 2, sampler=Counting()), r"sampler .*Counting: its code sets self\.epochs"),
        (lambda: DataLoader(shuffled().map(dict), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: StatefulDataLoader(shuffled(), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: StatefulDataLoader(Plain(9), 2, sampler=RandomSampler(Plain(9))), r"Random.*does not hold its order"),
        (lambda: StatefulDataLoader(Plain(9), 2, sampler=Counting()), r"Counting: a StatefulDataLoader does not hold"),
        (lambda: DataLoader(Holding(shuffled()), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: DataLoader(numbers().map(noisy_rows, batched=True, batch_size=4), 2), f"MappedExamples.*{_AGAIN}"),
        (lambda: DataLoader(interleave_datasets([numbers().map(noisy)]), 2), f"CyclingMultiSources.*{_AGAIN}"),
        (lambda: DataLoader(Streamed.from_generator(noisy_generator, gen_kwargs={"shards": [1, 2]})), _AGAIN),
        (lambda: DataLoader(counted(), 2), "function of a stream .*counted.*it draws from draw, a Random"),
    ],
)
def test_what_would_continue_elsewhere_is_refused_and_can_be_allowed(loader: Callable[[], Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f'{fault}(?s:.*)checkpoint.allow = \\["(.*)"\\]') as refused:
        PositionedLoader(loader())
    PositionedLoader(loader(), allow=[str(refused.value).rpartition('["')[2].partition('"]')[0]])


def numbers(first: int = 0) -> Any:
    return HuggingFaceDataset.from_dict({"a": [*range(first, first + 12)]}).to_iterable_dataset(num_shards=3)


def generated(shards: list[int]) -> Iterator[dict[str, int]]:
    yield from ({"a": 4 * shard + number} for shard in shards for number in range(4))


def doubled(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"a": [value for number in rows["a"] for value in (number, -number)]}


STREAMS: dict[str, Callable[[], Any]] = {
    "a map that draws": lambda: numbers().map(noisy),
    "a filter that draws": lambda: numbers().filter(lambda _: random.random() < 0.7),
    "a map of a generator that draws": lambda: Streamed.from_generator(generated, gen_kwargs={"shards": [0, 1, 2]}).map(
        noisy
    ),
    "map": lambda: numbers().map(lambda row: {"a": row["a"] * 2}),
    "a batched map": lambda: numbers().map(doubled, batched=True, batch_size=4),
    "filter": lambda: numbers().filter(lambda row: row["a"] % 3 != 1),
    "batch": lambda: numbers().batch(2).map(lambda row: {"a": sum(row["a"])}),
    "interleave": lambda: interleave_datasets([numbers(), numbers(50)]),
    "a random interleave": lambda: interleave_datasets([numbers(), numbers(50)], probabilities=[0.6, 0.4], seed=5),
    "concatenate": lambda: concatenate_datasets([numbers(), numbers(50)]),
    "columns of two": lambda: concatenate_datasets([numbers(), numbers().rename_column("a", "b")], axis=1),
    "repeat": lambda: numbers().repeat(2),
    "take": lambda: numbers().take(9),
    "skip": lambda: numbers().skip(2),
    "select_columns": lambda: numbers().map(lambda row: {"b": row["a"]}).select_columns("a"),
    "a generator": lambda: Streamed.from_generator(generated, gen_kwargs={"shards": [0, 1, 2]}),
    "with_format": lambda: numbers().with_format("torch"),
    "a share by rows": lambda: split_dataset_by_node(numbers(), 1, 2),
    "reshard": lambda: numbers().reshard(),
}


@pytest.mark.parametrize("over", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_stream_returns_the_same_examples(kind: str, over: Any) -> None:
    """After each batch of an epoch, the last one included, and in the next epoch."""
    loader = PositionedLoader(over(STREAMS[kind](), 2))
    run, whole, stored = steps(loader), [], {}
    for step in range(1, 15):
        whole.append({name: value.tolist() for name, value in next(run)[0].items()})
        stored[step] = typed_json.dumps(loader.state_dict())
    for step in range(1, 12):
        resumed = PositionedLoader(over(STREAMS[kind](), 2))
        resumed.load_state_dict(typed_json.loads(stored[step]))
        run = steps(resumed)
        found = [{name: value.tolist() for name, value in next(run)[0].items()} for _ in whole[step:]]
        assert found == whole[step:], f"after batch {step}"


def test_every_part_of_the_streams_of_datasets_is_listed() -> None:
    """One that a newer version adds is refused until it is listed."""
    pending, found = [_BaseExamplesIterable], set()
    while pending:
        kinds = pending.pop().__subclasses__()
        pending += kinds
        found |= {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    assert found <= PARTS.keys()


def test_a_loop_of_ones_own_refuses_a_shuffled_stream_too() -> None:
    for data in (shuffled(), StatefulDataLoader(shuffled(), 2)):
        with pytest.raises(ConfigError, match=r"leaves out the buffer of shuffle\(\)"):
            CheckpointManager(CheckpointConfig(), model_parts=[torch.nn.Linear(1, 1)], dataloader=data)


@pytest.mark.parametrize("over", [lambda stream: stream, lambda stream: StatefulDataLoader(stream, None)])
def test_later_epochs_of_a_loop_of_ones_own_begin_at_the_start(over: Callable[[Any], Any], tmp_path: Path) -> None:
    """A position is one of an epoch; datasets would begin each later epoch there too."""

    def manager(data: Any) -> CheckpointManager:
        config = CheckpointConfig(save=SaveConfig(interval=1))
        return CheckpointManager(config, model_parts=[torch.nn.Linear(1, 1)], dataloader=data, base_folder=tmp_path)

    data = over(numbers())
    with manager(data) as first:
        first.load()
        run = iter(data)
        assert [next(run)["a"] for _ in range(5)] == [*range(5)]
        first.save(1)
    resumed = over(numbers())
    with manager(resumed) as second:
        second.load()
        assert [[row["a"] for row in resumed] for _ in range(3)] == [[*range(5, 12)], [*range(12)], [*range(12)]]


def test_a_sampler_that_draws_in_the_middle_of_an_order_is_refused() -> None:
    """Steps draw from the same numbers in between."""
    run = steps(PositionedLoader(DataLoader(Plain(10), 2, sampler=Lazy())))
    next(run)  # an order may be drawn whole, at its first index
    with pytest.raises(ConfigError, match=r"Lazy: it draws from the process's random numbers in the middle"):
        next(run)


def test_a_sampler_of_another_class_is_another_order() -> None:
    loader = PositionedLoader(by_own_generator())
    next(steps(loader))
    with pytest.raises(LoadMismatchError, match=r"sampler was .*RandomSampler, now .*SequentialSampler"):
        PositionedLoader(DataLoader(Numbers(), 2)).load_state_dict(loader.state_dict())


def test_every_sampler_of_the_installed_libraries_is_listed() -> None:
    """One that a newer version adds is refused until it is listed."""
    for name in (
        "accelerate.data_loader", "lightning.fabric.utilities.distributed", "lightning.pytorch.demos.lstm",
        "lightning.pytorch.overrides.distributed", "pytorch_lightning.demos.lstm",
        "pytorch_lightning.overrides.distributed", "transformers.trainer_pt_utils", "trl.trainer.utils",
    ):  # fmt: skip
        importlib.import_module(name)
    pending: list[type[Any]] = [Sampler]
    found = set()
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.partition(".")[0] in LIBRARIES:
            found.add(f"{kind.__module__}.{kind.__qualname__}")
    assert found - SAMPLERS.keys() == set()
    tried = {name for name in found if any(f".{name}".endswith(f".{end}") for end in LOADERS)}
    assert {name.rpartition(".")[2] for name in found - tried} == {"Sampler", "_InfiniteConstantSampler"}
