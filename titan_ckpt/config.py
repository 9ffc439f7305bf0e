"""Settings of a run's checkpoints: frozen dataclasses, one per TOML table.

Owns the settings and the rules between them; encoding/toml.py turns TOML into dataclasses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, get_args

from titan_ckpt.encoding.paths import LocalPath
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys, validate
from titan_ckpt.encoding.toml import from_dict as from_dict
from titan_ckpt.stores.store import FolderOrBucket, split_url
from titan_ckpt.stores.store import StoreConfig as StoreConfig
from titan_ckpt.types import Format

Component = Literal["model", "optimizer", "lr_scheduler", "dataloader", "rng", "states"]

NonEmpty = Annotated[str, Check("a string that is not empty", str.strip)]
NonNegative = Annotated[int, Check("an integer, 0 or more", lambda n: n >= 0)]
PositiveInt = Annotated[int, Check("a positive integer", lambda n: n > 0)]
PositiveSeconds = Annotated[float, Check("a positive number (seconds)", lambda s: s > 0)]
PositiveHours = Annotated[float, Check("a positive number (hours)", lambda h: h > 0)]
Hours = Annotated[str, Check('a time such as "6 hours"', re.compile(r"(?=.*[1-9])\d+(\.\d+)? hours?").fullmatch)]
PositiveSteps = Annotated[int, Check("a positive integer (steps)", lambda n: n > 0)]


@dataclass(frozen=True, slots=True)
class KeepConfig(Checked):
    """Retention of committed steps. A step stays if any rule keeps it; the newest step always stays."""

    latest: PositiveInt | None = None
    """Number of newest steps that stay; more than one guards against a bad newest step."""
    every: PositiveSteps | Hours | None = None
    """Steps divisible by this stay for good; of "6 hours", the first step saved in each span of so much time."""
    best: PositiveInt | None = None
    """Number of steps with the best `metric` that stay."""
    metric: NonEmpty = "loss"
    """Name of the value from save(metrics=...) that `best` compares, the smallest being best; "max:NAME": the largest.
    A step without it is not among the best. No step expires until one has it."""

    @property
    def every_steps(self) -> int | None:
        """Return `every` in steps; None if it is a time."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Return `every` in seconds; None if it is a number of steps."""
        return float(self.every.split()[0]) * 3600 if isinstance(self.every, str) else None

    @property
    def metric_name(self) -> str:
        """Return the name of the metric."""
        return self.metric.removeprefix("max:")

    def problems(self) -> Iterator[str]:
        if not any((self.latest, self.every, self.best)):
            yield "latest: required where no other rule is set; to keep every checkpoint leave `keep` out"


@dataclass(frozen=True, slots=True)
class SaveConfig(Checked):
    """When and how steps are saved."""

    interval: PositiveSteps
    """Steps between saves; the last step is saved as well."""
    async_mode: Literal["disabled", "thread", "process"] = "thread"
    """thread, process: write in the background while training goes on; disabled: write in the training loop."""
    keep: KeepConfig | None = None
    """Steps that stay after a commit; absent: all."""
    first_step: bool = False
    """Save after step 1 too, so that problems with the folder show at once."""
    model_only_last: bool | Literal["float32", "bfloat16", "float16"] = False
    """The last step holds the model alone: true keeps each tensor's dtype, a dtype is floating-point tensors'. No
    run resumes from it; name it in initial_load. false: the last step is a full one."""
    include_base: bool = False
    """If converters own keys: write the frozen base weights too; else a save holds the adapter and names its base."""
    if_busy: Literal["wait", "skip"] = "wait"
    """If a save is due while one is in flight: wait for that one, or skip the new one."""
    check_replicas: Literal["off", "sampled", "full"] = "sampled"
    """Compare the ranks' copies of the same tensors before a save. sampled: 16 MiB of 1024 tensors per rank, other
    tensors at every save; full: all."""
    on_failure: Literal["raise", "warn"] = "raise"
    """If the disk or the store refuses a save or an interval export (full, quota, read-only, I/O error, expired
    credentials): end the run, or warn and go on to the next one that is due. The fourth failure in a row, and those of
    the last save and the last exports, always raise."""
    timeout_seconds: PositiveSeconds = 1800.0
    """A rank that has waited this long for its peers, or for a writer process that does nothing, fails and names
    them."""

    def is_due(self, step: int, last_step: bool) -> bool:
        """Return whether the state after `step` optimizer steps must be saved."""
        on_interval = step > 0 and step % self.interval == 0
        return last_step or on_interval or (self.first_step and step == 1)


