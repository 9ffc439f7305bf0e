"""The settings of a training run, which train.py reads from TOML, as frozen dataclasses; converters are separate.

Owns the fields, their units and the rules between them. Checks that need a model, data or devices are made where those
are built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from titan_ckpt.config import CheckpointConfig, NonEmpty, NonNegative, PositiveInt, PositiveSteps
from titan_ckpt.encoding.named import ImportName, is_import_name
from titan_ckpt.encoding.paths import LocalPath
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys
from titan_ckpt.training.schedule import ScheduleConfig
from titan_ckpt.training.tables import BelowOne, DataConfig, ParallelConfig

DEFAULT_STEPS = 1000
PositiveNumber = Annotated[float, Check("a positive number", lambda x: x > 0)]


@dataclass(frozen=True, slots=True)
class ModelConfig(Checked):
    """The model to train; its shape comes from exactly one of `flavor` and `folder`."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "torchtitan's key": {
            "hf_assets_path": "model.folder",
            "tokenizer_path": "data.tokenizer",
            "converters": "[[converters]] with a kind",
            "print_after_conversion": "nothing; the log names what was converted",
        },
        "another library's key": {"path": "model.folder", "model_name_or_path": "model.folder"},
    }

    name: Literal["llama3", "qwen3", "qwen3_moe", "hf"] | ImportName = "llama3"
    """The architecture; "hf" is any causal language model of the transformers library and needs `folder`. Your own:
    "package.module:Name", an Architecture, a subclass of LanguageModel or Model, or a function that returns one."""
    flavor: NonEmpty | None = None
    """A shape by name, such as "debug-2m" or "8B"."""
    folder: LocalPath | None = None
    """A Hugging Face folder, or the id of a model in the local Hugging Face cache, such as "Qwen/Qwen3-0.6B". The shape
    is that of its config.json; a new run starts from its weights, if it has any and [[checkpoint.initial_load]] names
    no sources; its tokenizer is the default of data.tokenizer."""
    load_weights: bool = True
    """With false, only the shape of `folder` is used, and a new run starts from random values."""
    construct: Literal["default", "meta", "device"] = "default"
    """Where the model is built, and where the values come from that no source provides. "default": on meta, or on the
    CPU if it cannot be; the values that one CPU would give, bit for bit, which every rank makes tensor by tensor.
    "device": on meta; the same distributions, drawn in seconds on the device, by each rank for its own shards; skips
    the values of one CPU. "meta": on meta; skips initialization; a weight that no source has is an error."""
    initial_values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fill the parameters by their names, instead of by the model's own code: a regular expression for the whole name,
    and a function with its keyword arguments, such as ".*" = { function = "torch.nn.init:normal_", std = 0.02 }. Each
    parameter must match one; the first counts."""
    freeze: tuple[NonEmpty, ...] = ()
    """Parameters that are not trained, as patterns over their names, such as "tok_embeddings.*"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own model."""

    def problems(self) -> Iterator[str]:
        for pattern, table in self.initial_values.items():
            try:
                re.compile(pattern)
            except re.error:
                yield f"initial_values: {pattern!r}: expected a regular expression"
            if not is_import_name(table.get("function")):
                yield f'initial_values.{pattern!r}.function: expected a name such as "torch.nn.init:normal_"'
        if is_import_name(self.name):
            if self.flavor is not None and self.folder is not None:
                yield "flavor: the shape comes from flavor or from folder; leave one of them out"
            return  # registry.py knows whether the name leads to an architecture with flavors
        if self.settings:
            yield f"settings: {self.name} has none; they are the keyword arguments of your own model"
        if (self.flavor is None) == (self.folder is None):
            yield 'flavor: expected either flavor = "debug-2m" (a shape by name) or folder = "path/to/hf/folder"'


@dataclass(frozen=True, slots=True)
class OptimizerConfig(Checked):
    """The optimizer: AdamW, or your own."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "transformers' key": {"learning_rate": "optimizer.lr"},
        "torchtitan's key": {
            "beta1": "optimizer.betas = [beta1, beta2]",
            "beta2": "optimizer.betas = [beta1, beta2]",
            "early_step_in_backward": "nothing; the optimizer steps after the backward pass",
        },
    }

    name: Literal["adamw"] | ImportName = "adamw"
    """Your own as "package.module:Name", such as "torch.optim:SGD". It is called with parameter groups, lr and
    `settings`; a group has the key weight_decay."""
    lr: PositiveNumber = 1e-3
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of the two moment averages of AdamW, per step."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator of AdamW's update."""
    weight_decay: Annotated[float, Check("a number, 0 or more", lambda x: x >= 0)] = 0.1
    """Weight decay of matrices; vectors, and norms and biases of any shape, are not decayed."""
    implementation: Literal["fused", "foreach", "for-loop"] | None = None
    """How AdamW computes its update: one kernel for all parameters, one operation at a time over all of them, or one
    parameter after the other. They round differently. The first two are refused if only some matrices, or only some
    vectors, are distributed. Absent: torch chooses."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own optimizer."""

    def problems(self) -> Iterator[str]:
        if not is_import_name(self.name):
            if self.settings:
                yield "settings: they are the keyword arguments of your own optimizer; adamw has betas and eps"
            return
        for key, default in (("betas", (0.9, 0.95)), ("eps", 1e-8), ("implementation", None)):
            if getattr(self, key) != default:
                yield f"{key}: a setting of adamw; give it to {self.name} as optimizer.settings.{key}"


