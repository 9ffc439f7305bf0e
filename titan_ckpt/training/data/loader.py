"""Packed next-token data: tokenised once, cut into sequences, shuffled in an order that any rank can resume.

Owns the order of the data and the position in it. Knows neither text files nor models.
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
from titan_ckpt.training.data.cache import cached_folder

IGNORED = -100
"""Label of a token without a loss."""
Batch = dict[str, torch.Tensor]
"""`tokens` and `labels`, both (batch, sequence) int64; `labels[i]` is the token after `tokens[i]`, or IGNORED."""


def tokenise(
    documents: Sequence[str], encode: Callable[[str], list[int]], key: dict[str, object], cache: Path
) -> torch.Tensor:
    """Return the ids of all documents in sequence, int32, memory-mapped from the cache; `key` names the content."""

    def build(folder: Path) -> None:
        ids = array("i")
        for document in documents:
            ids.extend(encode(document))
        with (folder / "tokens.int32").open("wb") as file:
            ids.tofile(file)

    file = cached_folder(cache, "tokens", {**key, "byteorder": sys.byteorder}, build) / "tokens.int32"
    return torch.from_file(str(file), shared=False, size=file.stat().st_size // 4, dtype=torch.int32)


class PackedDataset(IterableDataset[Batch]):
    """Endless sequences of a token stream, in a new order in each epoch, distributed over the ranks in turn.

    The position is one number that is equal on every rank: how many sequences all ranks together have taken. So a run
    can continue with a different number of ranks and takes the sequences in the same order.
    """

    batch_size: int = 1
    """Sequences per batch. Worker processes of a loader make whole batches in turn, so they need it."""

    def __init__(
        self, tokens: torch.Tensor, sequence_length: int, seed: int, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Cut `tokens` (1-D) into sequences that overlap by one token: a last label is the next first token.

        `rank` and `num_ranks` count data-parallel ranks; ranks that read the same data have the same `rank`.
        Raises: ConfigError if the tokens do not fill one sequence.
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
        """Position at which this iteration of all ranks started; without worker processes, the current position."""
        self._num_made = 0
        """In a worker process: the number of sequences that it has made since `next_index`."""
        self.fingerprint = self._fingerprint()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's sequences from the current position, without end."""
        worker = get_worker_info()
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            if worker is None:
                index = self.next_index + self.rank
                self.next_index += self.num_ranks  # before the yield: a yielded sequence counts as taken
            else:
                turn, within = divmod(self._num_made, self.batch_size)
                batch = turn * worker.num_workers + worker.id
                index = self.next_index + (batch * self.batch_size + within) * self.num_ranks + self.rank
                self._num_made += 1
            if index // self.num_sequences != epoch:
                epoch = index // self.num_sequences
                generator = torch.Generator().manual_seed(self.seed + 0x9E3779B1 * epoch)
                order = torch.randperm(self.num_sequences, generator=generator)
            yield self.sequence(int(order[index % self.num_sequences]))

    @property
    def epoch(self) -> int:
        """Return the number of the pass over the data that the next sequence belongs to, counted from 0."""
        return self.next_index // self.num_sequences

    def state_dict(self) -> dict[str, Any]:
        return {"next_index": self.next_index, "num_made": self._num_made, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position. Raises: LoadMismatchError if it is a position in different data."""
        if state_dict["fingerprint"] != self.fingerprint:
            raise LoadMismatchError(
                "dataloader: the checkpoint's position is in other data than this run's (corpus, tokenizer, "
                "sequence_length or seed differ). Restore them, or start the data afresh with "
                'checkpoint.resume.exclude = ["dataloader"]'
            )
        self.next_index, self._num_made = state_dict["next_index"], state_dict["num_made"]

    def sequence(self, number: int) -> Batch:
        """Return a sequence by its place in the text; does not change the position."""
        start = number * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}

    def _fingerprint(self) -> str:
        """Return a digest of all that a position depends on; a sample of the tokens is enough to identify them."""
        sample = self.tokens[:: max(1, len(self.tokens) // 65536)].contiguous()
        hasher = hashlib.sha256(repr((len(self.tokens), self.sequence_length, self.seed)).encode())
        hasher.update(sample.numpy().tobytes())
        return hasher.hexdigest()[:32]


def collate(samples: Sequence[Batch]) -> Batch:
    """Return sequences of equal length as one batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def build_dataloader(
    dataset: IterableDataset[Batch],
    batch_size: int,
    collate_fn: Callable[[Sequence[Batch]], Batch],
    seed: int,
    num_workers: int = 0,
) -> Any:
    """Return a StatefulDataLoader over the dataset, whose state holds the dataset's position.

    `num_workers`: processes that make batches; with 0 this process makes them. The loader has its own generator, as a
    new iterator draws from it and would otherwise advance the run's generator.
    """
    kind: Any = PackedDataLoader if isinstance(dataset, PackedDataset) else StatefulDataLoader
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():  # torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return kind(dataset, batch_size, collate_fn=collate_fn, num_workers=num_workers, generator=generator)


class PackedDataLoader(StatefulDataLoader[Batch]):  # type: ignore[misc]  # torchdata ships no types
    """A StatefulDataLoader over packed data whose position can be restored on any number of data-parallel ranks."""

    def __init__(self, dataset: PackedDataset, batch_size: int, **settings: Any) -> None:
        """Pass `settings` to StatefulDataLoader."""
        dataset.batch_size = batch_size
        self._packed = dataset
        self._num_taken = dataset.next_index
        """Number of sequences that all ranks together have received, without those that workers made ahead."""
        self.dp_rank = dataset.rank
        self.dp_world_size = dataset.num_ranks
        super().__init__(dataset, batch_size=batch_size, **settings)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position, without end."""
        self._packed.next_index = self._num_taken
        for batch in super().__iter__():
            self._num_taken += self._packed.batch_size * self.dp_world_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self._packed.next_index = self._num_taken  # start of an iterator that the next line may create
        return {"position": self._packed.state_dict() | {"num_made": 0}, "loader": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where this data-parallel rank stopped. Raises: LoadMismatchError if the data is different."""
        self._take_over(state_dict["position"])
        super().load_state_dict(state_dict["loader"])

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Continue where a different number of data-parallel ranks stopped.

        Raises: LoadMismatchError for a position in different data, or if the ranks had different positions.
        """
        positions = [state["position"] for state in state_dicts]
        if any(position != positions[0] for position in positions):
            raise LoadMismatchError(
                f"dataloader: the checkpoint's {len(positions)} data-parallel ranks had taken "
                f"{sorted({position['next_index'] for position in positions})} sequences: they were not in step"
            )
        self._take_over(positions[0])
        super().load_state_dict({})  # discard the iterator and the batches that it made ahead

    def _take_over(self, position: dict[str, Any]) -> None:
        self._packed.load_state_dict(position)
        self._num_taken = self._packed.next_index
