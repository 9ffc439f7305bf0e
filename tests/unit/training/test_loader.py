"""Packed data: what a sequence is, in which order they come, and where a resumed run goes on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.training.data.loader import Batch, PackedDataset, build_dataloader, collate, tokenise

TOKENS = torch.arange(1001, dtype=torch.int32)


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


def test_ranks_deal_the_same_order_among_themselves() -> None:
    """Four ranks' sequences, taken in turn, are one rank's."""
    alone = starts(PackedDataset(TOKENS, 10, seed=1), 120)
    shares = [starts(PackedDataset(TOKENS, 10, seed=1, rank=r, num_ranks=4), 30) for r in range(4)]
    assert [start for turn in zip(*shares, strict=True) for start in turn] == alone


def test_d4_a_position_is_taken_over_by_another_number_of_ranks() -> None:
    """Two ranks go on exactly where one stopped."""
    one = PackedDataset(TOKENS, 10, seed=1)
    seen = starts(one, 42)
    shares = []
    for rank in range(2):
        dataset = PackedDataset(TOKENS, 10, seed=1, rank=rank, num_ranks=2)
        dataset.load_state_dict(one.state_dict())
        shares.append(starts(dataset, 20))
    rest = [start for turn in zip(*shares, strict=True) for start in turn]
    assert seen + rest == starts(PackedDataset(TOKENS, 10, seed=1), 82)


@pytest.mark.parametrize("taken", [0, 1, 7, 30])
def test_d4_a_loader_resumes_at_the_next_batch(taken: int) -> None:
    """Its state, through JSON, leads another loader to the batches that come next, over an epoch's end."""
    first = build_dataloader(PackedDataset(TOKENS, 10, seed=5), 4, collate, seed=0)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    expected = [next(batches) for _ in range(30)]
    second = build_dataloader(PackedDataset(TOKENS, 10, seed=5), 4, collate, seed=0)
    second.load_state_dict(state)
    for one, other in zip(expected, iter(second), strict=False):
        assert torch.equal(one["tokens"], other["tokens"])


def test_a_loader_draws_no_random_numbers_of_the_run() -> None:
    """Creating an iterator and taking batches leaves torch's generator where it was."""
    loader = build_dataloader(PackedDataset(TOKENS, 10, seed=5), 4, collate, seed=0)
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_d4_a_position_in_other_data_is_refused() -> None:
    """Another corpus, another length or another seed: the position means nothing there."""
    state = PackedDataset(TOKENS, 10, seed=5).state_dict()
    for other in (PackedDataset(TOKENS + 1, 10, 5), PackedDataset(TOKENS, 9, 5), PackedDataset(TOKENS, 10, 6)):
        with pytest.raises(LoadMismatchError, match=r"checkpoint\.resume\.exclude"):
            other.load_state_dict(state)


def test_a_corpus_shorter_than_one_sequence_is_a_config_error() -> None:
    """The message names both lengths."""
    with pytest.raises(ConfigError, match="2000 is too long for a corpus of 1001 tokens"):
        PackedDataset(TOKENS, 2000, seed=0)


def test_documents_are_tokenised_once(tmp_path: Path) -> None:
    """The second call maps the file of the first one and encodes nothing."""
    calls = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [ord(c) for c in text]

    for _ in range(2):
        tokens = tokenise(["ab", "c"], encode, {"corpus": "x"}, tmp_path)
        assert tokens.tolist() == [97, 98, 99]
    assert calls == ["ab", "c"]
    assert tokenise(["d"], encode, {"corpus": "y"}, tmp_path).tolist() == [100]


def test_collate_stacks_sequences() -> None:
    """A batch has a row for every sequence."""
    samples: list[Batch] = list(islice(PackedDataset(TOKENS, 10, seed=0), 3))
    batch = collate(samples)
    assert batch["tokens"].shape == batch["labels"].shape == (3, 10)
    assert torch.equal(batch["tokens"][1], samples[1]["tokens"])


@pytest.mark.parametrize(("ranks", "batch_size", "workers"), [(2, 3, 0), (2, 3, 2)])
def test_d4_batches_made_ahead_by_workers_are_not_lost_to_other_ranks(
    ranks: int, batch_size: int, workers: int
) -> None:
    """However far workers are ahead, another number of ranks goes on right after what was handed out."""
    loaders = [
        build_dataloader(PackedDataset(TOKENS, 10, 5, rank=r, num_ranks=ranks), batch_size, collate, 0, workers)
        for r in range(ranks)
    ]
    in_turn: list[int] = []
    batches = [iter(loader) for loader in loaders]
    for _ in range(5):
        in_turn += [int(s) for turn in zip(*(next(b)["tokens"][:, 0] for b in batches), strict=True) for s in turn]
    states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
    again = build_dataloader(PackedDataset(TOKENS, 10, 5, rank=1, num_ranks=ranks), batch_size, collate, 0, workers)
    again.load_state_dict(states[1])
    assert torch.equal(next(iter(again))["tokens"], next(batches[1])["tokens"])
    alone = build_dataloader(PackedDataset(TOKENS, 10, 5), 7, collate, 0)
    alone.load_state_dicts(states)
    in_turn += next(iter(alone))["tokens"][:, 0].tolist()
    assert in_turn == starts(PackedDataset(TOKENS, 10, 5), len(in_turn))
    states[1]["position"]["next_index"] += 1
    with pytest.raises(LoadMismatchError, match="not in step"):
        alone.load_state_dicts(states)
