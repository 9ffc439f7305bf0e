"""Corpora as token ids: computed once, kept in the cache, mapped into memory. Knows no order and no ranks."""

from __future__ import annotations

import json
import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from titan_ckpt.errors import counted
from titan_ckpt.training.data.batch import IGNORED, Batch
from titan_ckpt.training.data.cache import cached_folder
from titan_ckpt.training.data.chat import ChatError, ChatTemplate
from titan_ckpt.training.data.corpus import Corpus, Problem, Row

logger = logging.getLogger(__name__)

TooLong = Literal["error", "truncate", "drop"]


def tokenise(corpus: Corpus, encode: Callable[[str], list[int]], key: dict[str, object], cache: Path) -> torch.Tensor:
    """Return the ids of all documents in sequence, int32, memory-mapped from the cache; `key` names the encoding."""

    def build(folder: Path) -> None:
        with (folder / "tokens.int32").open("wb") as file:
            for text in corpus.documents():
                array("i", encode(text)).tofile(file)

    known = {**key, "corpus": corpus.digest, "byteorder": sys.byteorder}
    return _mapped(cached_folder(cache, "tokens", known, build) / "tokens.int32", torch.int32)


@dataclass(frozen=True, slots=True)
class Conversations:
    """The ids of all conversations in sequence, and where each ends."""

    labels: torch.Tensor
    """Ids of learned tokens, and -1 - id of the others, int32."""
    ends: torch.Tensor
    """End of each conversation, int64."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Batch:
        """Return a conversation as one sequence."""
        begin = int(self.ends[number - 1]) if number else 0
        return as_sequence(self.labels[begin : int(self.ends[number])].long())


def as_sequence(marked: torch.Tensor) -> Batch:
    """Return tokens and labels of ids, of which those that are not learned are stored as -1 - id."""
    ids = torch.where(marked < 0, -1 - marked, marked)
    return {"tokens": ids[:-1], "labels": torch.where(marked < 0, IGNORED, marked)[1:]}


def marked_ids(row: Row, template: ChatTemplate) -> list[int]:
    """Return the ids of a conversation, and -1 - id where one is not learned. Raises: ChatError."""
    ids, mask = template(row.value, row.tools)
    return [i if learned else -1 - i for i, learned in zip(ids, mask, strict=True)]


def fitted(ids: list[int], longest: int, too_long: TooLong) -> list[int] | None:
    """Return a conversation of at most `longest` ids; None if it is dropped, because nothing learned would be left.

    Raises: ChatError if it is longer and that is an error.
    """
    if len(ids) <= longest:
        return ids
    if too_long == "error":
        raise ChatError(
            f"{len(ids)} tokens are longer than data.sequence_length {longest - 1} + 1; raise it, or set "
            'data.too_long = "truncate" or "drop"'
        )
    cut = ids[:longest]
    return cut if too_long == "truncate" and any(i >= 0 for i in cut[1:]) else None


def tokenise_conversations(
    corpus: Corpus, template: ChatTemplate, longest: int, too_long: TooLong, cache: Path
) -> Conversations:
    """Return all conversations of a corpus, each of at most `longest` ids, memory-mapped from the cache.

    Raises: ConfigError listing all that cannot be rendered, masked exactly, or fitted.
    """

    def build(folder: Path) -> None:
        problems: list[Problem] = []
        num_longer, end, ends = 0, 0, array("q")
        with (folder / "labels.int32").open("wb") as file:
            for row in corpus.all_rows(problems):
                try:
                    ids = marked_ids(row, template)
                    kept = fitted(ids, longest, too_long)
                except ChatError as error:
                    problems.append((row.place, str(error)))
                    continue
                num_longer += kept is None or len(kept) < len(ids)
                if kept is not None:
                    array("i", kept).tofile(file)
                    end += len(kept)
                    ends.append(end)
        corpus.refuse(problems)
        if not ends:
            corpus.refuse([(corpus.name, f"all {num_longer} conversations are longer than {longest} tokens")])
        with (folder / "ends.int64").open("wb") as file:
            ends.tofile(file)
        (folder / "counts.json").write_text(json.dumps({"num_longer": num_longer}))

    key: dict[str, Any] = {"corpus": corpus.digest, "template": template.digest, "byteorder": sys.byteorder}
    folder = cached_folder(cache, "conversations", {**key, "longest": longest, "too_long": too_long}, build)
    if num_longer := json.loads((folder / "counts.json").read_bytes())["num_longer"]:
        what = "cut or, with nothing learned left, dropped" if too_long == "truncate" else "dropped"
        longer = counted(num_longer, "conversation is", "conversations are")
        logger.warning("data: %s longer than %d tokens: %s", longer, longest, what)
    return Conversations(_mapped(folder / "labels.int32", torch.int32), _mapped(folder / "ends.int64", torch.int64))


def _mapped(file: Path, dtype: torch.dtype) -> torch.Tensor:
    size = file.stat().st_size // dtype.itemsize
    return torch.from_file(str(file), shared=False, size=size, dtype=dtype)


def valid_rows(corpus: Corpus, source: int, start: int) -> Iterator[Row]:
    """Yield the rows of one source. Raises: ConfigError at the first one that cannot be used."""
    for row in corpus.rows(source, start):
        if row.problem is not None:
            corpus.refuse([(row.place, row.problem)])
        yield row
