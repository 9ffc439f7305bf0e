"""Data that is read while training, without a pass over it before the first step.

Owns the order of a stream and its bookmarks. Every rank reads all rows in the same order. To find a sequence of packed
text takes the number of tokens before it, so every rank, and every worker process of it, also tokenises all text; of
conversations it tokenises only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.batch import Batch
from titan_ckpt.training.data.chat import ChatError, ChatTemplate
from titan_ckpt.training.data.corpus import Corpus, Row
from titan_ckpt.training.data.sequences import Bookmark, OrderedDataset
from titan_ckpt.training.data.tokens import TooLong, as_sequence, fitted, marked_ids, valid_rows

Encoder = Callable[[str], list[int]] | ChatTemplate
"""Turns a document into ids, or a conversation into ids and the mask of the learned ones."""


class StreamDataset(OrderedDataset):
    """Sequences of a corpus in the order of its files, over and over.

    With a window, the sources come in a new order in each epoch, and the rows of each window of a source are shuffled.
    A bookmark says how many sequences come before it (`index`), the epoch, the source's turn in it, the number of the
    row at which the window begins, how many of the window's rows are done, and how many ids of the next one.
    """

    def __init__(
        self,
        corpus: Corpus,
        encode: Encoder,
        sequence_length: int,
        seed: int,
        *,
        window: int = 0,
        too_long: TooLong = "error",
        encoding: str = "",
        **share: int,
    ) -> None:
        """`window`: the number of rows that are shuffled together; 0: none are. `encoding`: a digest of `encode`.

        `share`: this rank's, as OrderedDataset has it.
        Raises: ConfigError if the first row of one of the first 64 sources cannot be used.
        """
        super().__init__(**share)
        self.corpus = corpus
        self.encode = encode
        self.sequence_length = sequence_length
        self.seed = seed
        self.window = window
        self.too_long: TooLong = too_long
        self.every_label_counts = not isinstance(encode, ChatTemplate)
        settings = (corpus.layout, sequence_length, seed, window, too_long, encoding)
        self.fingerprint = hashlib.sha256(repr(settings).encode()).hexdigest()[:32]
        for source in range(min(64, len(corpus.sources))):
            next(valid_rows(corpus, source, 0), None)

    def samples(self) -> Iterator[tuple[Batch, Bookmark]]:
        wanted = self.indices()
        index = next(wanted)
        for bookmark, content in self._conversations() if isinstance(self.encode, ChatTemplate) else self._packed():
            if bookmark["index"] == index + 1:
                yield self._sequence(content), bookmark
                index = next(wanted)

    def _packed(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield the ids of every sequence and the bookmark after it. Sequences overlap by one token."""
        assert not isinstance(self.encode, ChatTemplate), "conversations are not packed"
        start = self._start()
        index, skipped, left = start["index"], start["ids"], torch.empty(0, dtype=torch.int64)
        for place, row in self._rows(start):
            ids = torch.tensor(self.encode(row.value), dtype=torch.int64)
            left = torch.cat([left, ids[skipped:]])
            skipped = 0
            while len(left) > self.sequence_length:
                sequence, left = left[: self.sequence_length + 1], left[self.sequence_length :]
                index += 1
                yield {**place, "index": index, "ids": len(ids) - len(left)}, sequence

    def _conversations(self) -> Iterator[tuple[dict[str, Any], Row]]:
        """Yield every conversation and the bookmark after it."""
        start = self._start()
        for index, (place, row) in enumerate(self._rows(start), start["index"] + 1):
            yield {**place, "index": index, "rows": place["rows"] + 1, "ids": 0}, row

    def _sequence(self, content: torch.Tensor | Row) -> Batch:
        """Return packed ids or a conversation as a sequence; one that is dropped is two tokens without labels."""
        if isinstance(content, torch.Tensor):
            return as_sequence(content)
        assert isinstance(self.encode, ChatTemplate), "rows are of conversations"
        try:
            ids = marked_ids(content, self.encode)
            kept = fitted(ids, self.sequence_length + 1, self.too_long)
        except ChatError as error:
            self.corpus.refuse([(content.place, str(error))])
            raise
        return as_sequence(torch.tensor([min(i, -1 - i) for i in ids[:2]] if kept is None else kept))

    def _start(self) -> dict[str, Any]:
        return self.bookmark or {"index": 0, "epoch": 0, "turn": 0, "row": 0, "rows": 0, "ids": 0}

    def _rows(self, start: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Row]]:
        """Yield the rows from a bookmark on, each with the epoch, turn, row and rows of a bookmark before it."""
        epoch, first_turn, first_row, done = (start[name] for name in ("epoch", "turn", "row", "rows"))
        num_sources = len(self.corpus.sources)
        while True:
            empty = not (first_turn or first_row or done)  # a whole epoch without a row is the last one
            sources = self._order(epoch, -1, num_sources) if self.window else range(num_sources)
            for turn in range(first_turn, num_sources):
                rows = valid_rows(self.corpus, sources[turn], first_row)
                while window := [*islice(rows, self.window or 1)]:
                    empty, begin = False, window[0].number
                    order = self._order(epoch, turn, len(window), begin) if self.window else range(1)
                    for rank in range(done, len(window)):
                        yield {"epoch": epoch, "turn": turn, "row": begin, "rows": rank}, window[order[rank]]
                    done = 0
                first_row = 0
            if empty:
                raise ConfigError([f"{self.corpus.setting}: {self.corpus.name} holds nothing to train on"])
            epoch, first_turn = epoch + 1, 0

    def _order(self, epoch: int, turn: int, size: int, first: int = 0) -> list[int]:
        """Return a permutation that depends on the seed and the place alone."""
        digest = hashlib.sha256(repr((self.seed, epoch, turn, first)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        order: list[int] = torch.randperm(size, generator=generator).tolist()
        return order
