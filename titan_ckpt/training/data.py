"""Packed next-token data: tokenised once, cut in sequences, in a shuffled order that any rank can resume.

Owns the order of the data and its position. Knows neither text files nor models.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.training.cache import cached_folder

IGNORED = -100
"""A label that no loss is computed for."""
Batch = dict[str, torch.Tensor]
"""`tokens` and `labels`, both (batch, sequence) int64; `labels[i]` is the token after `tokens[i]`, or IGNORED."""


def tokenise(
    documents: Sequence[str], encode: Callable[[str], list[int]], key: dict[str, object], cache: Path
) -> torch.Tensor:
    """Return all documents' ids one after the other, int32, memory-mapped from the cache; `key` names the content."""

    def build(folder: Path) -> None:
        ids = array("i")
        for document in documents:
            ids.extend(encode(document))
        with (folder / "tokens.int32").open("wb") as file:
            ids.tofile(file)

    file = cached_folder(cache, "tokens", {**key, "byteorder": sys.byteorder}, build) / "tokens.int32"
    return torch.from_file(str(file), shared=False, size=file.stat().st_size // 4, dtype=torch.int32)


class PackedDataset(IterableDataset[Batch]):
    """Endless sequences of a token stream, each epoch in another order, dealt to the ranks in turn.

    The position is one number that is the same on every rank: how many sequences all ranks together have taken. So a
    run can go on with another number of ranks, and takes the sequences in the same order.
    """

    def __init__(
        self, tokens: torch.Tensor, sequence_length: int, seed: int, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Cut `tokens` (1-D) in sequences that overlap by one, the last one's label being the next one's token.

        Raises: ConfigError if there is not one whole sequence.
        """
        self.num_sequences = (len(tokens) - 1) // sequence_length
        if self.num_sequences < 1:
            raise ConfigError(
                [f"data.sequence_length: {sequence_length} is too long for a corpus of {len(tokens)} tokens"]
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.next_index = 0
        self.fingerprint = self._fingerprint()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's sequences from the current position on, for ever.

        A loader with worker processes makes each of them a rank of its own; their positions are the workers'.
        """
        worker = get_worker_info()
        rank, stride = self.rank, self.num_ranks
        if worker is not None:
            rank, stride = rank * worker.num_workers + worker.id, stride * worker.num_workers
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            index = self.next_index + rank
            if index // self.num_sequences != epoch:
                epoch = index // self.num_sequences
                order = self._order(epoch)
            self.next_index += stride  # before the yield: what was handed out counts as taken
            yield self.sequence(int(order[index % self.num_sequences]))

    @property
    def epoch(self) -> int:
        """Which pass over the data the next sequence is of, counted from 0."""
        return self.next_index // self.num_sequences

    def state_dict(self) -> dict[str, Any]:
        return {"next_index": self.next_index, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position over. Raises: LoadMismatchError if it counts other sequences than these."""
        if state_dict["fingerprint"] != self.fingerprint:
            raise LoadMismatchError(
                "dataloader: the checkpoint's position is in other data than this run's (corpus, tokenizer, "
                "sequence_length or seed differ). Restore them, or start the data afresh with "
                'checkpoint.resume.exclude = ["dataloader"]'
            )
        self.next_index = state_dict["next_index"]

    def sequence(self, number: int) -> Batch:
        """Return a sequence by its place in the text; whose turn it is changes nothing."""
        start = number * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 0x9E3779B1 * epoch)
        return torch.randperm(self.num_sequences, generator=generator)

    def _fingerprint(self) -> str:
        """Digest what a position depends on. Of the tokens a sample is read: enough to tell two corpora apart."""
        sample = self.tokens[:: max(1, len(self.tokens) // 65536)].contiguous()
        hasher = hashlib.sha256(repr((len(self.tokens), self.sequence_length, self.seed)).encode())
        hasher.update(sample.numpy().tobytes())
        return hasher.hexdigest()[:32]


def collate(samples: Sequence[Batch]) -> Batch:
    """Stack sequences of one length to a batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def build_dataloader(
    dataset: IterableDataset[Batch], batch_size: int, collate_fn: Callable[[Sequence[Batch]], Batch], seed: int
) -> Any:
    """Return a StatefulDataLoader over the dataset, whose state holds the dataset's position.

    Its generator is its own: creating an iterator draws from it, and would otherwise move the run's random numbers.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():  # torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn, generator=generator)
