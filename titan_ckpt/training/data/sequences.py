"""Sequences in one order that all ranks share, of which each takes its part.

Owns the order: sequence number k of all ranks together is the same whatever the number of ranks, of worker processes
and of sequences in a batch. So the position in the data is one number, and a run goes on from it in any layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.tokens import Conversations

Bookmark = dict[str, Any] | None
"""The place in a stream after a sequence, from which it can be read on; None for data that is found by number."""


class OrderedDataset(IterableDataset[Batch]):
    """Endless sequences in an order of which this data-parallel rank takes every `num_ranks`-th."""

    fingerprint: str
    """Digest of all that a position depends on."""
    batch_size: int = 1
    """Sequences per batch. Worker processes of a loader make whole batches in turn, so they need it."""
    next_index: int = 0
    """Number of sequences that all ranks together have taken before this iteration."""
    bookmark: Bookmark = None
    every_label_counts: bool = False
    """Whether no sequence has a label without a loss."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        """`rank` and `num_ranks` count data-parallel ranks; ranks that read the same data have the same `rank`."""
        self.rank = rank
        self.num_ranks = num_ranks

    def __iter__(self) -> Iterator[Batch]:
        return (sample for sample, _ in self.samples())

    def samples(self) -> Iterator[tuple[Batch, Bookmark]]:
        """Yield this rank's sequences, or in a worker process this worker's, from `next_index` on without end."""
        raise NotImplementedError

    def indices(self) -> Iterator[int]:
        """Yield the numbers of these sequences."""
        return (self.next_index + share * self.num_ranks + self.rank for share in self.shares())

    def after(self, index: int, num: int) -> int:
        """Return how many sequences all ranks have taken when each has taken `num` more than at `index`."""
        return index + num * self.num_ranks

    def shares(self) -> Iterator[int]:
        """Yield the numbers of these sequences among those that this rank takes, from 0."""
        worker = get_worker_info()
        num_workers, first = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        batch = first
        while True:
            for within in range(self.batch_size):
                yield batch * self.batch_size + within
            batch += num_workers

    def epoch(self, index: int) -> int:
        """Return the pass over the data that a sequence belongs to, counted from 0; equal on every rank."""
        return 0


class IndexedDataset(OrderedDataset):
    """Sequences that are found by their number, in a new order in each epoch."""

    num_sequences: int

    def __init__(self, seed: int, *, shuffle: bool = True, **share: int) -> None:
        """`share`: this rank's, as OrderedDataset has it."""
        super().__init__(**share)
        self.seed = seed
        self.shuffle = shuffle

    def sequence(self, number: int) -> Batch:
        """Return a sequence by its place in the data."""
        raise NotImplementedError

    def samples(self) -> Iterator[tuple[Batch, Bookmark]]:
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for index in self.indices():
            number = index % self.num_sequences
            if self.shuffle:
                if index // self.num_sequences != epoch:
                    epoch = index // self.num_sequences
                    order = self.order(epoch)
                number = int(order[number])
            yield self.sequence(number), None

    def order(self, epoch: int) -> torch.Tensor:
        """Return the numbers of all sequences in the order of an epoch, if it is shuffled."""
        generator = torch.Generator().manual_seed(self.seed + 0x9E3779B1 * epoch)
        return torch.randperm(self.num_sequences, generator=generator)

    def epoch(self, index: int) -> int:
        return index // self.num_sequences

    def left(self, index: int, epochs: int) -> int:
        """Return how many sequences all ranks together still take until the end of an epoch."""
        return max(epochs * self.num_sequences - index, 0)


