"""The settings of a run's data. Imports no data library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Annotated, Any, ClassVar, Literal

from titan_ckpt.config import NonEmpty, NonNegative, PositiveInt
from titan_ckpt.encoding.named import ImportName
from titan_ckpt.encoding.paths import LocalPath
from titan_ckpt.encoding.toml import Check, Checked, foreign

BelowOne = Annotated[float, Check("a number from 0 to below 1", lambda x: 0 <= x < 1)]


_VocabSize = Annotated[int, Check("258 or more: the bytes and two marks", lambda n: n >= 258)]


@dataclass(frozen=True, slots=True)
class DataConfig(Checked):
    """The training data: text, cut into sequences of one length, or conversations, one in each sequence."""

    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = foreign(
        "another library's key",
        {
            "path": "data.corpus",
            "dataset_path": "data.corpus",
            "data_files": "data.corpus, which may be a folder or a pattern",
            "seq_len": "data.sequence_length",
            "max_seq_length": "data.sequence_length",
            "max_length": "data.sequence_length",
            "dataset_text_field": "data.field",
            "text_field": "data.field",
            "packing": "nothing; text is packed, and conversations are padded to the longest of a batch",
            "assistant_only_loss": "data.messages, whose loss is of the assistant's text alone",
            "shuffle_buffer_size": "data.shuffle",
            "dataloader_num_workers": "data.num_workers",
            "prefetch_factor": "data.prefetch",
        },
    )

    corpus: LocalPath = "builtin"
    """The path of a .txt, .md, .jsonl or .parquet file, of a folder with such files at any depth, or a pattern such as
    "data/**/*.jsonl"; "builtin" (Python's help topics, 0.5 MB); or "dummy" (random tokens)."""
    field: NonEmpty = "text"
    """The field of a jsonl line, or the column of a parquet file, that holds the text."""
    messages: NonEmpty | None = None
    """The field that holds a conversation: a list of messages with role and content. It is rendered by the tokenizer's
    chat template, and only what the assistant says is learned. Absent: the corpus is text."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """A conversation that is longer than a sequence is an error, is cut at its end, or is left out."""
    sequence_length: PositiveInt = 256
    """Length of one training sequence in tokens; of a conversation the largest length."""
    tokenizer: _VocabSize | LocalPath | None = None
    """A Hugging Face folder with a tokenizer.json, or the id of a model in the local Hugging Face cache; or the number
    of tokens of one that is trained on the corpus, which has fewer if the corpus has too few merges to learn. Absent:
    that of `model.folder`, or of the first local folder in [[checkpoint.initial_load]] that has one; a run that starts
    without weights trains one of 2048 tokens."""
    held_out: BelowOne = 0.0
    """Share of the corpus, at its end, that is not trained on; [evaluation] measures it unless it names a corpus."""
    shuffle: bool | PositiveInt = True
    """Take sequences in a new random order in each epoch; with false, in the order of the files. With streaming, the
    number of neighbouring rows that are shuffled together; true: 1024."""
    streaming: bool = False
    """Read the corpus while training. Otherwise all of it is tokenised before the first step, once for all runs, and
    kept in cache_folder."""
    num_workers: NonNegative = 0
    """Processes on each rank that make batches; with 0 the training process makes them."""
    prefetch: PositiveInt = 2
    """Batches that each worker process makes ahead."""
    cache_folder: LocalPath = "outputs/cache"
    """Trained tokenizers and tokenised corpora, shared between runs."""
    dataset: ImportName | None = None
    """Your own data as "package.module:Name": a torch IterableDataset, which reads its rank's share, or map-style data,
    which is dealt to the ranks. It is called with `settings` and those of rank, num_ranks, sequence_length, seed and
    tokenizer that it has parameters for, with **kwargs all."""
    settings: Mapping[str, Any] = default(default_factory=dict)
    """Keyword arguments of your own data."""

    def problems(self) -> Iterator[str]:
        if self.dataset is None and self.settings:
            yield "settings: they are the keyword arguments of your own data; name it in dataset"
        if self.dataset is not None and self.held_out:
            yield "held_out: a share of the corpus, which your own data does not read; set evaluation.corpus"
        if self.messages is not None and self.field != "text":
            yield f"field: either text in {self.field!r} or conversations in {self.messages!r}; leave one out"
        if self.messages is not None and self.corpus in ("builtin", "dummy"):
            yield f"messages: {self.corpus!r} holds no conversations; name a .jsonl or .parquet file in corpus"
        if self.messages is None and self.too_long != "error":
            yield "too_long: a setting of conversations; text of any length is cut into sequences. Set messages"
        if self.held_out and (self.streaming or self.corpus == "dummy"):
            kind = "a stream has no known end" if self.streaming else "random tokens have no end"
            yield f"held_out: {kind} to keep back; set evaluation.corpus"
        if type(self.shuffle) is int and not self.streaming:
            yield "shuffle: a number is the window of a stream; write true, or set streaming"
        if self.streaming and self.corpus == "dummy":
            yield "streaming: random tokens are read from nowhere; leave it out"
