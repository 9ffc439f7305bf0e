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
from torchdata.stateful_dataloader import StatefulDataLoader

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

    batch_size: int = 1
    """Sequences of a batch; a loader with worker processes has each of them make whole batches, in turn."""

    def __init__(
        self, tokens: torch.Tensor, sequence_length: int, seed: int, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Cut `tokens` (1-D) in sequences that overlap by one, the last one's label being the next one's token.

        `rank` and `num_ranks` count data-parallel ranks: those that share their data have the same rank.
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
        """Where the ranks began together; without worker processes, where they are."""
        self._num_made = 0
        """In a worker process: sequences it has made from there on."""
        self.fingerprint = self._fingerprint()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's sequences from the current position on, for ever."""
        worker = get_worker_info()
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            if worker is None:
                index = self.next_index + self.rank
                self.next_index += self.num_ranks  # before the yield: what was handed out counts as taken
            else:
                turn, within = divmod(self._num_made, self.batch_size)
                batch = turn * worker.num_workers + worker.id
                index = self.next_index + (batch * self.batch_size + within) * self.num_ranks + self.rank
                self._num_made += 1
            if index // self.num_sequences != epoch:
                epoch = index // self.num_sequences
                order = self._order(epoch)
            yield self.sequence(int(order[index % self.num_sequences]))

    @property
    def epoch(self) -> int:
        """Which pass over the data the next sequence is of, counted from 0."""
        return self.next_index // self.num_sequences

    def state_dict(self) -> dict[str, Any]:
        return {"next_index": self.next_index, "num_made": self._num_made, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position over. Raises: LoadMismatchError if it counts other sequences than these."""
        if state_dict["fingerprint"] != self.fingerprint:
            raise LoadMismatchError(
                "dataloader: the checkpoint's position is in other data than this run's (corpus, tokenizer, "
                "sequence_length or seed differ). Restore them, or start the data afresh with "
                'checkpoint.resume.exclude = ["dataloader"]'
            )
        self.next_index, self._num_made = state_dict["next_index"], state_dict["num_made"]

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
    dataset: IterableDataset[Batch],
    batch_size: int,
    collate_fn: Callable[[Sequence[Batch]], Batch],
    seed: int,
    num_workers: int = 0,
) -> Any:
    """Return a StatefulDataLoader over the dataset, whose state holds the dataset's position.

    `num_workers`: processes that make batches; 0 makes them in this one. Its generator is its own: creating an iterator
    draws from it, and would otherwise move the run's random numbers.
    """
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "generator": torch.Generator().manual_seed(seed),
    }
    with warnings.catch_warnings():  # torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        if isinstance(dataset, PackedDataset):
            return PackedDataLoader(dataset, **settings)
        return StatefulDataLoader(dataset, **settings)


class PackedDataLoader(StatefulDataLoader[Batch]):  # type: ignore[misc]  # torchdata ships no types
    """A StatefulDataLoader over packed data whose position another number of data-parallel ranks can take over."""

    def __init__(self, dataset: PackedDataset, batch_size: int, **settings: Any) -> None:
        """Take what StatefulDataLoader takes."""
        dataset.batch_size = batch_size
        self._packed = dataset
        self._num_taken = dataset.next_index
        """Sequences that all ranks together have been given, whatever workers have made ahead."""
        self.dp_rank = dataset.rank
        self.dp_world_size = dataset.num_ranks
        super().__init__(dataset, batch_size=batch_size, **settings)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on, for ever."""
        self._packed.next_index = self._num_taken
        for batch in super().__iter__():
            self._num_taken += self._packed.batch_size * self.dp_world_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self._packed.next_index = self._num_taken  # where an iterator that this may create begins
        return {"position": self._packed.state_dict() | {"num_made": 0}, "loader": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where this data-parallel rank stopped. Raises: LoadMismatchError for a position in other data."""
        self._take_over(state_dict["position"])
        super().load_state_dict(state_dict["loader"])

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Go on where another number of data-parallel ranks stopped together.

        Raises: LoadMismatchError for a position in other data, or ranks that were not at one position.
        """
        positions = [state["position"] for state in state_dicts]
        if any(position != positions[0] for position in positions):
            raise LoadMismatchError(
                f"dataloader: the checkpoint's {len(positions)} data-parallel ranks had taken "
                f"{sorted({position['next_index'] for position in positions})} sequences: they were not in step"
            )
        self._take_over(positions[0])
        super().load_state_dict({})  # forget the iterator, and what it had made ahead

    def _take_over(self, position: dict[str, Any]) -> None:
        self._packed.load_state_dict(position)
        self._num_taken = self._packed.next_index
