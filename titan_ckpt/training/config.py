"""The settings of a training run as frozen dataclasses: what train.py reads from TOML, without the converters.

Owns fields, units and the rules between fields. Checks that need a model, data or devices are made where those are
built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_ckpt.config import CheckpointConfig, NonEmpty, NonNegative, PositiveInt, PositiveSteps, validate
from titan_ckpt.strict_toml import Check

PositiveNumber = Annotated[float, Check("a positive number", lambda x: x > 0)]
Ratio = Annotated[float, Check("a number from 0 to 1", lambda x: 0 <= x <= 1)]
BelowOne = Annotated[float, Check("a number from 0 to below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to train: exactly one of `flavor` and `folder` says its shape."""

    name: Literal["llama3", "qwen3", "qwen3_moe", "hf"] = "llama3"
    """The architecture; "hf" is any causal language model of the transformers library, which needs a folder."""
    flavor: NonEmpty | None = None
    """A shape by name, such as "debug-2m" or "8B"."""
    folder: NonEmpty | None = None
    """A Hugging Face folder, whose config.json says the shape; [[checkpoint.initial_load]] loads weights."""
    freeze: tuple[NonEmpty, ...] = ()
    """Parameters that are not trained, as patterns over their names: "tok_embeddings.*"."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        if (self.flavor is None) == (self.folder is None):
            yield 'flavor: expected either flavor = "debug-2m" (a shape by name) or folder = "path/to/hf/folder"'


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Where the tokenizer comes from: read from `folder`, or trained on the corpus where that is absent."""

    folder: NonEmpty | None = None
    """A Hugging Face folder with a tokenizer.json."""
    vocab_size: PositiveInt = 2048
    """Tokens to learn, when it is trained here; at least the 256 bytes and two marks are always there."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is read, and in which pieces."""

    corpus: NonEmpty = "builtin"
    """The word "builtin" (Python's help topics, 0.5 MB), or the path of a .txt or .jsonl file."""
    sequence_length: PositiveInt = 256
    """Tokens of one training sequence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    cache_folder: NonEmpty = "outputs/cache"
    """Trained tokenizers and tokenised corpora, shared between runs."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW."""

    lr: PositiveNumber = 1e-3
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: PositiveNumber = 1e-8
    weight_decay: Annotated[float, Check("a number, 0 or more", lambda x: x >= 0)] = 0.1
    """Of matrices; vectors (norms, biases, magnitudes) are not decayed."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate rises and falls; ratios are of all steps."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_ratio: Ratio = 0.05
    """Share of the steps that warms up linearly, rounded up to whole steps."""
    decay_ratio: Ratio = 0.2
    """wsd only: share of the steps, at the end, that decays linearly."""
    min_ratio: Ratio = 0.1
    """What of the peak is left at the end; "constant" stays at the peak."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The loop."""

    steps: PositiveSteps = 1000
    """Optimizer steps of the whole run, resumed ones included."""
    batch_size: PositiveInt = 8
    """Sequences of one micro-batch on one rank."""
    accumulation: PositiveInt = 1
    """Micro-batches of one optimizer step."""
    max_grad_norm: PositiveNumber | None = None
    """Gradients are scaled down to this global norm; absent: left as they are."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrices are multiplied in; parameters and optimizer state stay float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The word "auto" is CUDA where there is one."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation; on CPU a run repeats bit for bit without it."""
    log_interval: PositiveSteps = 1
    """Steps between two lines of the console and of metrics.jsonl."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One training run."""

    model: ModelConfig
    output_folder: NonEmpty
    """Everything the run writes but the cache lies under it: metrics.jsonl, checkpoints, exports."""
    seed: NonNegative = 42
    """Of initial values, data order and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        validate(self)