@dataclass(frozen=True, slots=True)
class ResumeConfig(Checked):
    """How a run resumes from its own checkpoint folder."""

    step: Annotated[int, Check("a step (0 or more; left out for the newest)", lambda n: n >= 0)] | None = None
    """Resume from this step only; absent: from the newest valid step."""
    exclude: tuple[Component, ...] = ()
    """Components that are not loaded and start from their initial state; the model from `initial_load`, if it names any
    source."""
    share_reads: bool = True
    """Ranks read once what several of them want of a bucket, or of a network's file system that is not in the page
    cache, and send it to the others, which verify it; so with sources. Set it to false where the network between
    the ranks is slower than the store."""


@dataclass(frozen=True, slots=True)
class StopConfig(Checked):
    """The events that end a run before its last step, and how it saves then; for training loops with a RunGuard."""

    on: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "exception"], ...] = (
        "SIGTERM", "SIGUSR1", "exception",
    )  # fmt: skip
    """The run saves and stops on these signals to any rank; a second one after two seconds or more ends the process.
    exception: if the loop raises on all ranks, the last completed step is saved; a rank that has raised waits for the
    others, 20 seconds at most and no longer than grace_seconds."""
    grace_seconds: PositiveSeconds = 30.0
    """Time from the signal to the kill; the last save starts only if the time that saves take here is left."""
    after_hours: PositiveHours | None = None
    """Save and stop before the run has lasted this long, and in any case before the end of a job of Slurm, which is in
    the environment as SLURM_JOB_END_TIME; absent: only then."""
    hang_seconds: PositiveSeconds | Literal["off"] = 600.0
    """After this time without progress, all processes are asked; if one does not answer, the others name it and end.
    off: nobody is asked."""


@dataclass(frozen=True, slots=True)
class InitialLoadConfig(Checked):
    """A source of weights for a run that has no checkpoint of its own yet."""

    path: FolderOrBucket
    """Path or bucket's URL of a checkpoint step, a Hugging Face folder, a PEFT adapter, or a DCP folder; or the id of a
    model in the local Hugging Face cache, of its `revision`."""
    format: Format | None = None
    """Required format; absent: detected from the content."""
    cast: bool = False
    """Allow casts from floating-point dtypes to the model's; every cast is reported."""
    revision: NonEmpty | None = None
    """Version of `path`; an adapter's checkpoint records it as part of the base's identity."""
    load: Literal["weights", "training_state", "merge"] = "weights"
    """weights: those of a model, or of an adapter into its converter. training_state: that too, from a step of this
    package or a DCP folder of torchtitan, and the run goes on after its step. merge: add this adapter to the weights of
    the sources before it."""
    prefix: str | None = None
    """Prefix of the model's names in a DCP folder that nests it, such as "state.model."; absent: found from the names.
    """
    initialize: tuple[NonEmpty, ...] = ()
    """Tensors of the model that this source does not provide, as patterns over their names, such as "lm_head.*". If it
    has one with fewer rows (added tokens), its rows are loaded and the others initialized; else all of it is."""
    ignore: tuple[NonEmpty, ...] = ()
    """Tensors of this source that are not used, as patterns over their names there, such as "model.layers.30.*"."""

    def problems(self) -> Iterator[str]:
        if self.load == "merge" and (self.initialize or self.ignore):
            yield "load: an adapter is merged as a whole; leave initialize and ignore out"
        if self.prefix and not self.prefix.endswith("."):
            yield f'prefix: {self.prefix!r} ends without a dot; write "{self.prefix}."'
        if self.prefix is not None and self.format not in (None, "dcp"):
            yield f"prefix: only a DCP folder nests the model; leave it out of a source in the format {self.format}"


