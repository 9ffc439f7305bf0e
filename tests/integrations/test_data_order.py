"""Samplers and streams whose order goes on exactly do so, and any other is refused by name before the first batch."""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset, interleave_datasets
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from transformers.trainer_pt_utils import (
    DistributedLengthGroupedSampler,
    DistributedSamplerWithLoop,
    LengthGroupedSampler,
    ShardSampler,
)
from trl.trainer.utils import RepeatSampler

from titan_ckpt.components.unsaved_state import class_name
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.data_order import SAMPLERS
from titan_ckpt.integrations.loader_position import PositionedLoader

DATA = range(20)
LENGTHS = [3 * (n % 7) + 1 for n in DATA]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LISTED: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(DATA),
    "random, own generator": lambda: RandomSampler(DATA, generator=_seeded()),
    "in order": lambda: SequentialSampler(DATA),
    "subset": lambda: SubsetRandomSampler([*DATA][3:], generator=_seeded()),
    "weighted": lambda: WeightedRandomSampler(LENGTHS, 20),
    "seedable": lambda: SeedableRandomSampler(DATA, generator=_seeded(), data_seed=3),
    "grouped": lambda: LengthGroupedSampler(2, lengths=LENGTHS),
    "grouped, own generator": lambda: LengthGroupedSampler(2, lengths=LENGTHS, generator=_seeded()),
    "grouped shares": lambda: DistributedLengthGroupedSampler(2, num_replicas=2, rank=1, lengths=LENGTHS),
    "shares with a loop": lambda: DistributedSamplerWithLoop(DATA, 2, num_replicas=3, rank=1),  # type: ignore[no-untyped-call]
    "shards": lambda: ShardSampler(DATA, 2, num_processes=2, process_index=1),  # type: ignore[arg-type]
    "repeated": lambda: RepeatSampler(DATA, 2, batch_size=4, repeat_count=2, seed=5),
}
BATCHES: dict[str, Callable[[], Any]] = {
    "batches": lambda: BatchSampler(RandomSampler(DATA), 3, drop_last=False),
    "batches, the last one dropped": lambda: BatchSampler(RandomSampler(DATA), 3, drop_last=True),
    "a share of batches": lambda: BatchSamplerShard(BatchSampler(RandomSampler(DATA), 2, False), 2, 1),
}
REFUSED = {
    "accelerate.data_loader.SkipBatchSampler",
    "lightning.pytorch.demos.lstm.SequenceSampler",
    "pytorch_lightning.demos.lstm.SequenceSampler",
    "transformers.trainer_pt_utils.BatchRebalanceSampler",
}
"""Samplers of libraries that nobody gives to a loader that is resumed."""


def steps(loader: PositionedLoader) -> Iterator[Any]:
    """Yield batches of epoch after epoch, each with a random number that is drawn after it, as a step draws some."""
    while True:
        for batch in loader:
            yield batch.tolist(), float(torch.rand(()))


@pytest.mark.parametrize("kind", [*LISTED, *BATCHES])
def test_a_listed_sampler_goes_on_exactly_wherever_it_is_stopped(kind: str) -> None:
    """After each batch of three epochs."""

    def made() -> PositionedLoader:
        if kind in LISTED:
            return PositionedLoader(DataLoader(DATA, 2, sampler=LISTED[kind]()))  # type: ignore[arg-type]  # numbers
        return PositionedLoader(DataLoader(DATA, batch_sampler=BATCHES[kind]()))  # type: ignore[arg-type]

    torch.manual_seed(1)
    loader = made()
    number, run, whole, stored = 3 * len(loader), steps(loader), [], []
    for _ in range(number):
        whole.append(next(run))
        stored.append(typed_json.dumps(loader.state_dict()))
    for step in range(1, number):
        resumed = made()
        resumed.load_state_dict(typed_json.loads(stored[step - 1]))
        run = steps(resumed)
        assert [next(run) for _ in whole[step:]] == whole[step:], f"after batch {step}"


def test_every_sampler_of_the_libraries_is_listed_or_refused() -> None:
    """One that a newer version adds is found here, and refused until it is listed."""
    warnings.simplefilter("ignore")
    found = set()
    for module in (
        "accelerate.data_loader", "lightning.fabric.utilities", "lightning.pytorch", "lightning_fabric.utilities",
        "pytorch_lightning", "torch.utils.data", "torchdata.stateful_dataloader", "transformers.trainer_pt_utils",
        "trl.trainer",
    ):  # fmt: skip
        package = importlib.import_module(module)
        for info in pkgutil.walk_packages(getattr(package, "__path__", []), f"{module}."):
            try:
                importlib.import_module(info.name)
            except Exception:
                continue
    for name, module_ in list(sys.modules.items()):
        for value in list(vars(module_).values()) if name.partition(".")[0] in _PACKAGES else ():
            if isinstance(value, type) and issubclass(value, Sampler) and value.__module__ == name:
                found.add(f"{value.__module__}.{value.__qualname__}")
    found -= {"torch.utils.data.sampler.Sampler"}
    assert found - SAMPLERS.keys() == REFUSED & found
    for wrapper in ("", "lightning.pytorch.", "pytorch_lightning."):
        assert not wrapper or f"{wrapper}overrides.distributed._IndexBatchSamplerWrapper" in SAMPLERS


_PACKAGES = {
    "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchdata", "transformers", "trl"
}  # fmt: skip


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


STREAM = Dataset.from_dict({"x": [*range(40)]}).to_iterable_dataset(num_shards=4)


@pytest.mark.parametrize(
    "shuffled",
    [
        lambda: STREAM.shuffle(seed=1, buffer_size=8),
        lambda: STREAM.shuffle(seed=1, buffer_size=8).map(lambda row: row).filter(lambda row: True).take(9),
        lambda: interleave_datasets([STREAM, STREAM.shuffle(seed=1, buffer_size=8)]),
    ],
)
def test_a_stream_that_shuffles_in_a_buffer_is_refused(shuffled: Callable[[], Any]) -> None:
    """Its state_dict() leaves the buffer out."""
    with pytest.raises(ConfigError, match="shuffles a stream in a buffer that no step holds"):
        PositionedLoader(DataLoader(shuffled(), 2))
    PositionedLoader(DataLoader(shuffled(), 2), allow=["datasets.IterableDataset.shuffle"])


@pytest.mark.parametrize(
    "stream",
    [
        lambda: STREAM,
        lambda: STREAM.map(lambda row: {"x": row["x"] + 1}),
        lambda: STREAM.filter(lambda row: row["x"] % 3 > 0),
        lambda: STREAM.skip(3).take(20),
        lambda: STREAM.batch(3).map(lambda row: {"x": row["x"][0]}),
        lambda: interleave_datasets([STREAM, STREAM.skip(5)]),
        lambda: interleave_datasets([STREAM, STREAM.skip(5)], probabilities=[0.5, 0.5], seed=1),
    ],
)
def test_other_operations_on_a_stream_go_on_exactly(stream: Callable[[], Any]) -> None:
    """After each batch of an epoch."""

    def made() -> PositionedLoader:
        return PositionedLoader(DataLoader(stream(), 2, collate_fn=lambda rows: torch.tensor([r["x"] for r in rows])))

    whole = [batch.tolist() for batch in made()]
    loader = made()
    stored = [typed_json.dumps(loader.state_dict()) for _ in loader]
    for step in range(1, len(whole)):
        resumed = made()
        resumed.load_state_dict(typed_json.loads(stored[step - 1]))
        assert [batch.tolist() for batch in resumed] == whole[step:], f"after batch {step}"
