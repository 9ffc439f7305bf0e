"""`titan-ckpt ls | inspect | verify | save`: arguments, tables and exit codes. Knows no format of its own."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from titan_ckpt import save_request
from titan_ckpt.config import KeepConfig, from_dict
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from titan_ckpt.manifest import Manifest
from titan_ckpt.storage import detect_format, open_reader
from titan_ckpt.storage.verify import verify_files


@dataclass(frozen=True)
class Ls:
    """List the committed steps of a run's checkpoint folder, and why any folder is not one."""

    folder: tyro.conf.Positional[Path]
    keep: str | None = None
    """Say what this policy, as in [checkpoint.save], would delete; nothing is: --keep "latest = 2, every = 1000"."""

    def run(self, console: Console) -> int:
        if not self.folder.is_dir():
            raise CheckpointNotFoundError(f"{self.folder} is no folder; name a run's checkpoint folder")
        directory = CheckpointDirectory(self.folder, Coordinator.current())
        manifests = {step: directory.manifest(step) for step in directory.steps()}
        expired = directory.expired(_policy(self.keep), _resumed_from(manifests)) if self.keep is not None else []
        table = Table("step", "kind", "ranks", "MiB", "components", "converters")
        if self.keep is not None:
            table.add_column("policy")
        for step, m in manifests.items():
            size = sum(f.num_bytes for f in m.files) / 2**20
            converters = ", ".join(str(c.get("kind")) for c in m.converters)
            row = [str(step), m.kind, str(m.world_size), f"{size:.1f}", ", ".join(m.components), converters]
            table.add_row(*row, *([] if self.keep is None else ["deletes" if step in expired else "keeps"]))
        console.print(table)
        return 0


def _policy(text: str) -> KeepConfig:
    """Read an inline table's content. Raises: ConfigError."""
    try:
        return from_dict(KeepConfig, tomllib.loads(f"keep = {{ {text} }}")["keep"], "--keep")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f'{text!r} is no TOML ({error}); expected such as "latest = 2"'], "--keep") from None


def _resumed_from(manifests: Mapping[int, Manifest]) -> set[int]:
    """Return the step that the run which saved last went on from; that run does not delete it."""
    last = max(manifests.values(), key=lambda m: m.step, default=None)  # no run saves below a step: clocks may jump
    step = last.resumed_from.get("step") if last is not None and last.resumed_from else None
    return {step} if isinstance(step, int) else set()


@dataclass(frozen=True)
class Inspect:
    """List the tensors of a checkpoint of any format: native step, Hugging Face folder, PEFT adapter, DCP."""

    path: tyro.conf.Positional[Path]

    def run(self, console: Console) -> int:
        with open_reader(self.path) as reader:
            table = Table("tensor", "dtype", "shape", "MiB")
            for key, info in sorted(reader.tensors.items()):
                dtype = str(info.dtype).removeprefix("torch.")
                table.add_row(key, dtype, str(list(info.shape)), f"{info.nbytes / 2**20:.3f}")
            console.print(table)
            total = sum(info.nbytes for info in reader.tensors.values())
            console.print(f"{reader.format}: {len(reader.tensors)} tensors, {total / 2**20:.1f} MiB")
        return 0


@dataclass(frozen=True)
class Verify:
    """Read a native step whole and compare every file with the digest that was committed."""

    path: tyro.conf.Positional[Path]

    def run(self, console: Console) -> int:
        found = detect_format(self.path)
        if found != "native":
            console.print(f"{self.path} is a {found} folder, which carries no digests: `inspect` shows what it holds")
            return 2
        num_files, num_bytes = verify_files(self.path)
        console.print(f"{self.path}: {num_files} files, {num_bytes / 2**20:.1f} MiB, every digest holds")
        return 0


@dataclass(frozen=True)
class Save:
    """Ask a running job for a save after its step under way, and wait until it is committed."""

    run_folder: Annotated[Path, tyro.conf.arg(name="run")]
    """The folder that the run writes into: train.py's output_folder, a manager's base_folder."""
    timeout_seconds: float = 600.0
    """How long to wait for the answer."""

    def run(self, console: Console) -> int:
        name = save_request.ask(self.run_folder)
        answer = save_request.await_answer(self.run_folder, name, self.timeout_seconds)
        if answer.error is not None:
            raise CheckpointError(f"{self.run_folder}: not saved: {answer.error}")
        console.print(f"{self.run_folder}: step {answer.step} is saved")
        return 0


Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Save, tyro.conf.subcommand("save")]
)


def main(args: list[str] | None = None) -> int:
    """Run the command line; 0 on success, 1 for a checkpoint that is not as it should be, 2 for bad arguments."""
    command = tyro.cli(Command, args=args, prog="titan-ckpt", description=__doc__)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        return int(command.run(console))
    except (CheckpointError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"titan-ckpt: {error}", style="red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