@dataclass(frozen=True, slots=True)
class ExportConfig(Checked):
    """Weights for other tools, written after the last step to <base_folder>/<folder>/step-N, -peft or -quantized."""

    format: Literal["hf", "hf_quantized", "peft", "dcp", "torchtitan", "torchtitan_weights"]
    """hf: a Hugging Face folder, adapters merged. hf_quantized: its weights quantized as the converters trained them
    (QAT: its scheme; Float8: blocks of float8), in step-N-quantized. peft: the adapter alone. dcp: the weights by
    torch.distributed.checkpoint. torchtitan_weights: those by the names of torchtitan's model, which then loads the
    folder. torchtitan: the training state too, by torchtitan's names: its own checkpointer resumes the folder, and so
    does initial_load with load = "training_state"."""
    interval: PositiveSteps | None = None
    """Steps between exports before the export of the last step; absent: only that one. If an asynchronous save of the
    same step has staged a copy of the weights, the export is made from the copy in the background."""
    keep: PositiveInt | None = None
    """Number of newest interval exports that stay; absent: all."""
    dtype: Literal["float32", "bfloat16", "float16", "original"] | None = None
    """Dtype of exported floating-point tensors; original: as in the base's folder; absent: each keeps its own. In a
    quantized export it applies to tensors that are not quantized, and to weights before they are quantized."""
    max_shard_bytes: PositiveInt | Literal["base"] = 5_000_000_000
    """Maximum size of one safetensors file, unless a single tensor is larger; base: each tensor is in the file that has
    it in the base's folder."""
    folder: FolderOrBucket = "exports"
    """Path relative to the run's base folder, or a place in a bucket; outside the checkpoint folder, so that a resume
    never looks into it. A dcp export beside an hf export of the same folder is written to its subfolder dcp."""
    assets: LocalPath | None = None
    """Hugging Face folder whose tokenizer, generation config and similar files are copied beside the weights; absent:
    the model's own, or the folder of initial_load."""

    @property
    def container(self) -> Literal["hf", "peft", "dcp"]:
        """Return what the files are of."""
        match self.format:
            case "hf" | "hf_quantized":
                return "hf"
            case "peft":
                return "peft"
            case "dcp" | "torchtitan" | "torchtitan_weights":
                return "dcp"

    @property
    def quantized(self) -> bool:
        """Return whether weights are exported as codes and scales."""
        return self.format == "hf_quantized"

    @property
    def training_state(self) -> bool:
        """Return whether a run resumes from the export."""
        return self.format == "torchtitan"

    @property
    def follows_base(self) -> bool:
        """Return whether dtypes or files follow the base's folder."""
        return self.dtype == "original" or self.max_shard_bytes == "base"

    def problems(self) -> Iterator[str]:
        if self.follows_base and self.container != "hf":
            key = "dtype" if self.dtype == "original" else "max_shard_bytes"
            yield f"{key}: only hf exports can look like their base"
        if self.training_state and self.dtype is not None:
            yield 'dtype: a run that resumes needs each tensor\'s own; leave it out, or format = "torchtitan_weights"'
        if self.quantized and self.max_shard_bytes == "base":
            yield "max_shard_bytes: the base's files have no place for codes and scales; give a size, or leave it out"
        if self.keep is not None and self.interval is None:
            yield "keep: needs an interval; the last step's export stays"

    def is_due(self, step: int, last_step: bool) -> bool:
        """Return whether the export of the state after `step` optimizer steps must be made."""
        return last_step or (self.interval is not None and step > 0 and step % self.interval == 0)

    def expired(self, steps: Sequence[int], step: int) -> list[int]:
        """Return the exported steps to remove after the export of `step`: interval exports up to it, except the newest.

        Later ones were made before an interruption and are valid when the run has come so far again; they stay.
        """
        if self.interval is None or self.keep is None:
            return []
        return sorted(n for n in set(steps) if 0 < n <= step and n % self.interval == 0)[: -self.keep]

    def lands_in(self, step: int | None = None) -> str:
        """Return the folder of a step's export; without a step, its pattern, which two exports must not share."""
        kind = "-peft" if self.container == "peft" else "-quantized" if self.quantized else ""
        name = f"step-{'N' if step is None else step}{kind}"
        if place := split_url(self.folder):
            return "/".join([f"{place[0]}://{place[1]}", *filter(None, [place[2]]), name])
        return os.path.join(os.path.normpath(self.folder), name)