@dataclass(frozen=True, slots=True)
class TrainingConfig(Checked):
    """Settings of the training loop."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "torchtitan's key": {
            "local_batch_size": "training.batch_size",
            "seq_len": "data.sequence_length",
            "max_norm": "training.max_grad_norm",
            "dataset": "data.corpus",
            "dataset_path": "data.corpus",
            "mixed_precision_param": "training.compute_dtype",
            "mixed_precision_reduce": "nothing; gradients are reduced in float32",
            "dtype": "training.compute_dtype; trained parameters stay float32",
            "gc_freq": "training.gc_interval",
            "seed": "seed, above all tables",
            "enable_cpu_offload": "nothing; parameters stay on the device",
        },
        "transformers' key": {
            "per_device_train_batch_size": "training.batch_size",
            "gradient_accumulation_steps": "training.accumulation",
            "max_steps": "training.steps",
            "num_train_epochs": "training.epochs",
            "average_tokens_across_devices": "training.loss_average",
            "full_determinism": "training.deterministic",
            "ddp_backend": "parallel.backend",
            "learning_rate": "optimizer.lr",
            "logging_steps": "training.log_interval",
            "save_steps": "checkpoint.save.interval",
            "bf16": 'training.compute_dtype = "bfloat16"',
        },
    }

    steps: Annotated[int, Check("an integer, 0 or more (steps)", lambda n: n >= 0)] | None = None
    """Optimizer steps of the whole run, including those before a resume. Absent: as many as `epochs` take, or 1000.
    With 0 the initial model is saved as step 0, a seed from which runs of any layout start."""
    epochs: PositiveInt | None = None
    """The run ends after this many passes over the data, unless `steps` end it before. Every sequence comes once in
    each pass; the last step has fewer if they do not fill it."""
    batch_size: PositiveInt = 8
    """Sequences per micro-batch on one rank."""
    accumulation: PositiveInt = 1
    """Micro-batches per optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step over all ranks, from which `accumulation` follows. Absent: batch_size x accumulation
    x the ranks with different data."""
    loss_average: Literal["token", "rank"] = "token"
    """A step's loss is the mean over all predicted tokens, or the mean of the ranks' own means, in which a token counts
    more on a rank that predicts fewer."""
    max_grad_norm: PositiveNumber | None = None
    """Gradients are scaled down to this global norm. Absent: gradients are not clipped."""
    check_gradients: Literal["step", "log"] = "step"
    """When ranks exchange the loss and the norm of the gradients, and stop if it is not finite: in every step, before
    its optimizer; or in those alone that are logged, evaluated, saved or exported, so that no other step waits for the
    device, unless labels without a loss are to be counted."""
    router_aux_loss_coef: Annotated[float, Check("a number, 0 or more", lambda x: x >= 0)] | None = None
    """Factor of the load-balancing loss of a mixture of experts. Absent: what the model's config.json asks for, that is
    router_aux_loss_coef if output_router_logits is true, else 0."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of matrix products; trained parameters and optimizer state stay float32. With bfloat16, frozen parameters
    that are loaded from a 16-bit dtype keep that dtype. With float16 the loss is scaled, and a step whose gradients
    overflow changes no weight and halves the scale, which checkpoints hold."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """With "auto", CUDA is used if it is available."""
    deterministic: bool | Literal["warn"] = False
    """Refuse operations without a deterministic implementation, or only warn of them. On CPU a run repeats bit for bit
    without this."""
    log_interval: PositiveSteps = 1
    """Steps between reports on the console, in metrics.jsonl, in TensorBoard and in W&B."""
    measure: tuple[Literal["memory", "load_balance"], ...] = ()
    """Also reported: the memory of the rank that needs most, in GiB; how evenly each layer of a mixture of experts
    distributes tokens."""
    gc_interval: PositiveSteps | None = None
    """Collect garbage on all ranks at the same steps, so many apart. Absent: when each rank's own counters trigger it,
    so that ranks pause at different steps, and all wait each time."""

    def problems(self) -> Iterator[str]:
        if self.check_gradients == "log" and self.max_grad_norm is not None:
            yield "check_gradients: max_grad_norm needs the norm in every step; leave one of them out"
        if self.check_gradients == "log" and self.compute_dtype == "float16":
            yield 'check_gradients: float16 needs the norm in every step; leave it out, or compute in "bfloat16"'
        if (whole := self.global_batch_size) is None:
            return
        if self.accumulation != 1:
            yield f"accumulation: it follows from global_batch_size {whole}; leave one of them out"
        if whole % self.batch_size:
            yield f"global_batch_size: {whole} is no multiple of training.batch_size {self.batch_size}; change one"


EVALUATED = ("eval/loss", "eval/perplexity")
"""What an evaluation measures."""


@dataclass(frozen=True, slots=True)
class EvaluationConfig(Checked):
    """[evaluation]: measures the loss on held-out text. It does not change the training run."""

    interval: PositiveSteps
    """Steps between evaluations; the last step is also evaluated."""
    corpus: LocalPath | None = None
    """As data.corpus. Absent: the share of the corpus that data.held_out keeps back."""
    max_sequences: PositiveInt | None = None
    """Measure only this many sequences from the start of the text. Absent: all."""


@dataclass(frozen=True, slots=True)
class TensorBoardConfig(Checked):
    """[tensorboard]: writes all logged values as event files; needs the extra `tensorboard`."""

    folder: LocalPath = "tensorboard"
    """Relative to the output folder."""


@dataclass(frozen=True, slots=True)
class WandbConfig(Checked):
    """[wandb]: sends all logged values to Weights & Biases; needs the extra `wandb`. All else is W&B's own environment:
    WANDB_NAME, WANDB_TAGS, WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_MODE.
    """

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        key: f"W&B's own environment has it: WANDB_{key.upper()}" for key in ("name", "tags", "entity", "mode")
    }

    project: NonEmpty
    """The W&B project; it is made if it does not exist."""


@dataclass(frozen=True, slots=True)
class ProfilingConfig(Checked):
    """[profiling]: each rank writes traces of torch.profiler to the folder profiles, for Perfetto or chrome://tracing."""

    interval: Annotated[int, Check("2 or more (steps)", lambda n: n >= 2)]
    """Steps from one trace to the next; each is of the last step of an interval. In the step before it the profiler
    runs already, and what it finds is discarded."""


