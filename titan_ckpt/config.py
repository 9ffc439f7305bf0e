"""What can be said about a run's checkpoints, and what cannot: frozen dataclasses, one per TOML table.

Owns the settings and the rules between them. How TOML becomes a dataclass is strict_toml.py's, offered here by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from titan_ckpt.overrides import apply_overrides
from titan_ckpt.strict_toml import Check, from_dict, load_config, read_toml, validate
from titan_ckpt.types import Format

__all__ = [
    "CheckpointConfig",
    "Component",
    "ExportConfig",
    "InitialLoadConfig",
    "KeepConfig",
    "NonEmpty",
    "NonNegative",
    "PositiveInt",
    "PositiveSeconds",
    "PositiveSteps",
    "ResumeConfig",
    "SaveConfig",
    "StopConfig",
    "apply_overrides",
    "from_dict",
    "load_config",
    "read_toml",
    "validate",
]

Component = Literal["model", "optimizer", "lr_scheduler", "dataloader", "rng", "states"]

NonEmpty = Annotated[str, Check("a string that is not empty", str.strip)]
NonNegative = Annotated[int, Check("an integer, 0 or more", lambda n: n >= 0)]
PositiveInt = Annotated[int, Check("a positive integer", lambda n: n > 0)]
PositiveSeconds = Annotated[float, Check("a positive number (seconds)", lambda s: s > 0)]
PositiveHours = Annotated[float, Check("a positive number (hours)", lambda h: h > 0)]
PositiveSteps = Annotated[int, Check("a positive integer (steps)", lambda n: n > 0)]


@dataclass(frozen=True, slots=True)
class KeepConfig:
    """Which committed steps stay. A step stays if any rule holds for it; the newest one always does."""

    latest: PositiveInt | None = None
    """How many of the newest steps stay; more than one guards against a bad newest one."""
    every: PositiveSteps | None = None
    """Steps divisible by this stay for good."""
    every_hours: PositiveHours | None = None
    """Of the steps saved within each span of this many hours the first stays for good."""
    best: PositiveInt | None = None
    """How many of the steps with the best `metric` stay."""
    metric: NonEmpty = "loss"
    """Which of the values given to save(metrics=...) `best` goes by; a step without it is not among the best."""
    mode: Literal["min", "max"] = "min"
    """Whether the least or the greatest value is best."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        if not any((self.latest, self.every, self.every_hours, self.best)):
            yield "latest: required where no other rule is set; to keep every checkpoint leave `keep` out"