def _apart(exports: Sequence[ExportConfig]) -> tuple[ExportConfig, ...]:
    """Return the exports; one of format dcp that would land where one of format hf does has a folder of its own."""
    taken = {export.lands_in() for export in exports if export.container == "hf"}
    return tuple(
        replace(export, folder=f"{export.folder.rstrip('/')}/dcp")
        if export.container == "dcp" and export.lands_in() in taken
        else export
        for export in exports
    )


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
    "initial_load_model_only": 'checkpoint.initial_load.load = "training_state" for its False',
    "last_save_in_hf": '[checkpoint.export] with format = "hf"',
    "last_save_model_only": "checkpoint.save.model_only_last, left out for a last step that can be resumed from",
    "export_dtype": "checkpoint.export.dtype",
    "create_seed_checkpoint": "training.steps = 0, on one process",
    "enable_ft_dataloader_checkpoints": "nothing, torchft has no part in it",
}
"""torchtitan's flat key -> the setting of this package. Source: torchtitan, components/checkpointer/base.py."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig(Checked):
    """[checkpoint]; alone, it makes a run resume from the folder and write nothing."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {"a torchtitan key": _TORCHTITAN_KEYS}

    folder: FolderOrBucket = "checkpoints"
    """Path relative to the run's base folder, or a place in a bucket: s3://bucket/key, gs://, az://."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """How buckets are reached: that of `folder`, those of sources and of exports."""
    components: tuple[Component, ...] | None = None
    """Components that the run saves and loads; those it does not have are ignored. Absent: all. Without "model", the
    handler that the manager is given brings the weights from outside."""
    save: SaveConfig | None = None
    """Settings of saves; absent: nothing is saved."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    initial_load: tuple[InitialLoadConfig, ...] = ()
    """Loaded in order, if the folder holds no checkpoint. An adapter-only checkpoint takes its base from these."""
    export: tuple[ExportConfig, ...] = ()
    """Exports; [[checkpoint.export]] gives several; absent: none."""
    allow: tuple[NonEmpty, ...] = ()
    """Classes, such as "lightning.pytorch.callbacks.timer.Timer", whose objects may lose their state at a resume;
    absent: a run that holds one that is not known to resume exactly is refused before it starts. Steps record them."""

    def __post_init__(self) -> None:
        exports: object = self.export  # validate says what is no export
        if isinstance(exports, tuple | list) and all(isinstance(export, ExportConfig) for export in exports):
            object.__setattr__(self, "export", _apart(exports))
        validate(self)

    @property
    def external(self) -> bool:
        """Return whether weights come from outside and are not in the run's checkpoints."""
        return self.components is not None and "model" not in self.components

    def left_out(self) -> frozenset[str]:
        """Return the components that the run neither saves nor loads."""
        return frozenset() if self.components is None else frozenset(get_args(Component)) - {*self.components}

    def _is_inside(self, target: str) -> bool:
        """Return whether an export would be inside the checkpoint folder."""
        own, other = split_url(self.folder), split_url(target)
        if own is None and other is None:
            folder = os.path.abspath(self.folder)
            return os.path.commonpath([os.path.abspath(target), folder]) == folder
        if own is None or other is None:
            return False
        return own[:2] == other[:2] and (not own[2] or f"{other[2]}/".startswith(f"{own[2]}/"))

    def _places(self) -> Iterator[str]:
        yield self.folder
        yield from (source.path for source in self.initial_load)
        yield from (export.folder for export in self.export)

    def problems(self) -> Iterator[str]:
        if len(set(self.allow)) != len(self.allow):
            yield "allow: a class is named twice"
        if self.components is not None and not self.components:
            yield "components: name one or more; absent: everything"
        if self.external and self.initial_load:
            yield 'initial_load: components has no "model", so weights come from outside; leave one of the two out'
        if self.external and self.save is not None and self.save.model_only_last:
            yield 'save.model_only_last: components has no "model", so none can be saved; leave one of the two out'
        targets: dict[str, int] = {}
        in_bucket = any(map(split_url, self._places()))
        if self.store != StoreConfig() and not in_bucket:
            yield (
                f"store: for buckets, and folder {self.folder!r}, sources and exports are on mounted file systems; "
                "leave it out"
            )
        for i, export in enumerate(self.export):
            target = export.lands_in()
            if target in targets:
                yield f"export.{i}: lands in {target!r}, as export.{targets[target]} does; give one another folder"
            targets.setdefault(target, i)
            if self._is_inside(target):
                yield f"export.{i}.folder: {export.folder!r} is inside checkpoint folder {self.folder!r}; name another"
        commits = any(map(split_url, [self.folder, *(export.folder for export in self.export)]))
        if commits and self.save is not None and 3 * self.store.retry_seconds > self.save.timeout_seconds:
            yield (
                f"store.retry_seconds: a commit may take 3 x {self.store.retry_seconds:g} s, and ranks wait for it for "
                f"save.timeout_seconds = {self.save.timeout_seconds:g} s; lower the one or raise the other"
            )
        if self.initial_load and self.initial_load[0].load == "merge":
            yield "initial_load.0.load: nothing is loaded yet that it could be merged into; name the base before it"
        if any(source.load == "training_state" for source in self.initial_load[:-1]):
            yield "initial_load: a source of training_state comes last; before it only the base of its adapter"
        paths = [os.path.normpath(source.path) for source in self.initial_load]
        for i, path in enumerate(paths):
            if path in paths[:i]:
                yield f"initial_load.{i}.path: {path!r} is named twice; each weight has one source"
