"""The tables [data] and [parallel] of a run file: their fields and the rules between them. Imports no data library.

parallel/degrees.py checks what a model allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Annotated, Any, ClassVar, Literal

from titan_ckpt.config import NonEmpty, NonNegative, PositiveInt
from titan_ckpt.encoding.named import ImportName
from titan_ckpt.encoding.paths import LocalPath
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys

BelowOne = Annotated[float, Check("a number from 0 to below 1", lambda x: 0 <= x < 1)]
_VocabSize = Annotated[int, Check("258 or more: the bytes and two marks", lambda n: n >= 258)]


@dataclass(frozen=True, slots=True)
class DataConfig(Checked):
    """The training data: text, cut into sequences of one length, or conversations, one in each sequence."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "another library's key": {
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
    }

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


Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B"]
_DEGREES = (
    "data_parallel_replicate",
    "data_parallel_shard",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
)
ShardDegree = Annotated[int, Check("a positive number, or -1 for all ranks that are left", lambda x: x > 0 or x == -1)]


@dataclass(frozen=True, slots=True)
class ParallelConfig(Checked):
    """Degrees of parallelism; their product without expert_parallel is the number of ranks. Names are torchtitan's."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "torchtitan's key": {
            **{f"{name}_degree": f"parallel.{name}" for name in _DEGREES},
            "pipeline_parallel_schedule": "parallel.pipeline_schedule",
            "pipeline_parallel_microbatch_size": "parallel.pipeline_microbatches, their number",
            "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
            "enable_async_tensor_parallel": "nothing",
        },
    }

    data_parallel_replicate: PositiveInt = 1
    """Copies of the model, each trained on different data. HSDP if this and the shard degree are above 1."""
    data_parallel_shard: ShardDegree = -1
    """Ranks over which FSDP2 shards the parameters, gradients and optimizer state of one copy."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees the parameters that it has gathered for a layer until the backward pass gathers them again;
    "default": for all layers, and not for what is around them. With "never" and accumulation it frees them after the
    last backward pass of a step, as a pipeline always does."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix multiplication: each has some of the heads and hidden rows."""
    sequence_parallel: bool = True
    """With tensor_parallel above 1, also distribute the tokens between those multiplications."""
    context_parallel: PositiveInt = 1
    """Ranks that share every sequence."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each layer. They are part of data_parallel_shard, which this must divide."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that each hold some of the layers."""
    pipeline_schedule: Schedule = "1F1B"
    """Order of forward and backward passes; "Interleaved1F1B" gives each rank two stages."""
    pipeline_microbatches: PositiveInt | None = None
    """Pieces of training.batch_size that pass through the pipeline one after the other. Absent: number of stages."""
    activation_checkpoint: Literal["none", "full", "selective"] = "none"
    """Recompute in the backward pass: "full" whole layers, "selective" everything except matrix multiplications,
    attention and communication."""
    compile: bool = False
    """Compile each layer with torch.compile; not possible with tensor_parallel."""
    backend: NonEmpty | None = None
    """Backend of torch.distributed for tensors on the run's device: "gloo", "nccl", "mpi", "ucc" or one that is
    installed. On CUDA, tensors in host memory always go by gloo. Absent: nccl on CUDA, else gloo."""

    def problems(self) -> Iterator[str]:
        if self.compile and self.tensor_parallel > 1:
            yield "compile: torch.compile cannot differentiate layers under tensor_parallel; choose one of them"

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole pipeline; 1 without a pipeline."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "Interleaved1F1B" else 1)

    @property
    def num_microbatches(self) -> int:
        """Return the number of pieces into which a batch is cut for the pipeline."""
        return self.pipeline_microbatches or self.num_stages
