"""The commands that write checkpoints in other forms, and those that change what a run keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro
from rich.console import Console

from titan_ckpt.cli import tables
from titan_ckpt.cli.command import DIFFERENT, SAME, Shown, place
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.errors import ConfigError, SaveError

if TYPE_CHECKING:
    from titan_ckpt.tools.conversion import Options


@dataclass(frozen=True, kw_only=True)
class Writing(Shown):
    """A command that writes a checkpoint, and how it is written."""

    takes_urls: ClassVar[bool] = True
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of floating-point tensors in the target; absent: each keeps its own."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of one safetensors file."""

    def options(self, config: Path | None, model: str | None, settings: Path | None = None) -> Options:
        """Return all settings of the target."""
        import torch

        from titan_ckpt.tools.conversion import Options
        from titan_ckpt.training.launch.terminal import hide_foreign

        hide_foreign()
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        folders = [None if folder is None else place(folder) for folder in (config, settings)]
        return Options(folders[0], model, dtype, self.max_shard_bytes, folders[1])


@dataclass(frozen=True)
class Convert(Writing):
    """Write the model weights of a checkpoint, or its adapter, in another format."""

    source: tyro.conf.Positional[Path]
    """Folder, file, or bucket's URL."""
    target: tyro.conf.Positional[Path]
    """The folder, or with --to torch the file, to be written; it must not exist. With --to hf, peft and dcp also a
    bucket's URL."""
    to: Literal["native", "dcp", "hf", "torch", "peft"]
    """hf for a model, peft for an adapter, the others for both; torch is one torch.save file."""
    config: Path | None = None
    """Folder of the model's config.json, if the source has none."""
    model: str | None = None
    """The native side has the names of this model: llama3, qwen3, qwen3_moe, hf, or your own "package.module:Name".
    Absent: found from config.json."""
    settings: Path | None = None
    """PEFT folder or native step with rank and alpha of the adapter, if it is in a DCP folder, which says none."""
    check_logits: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compute the logits of random tokens with the source and with the target, and answer 1 if they differ by more than
    rounding. Takes the memory of the whole model in float32, transformers, and paths on mounted file systems."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.conversion import convert_checkpoint

        options = self.options(self.config, self.model, self.settings)
        check = None
        if self.check_logits:
            from titan_ckpt.tools.logits import LogitsCheck

            require_local({"--check-logits: source": self.source, "target": self.target, "config": self.config})
            check = LogitsCheck(self.source, self.config, self.model, options.dtype, to=self.to)
        found = convert_checkpoint(place(self.source), place(self.target), self.to, options)
        if check is None:
            return self.show(found, lambda: tables.written(found, console))
        logits = check.compare(self.target, self.to)

        def show() -> None:
            tables.written(found, console)
            tables.logits(logits, console)

        self.show(found, show, logits={**asdict(logits), "same": logits.same})
        return SAME if logits.same else DIFFERENT


@dataclass(frozen=True)
class Merge(Writing):
    """Write a Hugging Face folder of a base with adapters merged into it, one after the other."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The base, one adapter or several (PEFT folders or steps), and the folder to be written; or URLs of theirs."""
    config: Path | None = None
    """Folder of the model's config.json, if the base has none."""
    model: str | None = None
    """Architecture of the base: llama3, qwen3, qwen3_moe, hf, or your own "package.module:Name". Absent: found from
    config.json."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.conversion import merge_adapters

        if len(self.paths) < 3:
            raise ConfigError(
                ["expected BASE ADAPTER... DST: a base, at least one adapter, and the folder to be written"]
            )
        base, *adapters, target = map(place, self.paths)
        found = merge_adapters(base, adapters, target, self.options(self.config, self.model))
        return self.show(found, lambda: tables.written(found, console))


@dataclass(frozen=True)
class Prune(Shown):
    """Delete the steps of a run that a policy no longer keeps; refused while a run writes there."""

    takes_urls: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path]
    """The run's folder, or its checkpoint folder; or its place in a bucket."""
    keep: str | None = None
    """The policy, as in [checkpoint.save]: --keep "latest = 2, every = 1000"."""
    set_aside: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also delete the steps and exports that the run set aside when it went back to an earlier step; no policy counts
    them."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Delete nothing and say what would be deleted."""
    take_lease: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The writer that the folder names, on another machine, has ended."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools.retention import prune, read_policy

        if self.keep is None and not self.set_aside:
            raise ConfigError(
                ['nothing says what to delete; name a policy, such as --keep "latest = 2", or --set-aside']
            )
        found = prune(
            place(self.folder),
            None if self.keep is None else read_policy(self.keep),
            set_aside=self.set_aside,
            dry_run=self.dry_run,
            take_lease=self.take_lease,
        )
        how = {"dry_run": self.dry_run, "set_aside": self.set_aside}
        self.show(found, lambda: tables.pruned(found, console, **how), dry_run=self.dry_run)
        return DIFFERENT if found.left_over or found.held else SAME


@dataclass(frozen=True)
class Pin(Shown):
    """Keep steps, whatever the run's policy says."""

    takes_urls: ClassVar[bool] = True
    pinned: ClassVar[bool] = True
    """Whether they are pinned afterwards."""
    steps: tyro.conf.Positional[tuple[Path, ...]]
    """Steps, such as run/checkpoints/step-500; or URLs of theirs in a bucket."""

    def run(self, console: Console) -> int:
        from titan_ckpt.tools import retention

        act = retention.pin if self.pinned else retention.unpin
        steps = [act(place(path)) for path in self.steps]
        state = "pinned" if self.pinned else "no longer pinned"
        text = f"{state}: {', '.join(f'step {step}' for step in steps)}"
        return self.say(console, text, steps=steps, pinned=self.pinned)


@dataclass(frozen=True)
class Unpin(Pin):
    """Let the policy decide about pinned steps again."""

    pinned: ClassVar[bool] = False


@dataclass(frozen=True)
class Save(Shown):
    """Ask a running job for a save after its step under way, and wait until it is committed."""

    run_folder: Annotated[Path, tyro.conf.arg(name="run")]
    """The folder that the run writes into: train.py's output_folder, a manager's base_folder."""
    pin: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Pin the step, so that retention never deletes it."""
    timeout_seconds: float = 600.0
    """Longest time to wait for the answer."""

    def run(self, console: Console) -> int:
        from titan_ckpt.guard import outside_request

        if not self.timeout_seconds > 0:
            raise ConfigError([f"--timeout-seconds: expected a positive number, found {self.timeout_seconds:g}"])
        name = outside_request.ask(self.run_folder, pin=self.pin)
        answer = outside_request.await_answer(self.run_folder, name, self.timeout_seconds)
        if answer.error is not None:
            raise SaveError(f"{self.run_folder}: not saved: {answer.error}")
        text = f"{self.run_folder}: step {answer.step} is saved{' and pinned' * self.pin}"
        return self.say(console, text, run=str(self.run_folder), step=answer.step)