@dataclass(frozen=True, slots=True)
class RunConfig(Checked):
    """One training run."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "torchtitan's table": {
            "job": "output_folder for dump_folder",
            "dump_folder": "output_folder",
            "hf_assets_path": "model.folder, or data.tokenizer for the tokenizer alone",
            "model_spec": "[model]",
            "tokenizer": "data.tokenizer",
            "dataloader": "[data]",
            "loss": "nothing; training.loss_average says how it is averaged",
            "debug": "seed, training.deterministic and checkpoint.save.check_replicas",
            "override": "a subclass of Trainer of your own, trainer",
            "profiler": "[profiling]",
            "validator": "[evaluation]",
            "lr_scheduler": "[schedule]",
            "parallelism": "[parallel], its degrees without _degree",
            "activation_checkpoint": "parallel.activation_checkpoint",
            "compile": "parallel.compile",
            "metrics": "training.log_interval, [tensorboard] and [wandb]",
            "validation": "[evaluation]",
            "float8": '[[converters]] with kind = "float8"',
            "quantize": '[[converters]] with kind = "float8" or "qat"',
            "comm": "nothing; checkpoint.save.timeout_seconds bounds the waits of saves",
            "fault_tolerance": "nothing; docs/parallel.md has restarts by torchrun",
            "memory_estimation": 'nothing; training.measure = ["memory"] measures',
            "experimental": 'model.name and data.dataset as "package.module:Name"',
        },
    }

    model: ModelConfig
    output_folder: LocalPath
    """The folder for everything that the run writes except the cache: metrics.jsonl, checkpoints, exports."""
    seed: NonNegative = 42
    """Seed of initial values, data order and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig | None = None
    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    profiling: ProfilingConfig | None = None
    callbacks: tuple[ImportName, ...] = ()
    """Your own callbacks as "package.module:Class", created without arguments and called after the built-in ones."""
    trainer: ImportName | None = None
    """Your own subclass of Trainer, as "package.module:Name"; absent: the built-in Trainer."""

    def problems(self) -> Iterator[str]:
        if self.evaluation is not None and self.evaluation.corpus is None and not self.data.held_out:
            yield "evaluation: nothing to measure; name evaluation.corpus, or keep a share back with data.held_out"
        if self.training.steps == 0 and (self.checkpoint.save is None or self.checkpoint.external):
            yield "training.steps: 0 saves the initial model, and this run saves none; set checkpoint.save.interval"
        if self.training.epochs is not None and (self.data.streaming or self.data.corpus == "dummy"):
            kind = "a stream's length is not known" if self.data.streaming else "random tokens have no end"
            yield f"training.epochs: {kind}; set training.steps, or data.streaming = false for a corpus"
        keep = self.checkpoint.save.keep if self.checkpoint.save is not None else None
        if keep is not None and keep.best is not None and not (self.callbacks or self.trainer):
            yield from self._faults_of_metric(keep.metric_name)

    def _faults_of_metric(self, metric: str) -> Iterator[str]:
        """Yield why no save of this run has a metric. Callbacks of one's own may measure any."""
        measured = ["loss", *EVALUATED] if self.evaluation is not None else ["loss"]
        groups = {"load_balance": "moe/", "memory": "memory/"}
        if metric not in measured and not metric.startswith(tuple(groups[name] for name in self.training.measure)):
            need = "; it needs the table [evaluation]" if metric in EVALUATED else ""
            names = ", ".join(measured)
            yield f"checkpoint.save.keep.metric: {metric} is never measured{need}; this run measures {names}"
