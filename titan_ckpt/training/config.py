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
from titan_ckpt.training.parallel.config import ParallelConfig

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
    vocab_size: Annotated[int, Check("258 or more: the bytes and two marks", lambda n: n >= 258)] = 2048
    """Tokens of a tokenizer that is trained here; fewer where the corpus has too few merges to learn."""

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
    held_out: BelowOne = 0.0
    """Share of the corpus, at its end, that is not trained on: what [evaluation] measures by itself."""
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

    def problems(self) -> Iterator[str]:
        if self.kind == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            yield f"decay_ratio: {self.decay_ratio} of the steps and warmup_ratio {self.warmup_ratio} are more than all"


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
    """What matrices are multiplied in; trained parameters and optimizer state stay float32. With bfloat16, frozen
    parameters are stored in the 16-bit dtype they are loaded from, if they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The word "auto" is CUDA where there is one."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation; on CPU a run repeats bit for bit without it."""
    log_interval: PositiveSteps = 1
    """Steps between two reports: lines of the console and of metrics.jsonl, points in TensorBoard and W&B."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """[evaluation]: the loss on text that is not trained on. The run itself is the same with it and without."""

    interval: PositiveSteps
    """Steps between evaluations; the last step is evaluated as well."""
    corpus: NonEmpty | None = None
    """A .txt or .jsonl file; absent: the share of the corpus that data.held_out keeps back."""
    max_sequences: PositiveInt | None = None
    """Only the first so many sequences; absent: all."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class TensorBoardConfig:
    """[tensorboard]: event files of everything that is logged; needs the extra of that name."""

    folder: NonEmpty = "tensorboard"
    """Relative to the output folder."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class WandbConfig:
    """[wandb]: Weights & Biases gets everything that is logged; needs the extra of that name. Names are W&B's own."""

    project: NonEmpty
    name: NonEmpty | None = None
    entity: NonEmpty | None = None
    group: NonEmpty | None = None
    tags: tuple[NonEmpty, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """Send now, or write to the output folder for `wandb sync`; absent: as WANDB_MODE says, else online."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class ProfilingConfig:
    """[profiling]: traces of torch.profiler, which Perfetto and chrome://tracing open."""

    interval: PositiveSteps
    """Steps from one trace to the next; a trace is of the last `active` ones."""
    warmup: PositiveSteps = 1
    """Steps right before a trace in which the profiler already runs and what it sees is dropped."""
    active: PositiveSteps = 1
    """Steps of one trace."""
    num_traces: PositiveInt | None = 1
    """How many traces a process writes."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Who traces."""
    memory: bool = False
    """Record allocations."""
    stacks: bool = False
    """Record where in the source each operation was called; slows the traced steps."""
    shapes: bool = False
    """Record the shapes of what operations take."""
    folder: NonEmpty = "profiles"
    """Relative to the output folder."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        if self.interval < self.warmup + self.active:
            yield f"interval: {self.interval} steps are fewer than warmup + active = {self.warmup + self.active}"


@dataclass(frozen=True, slots=True)
class MonitoringConfig:
    """[monitoring]: what is measured beside loss, gradient norm and speed, and logged with them."""

    memory: bool = False
    """Memory of the rank that needs most, in GiB."""
    load_balance: bool = False
    """How a mixture of experts deals out tokens, layer by layer."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class GarbageCollectionConfig:
    """[garbage_collection]: collect at the same steps on every rank instead of whenever each one's counters say."""

    interval: PositiveSteps
    """Steps between collections."""

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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)
    evaluation: EvaluationConfig | None = None
    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    profiling: ProfilingConfig | None = None
    garbage_collection: GarbageCollectionConfig | None = None
    callbacks: tuple[NonEmpty, ...] = ()
    """Of your own, as "package.module:Class", made without arguments; they come after the named ones."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        if self.evaluation is not None and self.evaluation.corpus is None and not self.data.held_out:
            yield "evaluation: nothing to measure; name evaluation.corpus, or keep a share back with data.held_out"