@dataclass(frozen=True, slots=True)
class SaveConfig:
    """When and how steps are saved."""

    interval: PositiveSteps
    """Steps between saves; the last step is saved as well."""
    async_mode: Literal["disabled", "thread", "process"] = "thread"
    """Who writes: a thread or a process while training goes on, or the training loop itself."""
    keep: KeepConfig | None = None
    """What is removed after a commit; absent: nothing."""
    first_step: bool = False
    """Save after step 1 too, so that a folder that does not work shows at once."""
    include_base: bool = False
    """Write frozen base weights too where converters own keys; else a save holds the adapter and names its base."""
    if_busy: Literal["wait", "skip"] = "wait"
    """When a save is due while one is in flight: wait for it, or leave this one out."""
    check_replicas: Literal["off", "sampled", "full"] = "sampled"
    """Compare what ranks hold as copies, before it is saved: of each rank 16 MiB of 1024 tensors, others every time; or
    all."""
    timeout_seconds: PositiveSeconds = 1800.0
    """How long a rank waits for its peers before it gives up and names them."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """How a run takes up what its own folder holds."""

    step: Annotated[int, Check("a step (0 or more; left out for the newest)", lambda n: n >= 0)] | None = None
    """This step and no other; absent: the newest valid one."""
    exclude: tuple[Component, ...] = ()
    """Parts that are not taken over and start afresh."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class StopConfig:
    """What ends a run before its last step, and what is kept of it then; for loops with a RunGuard."""

    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"], ...] = ("SIGTERM", "SIGUSR1")
    """To any rank: save and stop. A second one, two seconds later or more, ends the process at once."""
    grace_seconds: PositiveSeconds = 30.0
    """From the signal to the kill: a last save is only begun if as long as saves take here is left of it."""
    after_hours: PositiveHours | None = None
    """Save and stop before the run has lasted so long; absent: no limit."""
    at_unix_seconds: PositiveSeconds | None = None
    """Save and stop before this moment, such as a scheduler's SLURM_JOB_END_TIME; absent: no limit."""
    save_on_exception: bool = True
    """When the loop raises on all ranks: save the last step that was completed."""
    exception_seconds: PositiveSeconds = 20.0
    """How long a rank that has raised waits for the others to raise too, for a save needs all of them."""
    hang_seconds: PositiveSeconds | None = 600.0
    """After so long without progress all processes are asked; if one does not answer, the others name it and end."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class InitialLoadConfig:
    """One source of weights for a run that has no checkpoint of its own yet."""

    path: NonEmpty
    """A checkpoint step, a Hugging Face folder, a PEFT adapter, or a DCP folder."""
    format: Format | None = None
    """Insist on a format; absent: found from the content."""
    cast: bool = False
    """Allow floating-point dtypes to change to the model's; every cast is reported."""
    revision: NonEmpty | None = None
    """The version of `path`, recorded as the base's identity beside an adapter."""
    merge: bool = False
    """Add this PEFT adapter to the weights of the sources before it, instead of giving it to a converter."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Weights for other tools, written after the last step to <base_folder>/<folder>/step-N, -peft or -quantised."""

    format: Literal["hf", "peft", "dcp"]
    """hf: a Hugging Face folder, adapters merged; peft: the adapter alone; dcp: torch.distributed.checkpoint."""
    interval: PositiveSteps | None = None
    """Steps between exports before the last step's; absent: only that one. Where an asynchronous save of the same step
    has staged a copy of the weights, they are made of it in the background."""
    keep: PositiveInt | None = None
    """How many of the newest interval exports stay; absent: all."""
    dtype: Literal["float32", "bfloat16", "float16", "original"] | None = None
    """What floating-point tensors become; original: what each is in the base's folder; absent: each keeps its own."""
    quantised: bool = False
    """Store weights as the converters trained them to be quantised (QAT: its scheme; Float8: blocks of float8), in
    step-N-quantised; what is not quantised takes `dtype`, and so do weights before they are."""
    max_shard_bytes: PositiveInt = 5_000_000_000
    """Bytes of one safetensors file at most, unless a single tensor is larger."""
    file_layout: Literal["size", "base"] = "size"
    """Which file a tensor is in: files of at most max_shard_bytes, or the file that has it in the base's folder."""
    folder: NonEmpty = "exports"
    """Relative to the run's base folder, and outside the checkpoint folder, so that a resume cannot meet it."""
    assets: NonEmpty | None = None
    """A Hugging Face folder whose tokenizer, generation config and the like are copied beside the weights; absent: the
    model's own, or the folder of initial_load."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def follows_base(self) -> bool:
        """Say whether the export asks the base's folder how it is to look."""
        return self.dtype == "original" or self.file_layout == "base"

    def problems(self) -> Iterator[str]:
        if self.follows_base and self.format != "hf":
            yield f"{'dtype' if self.dtype == 'original' else 'file_layout'}: only hf exports can look like their base"
        if self.quantised and self.format != "hf":
            yield f'quantised: a {self.format} export holds plain weights; format = "hf", or leave quantised out'
        if self.quantised and self.file_layout == "base":
            yield "file_layout: the base's files have no place for codes and scales; leave it out of a quantised export"
        if self.keep is not None and self.interval is None:
            yield "keep: needs an interval; the last step's export stays"

    def lands_in(self, step: int | None = None) -> str:
        """Return the folder of a step's export, or the pattern that two exports of one run must not share."""
        kind = "-peft" if self.format == "peft" else "-quantised" if self.quantised else ""
        return os.path.join(os.path.normpath(self.folder), f"step-{'N' if step is None else step}{kind}")


