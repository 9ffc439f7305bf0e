"""The commands of `titan-ckpt`: tables, messages and exit codes. This module knows no format of its own."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from rich.console import Console
from rich.table import Table

from titan_ckpt.cli.arguments import Command, Init, Inspect, Ls, Save, Train, Verify
from titan_ckpt.cli.new_run import write_run_file
from titan_ckpt.config import KeepConfig, from_dict
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.local_path import require_local
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from titan_ckpt.formats.native.verify import verify_step
from titan_ckpt.formats.open import detect_format, open_reader
from titan_ckpt.geometry.chunks import dtype_name
from titan_ckpt.guard import outside_request


def run(command: Command) -> int:
    """Run a command and return the exit code; an error is one line on standard error."""
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    try:
        require_local({name: value for name, value in vars(command).items() if isinstance(value, Path)})
        match command:
            case Train():
                raise AssertionError("main hands this command on")
            case Init():
                console.print(write_run_file(command))
                return 0
            case Ls():
                return _ls(command, console)
            case Inspect():
                return _inspect(command, console)
            case Verify():
                return _verify(command, console)
            case Save():
                return _save(command, console)
            case _:
                assert_never(command)
    except (CheckpointError, OSError) as error:
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            _printable(f"titan-ckpt: {error}"), style="red", markup=False
        )
        return 1


def _printable(text: str) -> str:
    """Return the text with control characters escaped: a name in a foreign file could change the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _ls(command: Ls, console: Console) -> int:
    if not command.folder.is_dir():
        raise CheckpointNotFoundError(f"{command.folder} is no folder; name a run's checkpoint folder")
    directory = CheckpointDirectory(command.folder, Coordinator.current())
    manifests: dict[int, Manifest] = {}
    for step in directory.steps():
        with contextlib.suppress(CheckpointNotFoundError):  # deleted meanwhile by the run that writes here
            manifests[step] = directory.manifest(step)
    table = Table("step", "kind", "ranks", "MiB", "components", "converters")
    expired: list[int] = []
    if command.keep is not None:
        expired = directory.expired(_policy(command.keep), _resumed_from(manifests))
        table.add_column("policy")
    for step, manifest in manifests.items():
        size = sum(file.num_bytes for file in manifest.files) / 2**20
        converters = ", ".join(str(converter.get("kind")) for converter in manifest.converters)
        components = ", ".join(manifest.components)
        row = [str(step), manifest.kind, str(manifest.world_size), f"{size:.1f}", components, converters]
        table.add_row(*row, *([] if command.keep is None else ["deletes" if step in expired else "keeps"]))
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


def _inspect(command: Inspect, console: Console) -> int:
    with open_reader(command.path) as reader:
        table = Table("tensor", "dtype", "shape", "MiB")
        for key, info in sorted(reader.tensors.items()):
            table.add_row(_printable(key), dtype_name(info.dtype), str(list(info.shape)), f"{info.nbytes / 2**20:.3f}")
        console.print(table)
        total = sum(info.nbytes for info in reader.tensors.values())
        console.print(f"{reader.format}: {len(reader.tensors)} tensors, {total / 2**20:.1f} MiB")
    return 0


def _verify(command: Verify, console: Console) -> int:
    found = detect_format(command.path)
    if found != "native":
        console.print(f"{command.path} is a {found} folder, which carries no digests: `inspect` shows what it holds")
        return 2
    step = verify_step(command.path)
    mib = f"{step.num_bytes / 2**20:.1f} MiB"
    console.print(f"{command.path}: {step.num_files} files, {mib}, every digest holds and every tensor is whole")
    if step.foreign:
        console.print(f"also there, and no part of the step: {', '.join(step.foreign)}")
    return 0


def _save(command: Save, console: Console) -> int:
    name = outside_request.ask(command.run_folder)
    answer = outside_request.await_answer(command.run_folder, name, command.timeout_seconds)
    if answer.error is not None:
        raise CheckpointError(f"{command.run_folder}: not saved: {answer.error}")
    console.print(f"{command.run_folder}: step {answer.step} is saved")
    return 0
