"""PositionedLoader: a resumed loader goes on exactly where it was, and reads nothing that came before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ConfigError, LoadMismatchError
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


def by_own_generator() -> Any:
    return DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), 2),
    "shuffled by the process's generator": lambda: DataLoader(Numbers(), 2, shuffle=True),
    "shuffled by its own generator": by_own_generator,
    "with replacement": lambda: DataLoader(Numbers(), 2, sampler=RandomSampler(Numbers(), replacement=True)),
    "one share of two": lambda: DataLoader(Numbers(20), 2, sampler=DistributedSampler(Numbers(20), 2, 1)),
    "without batches": lambda: DataLoader(Numbers(), None, shuffle=True),
    "a worker": lambda: DataLoader(Plain(10), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "a stream": lambda: DataLoader(Stream(), 2),
    "a stream with a length": lambda: DataLoader(Sized(), 2),
    "stateful": lambda: StatefulDataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
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
