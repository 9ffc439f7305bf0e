"""PositionedLoader: a resumed loader goes on exactly where it was, and reads nothing that came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integrations.loader_cases import (
    LOADERS,
    SAMPLED,
    STREAMS,
    Counting,
    Numbers,
    Plain,
    Stream,
    by_own_generator,
    judge_sampler,
    judge_stream,
    shuffled,
    steps,
)
from titan_ckpt import CheckpointConfig, CheckpointManager
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.loader_position import PositionedLoader


@pytest.mark.parametrize("kind", [*LOADERS, *SAMPLED])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_resumed_loader_returns_the_same_batches(kind: str) -> None:
    assert judge_sampler((LOADERS | SAMPLED)[kind]) == ("exact", "")


@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_stream_returns_the_same_examples(kind: str) -> None:
    verdict, note = judge_stream(STREAMS[kind])
    assert verdict == ("refused" if kind == "shuffle" else "exact"), note


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


@pytest.mark.parametrize(
    ("loader", "fault"),
    [
        (lambda: DataLoader(Numbers(), 2, sampler=Counting()), r"sampler .*Counting: its code sets self\.epochs"),
        (lambda: DataLoader(shuffled().map(dict), 2), r"leaves out the buffer of shuffle\(\)"),
        (lambda: StatefulDataLoader(shuffled(), 2), r"leaves out the buffer of shuffle\(\)"),
    ],
)
def test_what_would_continue_elsewhere_is_refused_and_can_be_allowed(loader: Callable[[], Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f'{fault}(?s:.*)checkpoint.allow = \\["(.*)"\\]') as refused:
        PositionedLoader(loader())
    PositionedLoader(loader(), allow=[str(refused.value).rpartition('["')[2].partition('"]')[0]])


def test_a_loop_of_ones_own_refuses_a_shuffled_stream_too() -> None:
    for data in (shuffled(), StatefulDataLoader(shuffled(), 2)):
        with pytest.raises(ConfigError, match=r"leaves out the buffer of shuffle\(\)"):
            CheckpointManager(CheckpointConfig(), model_parts=[torch.nn.Linear(1, 1)], dataloader=data)