_TORCHTITAN_KEYS = {
    "enable": "[checkpoint.save] being there is what turns saving on",
    "interval": "checkpoint.save.interval",
    "async_mode": 'checkpoint.save.async_mode = "thread" for "async", "process" for "async_with_pinned_mem"',
    "keep_latest_k": "checkpoint.save.keep = { latest = K }, left out to keep all",
    "enable_first_step_checkpoint": "checkpoint.save.first_step = true",
    "load_only": "a run without [checkpoint.save] only loads",
    "load_step": "checkpoint.resume.step, left out for the newest",
    "exclude_from_loading": 'checkpoint.resume.exclude = ["dataloader", ...]',
    "initial_load_path": '[[checkpoint.initial_load]] with path = "..."',
    "initial_load_in_hf": 'checkpoint.initial_load.format = "hf", or left out to find it from the content',
    "initial_load_in_hf_quantized": "the format of checkpoint.initial_load.path is found from its content",
    "initial_load_model_only": "checkpoint.initial_load only takes model weights; to take over a run, name its folder "
    "in checkpoint.folder",
    "last_save_in_hf": '[checkpoint.export] with format = "hf"',
    "last_save_model_only": "every save can be resumed from; weights alone are a [checkpoint.export]",
    "export_dtype": "checkpoint.export.dtype",
    "create_seed_checkpoint": "name a step of any other run in checkpoint.initial_load, also one of another layout",
    "enable_ft_dataloader_checkpoints": "nothing, torchft has no part in it",
}
"""A flat key of torchtitan and what says the same here. Source: torchtitan, components/checkpointer/base.py."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """[checkpoint]: alone, resume from what the folder holds and write nothing."""

    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = {
        key: f"a torchtitan key; here: {answer}" for key, answer in _TORCHTITAN_KEYS.items()
    }

    folder: NonEmpty = "checkpoints"
    """Relative to the run's base folder."""
    components: tuple[Component, ...] | None = None
    """What the run saves and loads; what it does not have is ignored. Absent: everything. Without "model" the weights
    come from outside, by the handler that the manager is given."""
    save: SaveConfig | None = None
    """Absent: nothing is saved."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    initial_load: tuple[InitialLoadConfig, ...] = ()
    """In order, and only where the folder holds no checkpoint; an adapter-only checkpoint takes its base from here."""
    export: tuple[ExportConfig, ...] = ()
    """One table, or several by [[checkpoint.export]]; absent: none."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def external(self) -> bool:
        """Whether weights come from outside, and are not in the run's checkpoints."""
        return self.components is not None and "model" not in self.components

    def left_out(self) -> frozenset[str]:
        """Return the components that the run neither saves nor loads."""
        return frozenset() if self.components is None else frozenset(get_args(Component)) - {*self.components}

    def problems(self) -> Iterator[str]:
        if self.components is not None and not self.components:
            yield "components: name one or more; absent: everything"
        if self.external and self.initial_load:
            yield 'initial_load: components has no "model", so weights come from outside; leave one of the two out'
        targets: dict[str, int] = {}
        own = os.path.normpath(self.folder)
        for i, export in enumerate(self.export):
            target = export.lands_in()
            if target in targets:
                yield f"export.{i}: lands in {target!r}, as export.{targets[target]} does; give one another folder"
            targets.setdefault(target, i)
            if os.path.commonpath([os.path.abspath(target), os.path.abspath(own)]) == os.path.abspath(own):
                yield f"export.{i}.folder: {export.folder!r} is inside checkpoint folder {self.folder!r}; name another"
        if self.initial_load and self.initial_load[0].merge:
            yield "initial_load.0.merge: nothing is loaded yet that it could be merged into; name the base before it"
        paths = [os.path.normpath(source.path) for source in self.initial_load]
        for i, path in enumerate(paths):
            if path in paths[:i]:
                yield f"initial_load.{i}.path: {path!r} is named twice; each weight has one source"