class MapDataset(IndexedDataset):
    """Map-style data of one's own, dealt to the ranks as torch's DistributedSampler deals it.

    In each epoch the ranks take equally many samples: the first ones of the order come once more at its end, or with
    `drop_last` its last ones are left out. On another number of ranks, the rest of the epoch is dealt anew.
    """

    def __init__(self, data: Any, seed: int, *, drop_last: bool = False, **order: Any) -> None:
        """`data`: it has `__len__` and `__getitem__`. `order`: settings of IndexedDataset.

        Raises: ConfigError if a rank would have no sample.
        """
        super().__init__(seed, **order)
        self.data, self.drop_last, self.num_sequences = data, drop_last, len(data)
        self.fingerprint = f"map {self.num_sequences} {seed} {self.shuffle} {drop_last}"
        if self.num_sequences < (self.num_ranks if drop_last else 1):
            found = f"its {self.num_sequences} samples leave none for each of {self.num_ranks} ranks"
            raise ConfigError([f"data.dataset: {found}{', by drop_last' * drop_last}; give more samples"])

    def _each(self, num: int) -> int:
        """Return how many samples each rank takes of `num`."""
        return num // self.num_ranks if self.drop_last else ceil(num / self.num_ranks)

    def _place(self, index: int, share: int) -> tuple[int, int]:
        """Return the epoch, and the place in its order, where the ranks take their samples of this number."""
        epoch, first = divmod(index, self.num_sequences)
        if share < (each := self._each(self.num_sequences - first)):
            return epoch, first + share * self.num_ranks
        epochs, share = divmod(share - each, self._each(self.num_sequences))
        return epoch + 1 + epochs, share * self.num_ranks

    def after(self, index: int, num: int) -> int:
        epoch, first = self._place(index, num)
        return epoch * self.num_sequences + first

    def left(self, index: int, epochs: int) -> int:
        epoch, first = divmod(index, self.num_sequences)
        later = (epochs - epoch - 1) * self._each(self.num_sequences)
        return max(self._each(self.num_sequences - first) + later, 0) * self.num_ranks

    def indices(self) -> Iterator[int]:
        for share in self.shares():
            epoch, first = self._place(self.next_index, share)
            yield epoch * self.num_sequences + (first + self.rank) % self.num_sequences

    def order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.num_sequences, generator=torch.Generator().manual_seed(self.seed + epoch))

    def sequence(self, number: int) -> Any:
        return self.data[number]


class PackedDataset(IndexedDataset):
    """The sequences of a token stream."""

    every_label_counts = True

    def __init__(self, tokens: torch.Tensor, sequence_length: int, seed: int, **order: Any) -> None:
        """Cut `tokens` (1-D) into sequences that overlap by one token: a last label is the next first token.

        `order`: settings of IndexedDataset. Raises: ConfigError if the tokens do not fill one sequence.
        """
        super().__init__(seed, **order)
        self.num_sequences = (len(tokens) - 1) // sequence_length
        if self.num_sequences < 1:
            raise ConfigError(
                [f"data.sequence_length: {sequence_length} is too long for a corpus of {len(tokens)} tokens"]
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.fingerprint = _fingerprint(tokens, sequence_length, seed, self.shuffle)

    def sequence(self, number: int) -> Batch:
        start = number * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}


class ConversationDataset(IndexedDataset):
    """Conversations, one in each sequence."""

    def __init__(self, conversations: Conversations, numbers: range, seed: int, **order: Any) -> None:
        """`numbers`: the conversations to take, one or more. `order`: settings of IndexedDataset."""
        super().__init__(seed, **order)
        self.conversations = conversations
        self.numbers = numbers
        self.num_sequences = len(numbers)
        self.fingerprint = _fingerprint(conversations.labels, len(conversations), numbers, seed, self.shuffle)

    def sequence(self, number: int) -> Batch:
        return self.conversations[self.numbers[number]]


class DummyDataset(IndexedDataset):
    """Random tokens; the same numbers for the same seed."""

    num_sequences = 2**48
    every_label_counts = True

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, **share: int) -> None:
        super().__init__(seed, shuffle=False, **share)
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.fingerprint = f"dummy {vocab_size} {sequence_length} {seed}"

    def sequence(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + number) % 2**63)
        ids = torch.randint(self.vocab_size, (self.sequence_length + 1,), generator=generator)
        return {"tokens": ids[:-1], "labels": ids[1:]}


def _fingerprint(ids: torch.Tensor, *settings: object) -> str:
    """Return a digest of ids and settings; a sample of the ids is enough to identify them."""
    sample = ids[:: max(1, len(ids) // 65536)].contiguous()
    hasher = hashlib.sha256(repr((len(ids), *settings)).encode())
    hasher.update(sample.numpy().tobytes())
    return hasher.hexdigest()[:32]
