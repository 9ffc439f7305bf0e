"""The commands of `titan-ckpt`: what is called, what is printed, and the exit code. The work is in titan_ckpt/tools."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from rich.console import Console

from titan_ckpt.cli import tables
from titan_ckpt.cli.arguments import (
    Command,
    Convert,
    Diff,
    Init,
    Inspect,
    Ls,
    Merge,
    Pin,
    Plan,
    Prune,
    Report,
    Save,
    Train,
    Unpin,
    Verify,
)
from titan_ckpt.cli.new_run import write_run_file
from titan_ckpt.cli.output import Output, naming_standard_output
from titan_ckpt.encoding.local_path import require_local
from titan_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    SaveError,
    printable,
)
from titan_ckpt.stores.bucket import open_location
from titan_ckpt.stores.settings import StoreConfig, require_places
from titan_ckpt.stores.store import Place

if TYPE_CHECKING:
    from titan_ckpt.tools.conversion import Options

_RETRY_SECONDS = 30.0

_OF_PLACES = Ls | Inspect | Verify | Prune | Pin | Unpin
"""Commands that take the URL of a place in a bucket, too."""

_PIPED_COLUMNS = 1000
"""Width of what goes to a file or another program, which would otherwise get rows that are cut at 80 columns."""

SAME, DIFFERENT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: fine or the same; different, damaged or refused; wrong use, or input that cannot be read; Ctrl-C."""


def run(command: Command) -> int:
    """Run a command and return the exit code; an error is one line on standard error."""
    is_shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Output(markup=True, emoji=False, width=None if is_shown else _PIPED_COLUMNS)
    try:
        (require_places if isinstance(command, _OF_PLACES) else require_local)(dict(_paths(command)))
        return _run(command, console)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written under its final name", INTERRUPTED)
    except SaveError as error:  # the folder's state refuses it: a live writer, a deletion that was first
        return _fail(str(error), DIFFERENT)
    except CorruptCheckpointError as error:
        return _fail(str(error), DIFFERENT if isinstance(command, Verify) else WRONG_USE)
    except CheckpointError as error:
        return _fail(str(error), WRONG_USE)
    except BrokenPipeError:  # main answers
        raise
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), WRONG_USE)


def _paths(command: Command) -> Iterator[tuple[str, Path]]:
    """Yield the name and the value of every argument that is a path, each of several by its number."""
    for name, value in vars(command).items():
        several = enumerate(value, 1) if isinstance(value, tuple) else ()
        for key, part in [(name, value), *((f"{name} {number}", part) for number, part in several)]:
            if isinstance(part, Path):
                yield key, part


def _place(path: Path) -> Place:
    """Return what an argument names; how a bucket is reached comes from the environment, as its credentials do.

    Raises: ConfigError.
    """
    return open_location(path, settings=StoreConfig(retry_seconds=_RETRY_SECONDS))


def _fail(text: str, code: int) -> int:
    line = " ".join(printable(text).split())
    Console(stderr=True, soft_wrap=True, emoji=False).print(f"titan-ckpt: {line}", style="red", markup=False)
    return code


def _run(command: Command, console: Console) -> int:
    match command:
        case Train():
            raise AssertionError("main hands this command on")
        case Init():
            console.print(write_run_file(command), markup=False)
            return SAME
        case Ls():
            return _ls(command, console)
        case Inspect():
            return _inspect(command, console)
        case Verify():
            return _verify(command, console)
        case Diff():
            return _diff(command, console)
        case Convert():
            return _convert(command, console)
        case Merge():
            return _merge(command, console)
        case Prune():
            return _prune(command, console)
        case Pin() | Unpin():
            return _pin(command, console)
        case Save():
            return _save(command, console)
        case Plan():
            return _plan(command, console)
        case Report():
            return _report(command, console)
        case _:
            assert_never(command)


def _json(value: Any, **more: Any) -> None:
    """Print a result as one JSON object."""
    data = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps({**data, **more}, default=str)
    with naming_standard_output():
        sys.stdout.write(f"{text}\n")


def _ls(command: Ls, console: Console) -> int:
    from titan_ckpt.tools.listing import list_run

    found = list_run(_place(command.folder))
    _json(found) if command.json else tables.listing(found, console)
    return SAME


def _inspect(command: Inspect, console: Console) -> int:
    from titan_ckpt.tools import inspecting

    if command.tensor is not None:
        figures = inspecting.statistics(_place(command.path), command.tensor)
        _json(figures) if command.json else tables.statistics(figures, console)
        return SAME
    found = inspecting.inspect(_place(command.path))
    _json(found) if command.json else tables.content(found, console, everything=command.all)
    return SAME


def _verify(command: Verify, console: Console) -> int:
    from titan_ckpt.tools.verifying import verify

    try:
        found = verify(_place(command.path))
    except CorruptCheckpointError as error:
        if not command.json:
            console.print(str(error), soft_wrap=True, markup=False, highlight=False)
            return DIFFERENT
        _json({"path": str(command.path), "whole": False, "faults": str(error).splitlines()})
        return DIFFERENT
    _json(found, whole=True) if command.json else tables.verified(found, console)
    return SAME


def _diff(command: Diff, console: Console) -> int:
    from titan_ckpt.tools.difference import compare
    from titan_ckpt.training.launch.terminal import hide_foreign

    if command.top < 1:
        raise ConfigError([f"--top: expected a positive integer, found {command.top}"])

    hide_foreign()
    found = compare(command.left, command.right, config=command.config, weights_only=command.weights)
    _json(found, same=found.same) if command.json else tables.difference(found, console, command.top)
    return SAME if found.same else DIFFERENT


def _options(command: Convert | Merge) -> Options:
    import torch

    from titan_ckpt.tools.conversion import Options
    from titan_ckpt.training.launch.terminal import hide_foreign

    hide_foreign()
    dtype = None if command.dtype is None else getattr(torch, command.dtype)
    settings = command.settings if isinstance(command, Convert) else None
    return Options(command.config, command.model, dtype, command.max_shard_bytes, settings)


def _convert(command: Convert, console: Console) -> int:
    from titan_ckpt.tools.conversion import convert_checkpoint

    found = convert_checkpoint(command.source, command.target, command.to, _options(command))
    _json(found) if command.json else tables.written(found, console)
    return SAME


def _merge(command: Merge, console: Console) -> int:
    from titan_ckpt.tools.conversion import merge_adapters

    if len(command.paths) < 3:
        raise ConfigError(["expected BASE ADAPTER... DST: a base, at least one adapter, and the folder to be written"])
    base, *adapters, target = command.paths
    found = merge_adapters(base, adapters, target, _options(command))
    _json(found) if command.json else tables.written(found, console)
    return SAME


def _prune(command: Prune, console: Console) -> int:
    from titan_ckpt.tools.retention import prune, read_policy

    if command.keep is None and not command.set_aside:
        raise ConfigError(['nothing says what to delete; name a policy, such as --keep "latest = 2", or --set-aside'])
    keep = None if command.keep is None else read_policy(command.keep)
    found = prune(
        _place(command.folder),
        keep,
        set_aside=command.set_aside,
        dry_run=command.dry_run,
        take_lease=command.take_lease,
    )
    if command.json:
        _json(found, dry_run=command.dry_run)
    else:
        tables.pruned(found, console, dry_run=command.dry_run, set_aside=command.set_aside)
    return DIFFERENT if found.left_over or found.held else SAME


def _pin(command: Pin | Unpin, console: Console) -> int:
    from titan_ckpt.tools.retention import pin, unpin

    act = pin if isinstance(command, Pin) else unpin
    steps = [act(_place(path)) for path in command.steps]
    word = "pinned" if act is pin else "no longer pinned"
    text = f"{word}: {', '.join(f'step {step}' for step in steps)}"
    _json({"steps": steps, "pinned": act is pin}) if command.json else tables.say(console, text)
    return SAME


def _save(command: Save, console: Console) -> int:
    from titan_ckpt.guard import outside_request

    if not command.timeout_seconds > 0:
        raise ConfigError([f"--timeout-seconds: expected a positive number, found {command.timeout_seconds:g}"])
    name = outside_request.ask(command.run_folder, pin=command.pin)
    answer = outside_request.await_answer(command.run_folder, name, command.timeout_seconds)
    if answer.error is not None:
        raise SaveError(f"{command.run_folder}: not saved: {answer.error}")
    text = f"{command.run_folder}: step {answer.step} is saved{' and pinned' * command.pin}"
    _json({"run": str(command.run_folder), "step": answer.step}) if command.json else tables.say(console, text)
    return SAME


def _plan(command: Plan, console: Console) -> int:
    from titan_ckpt.cli.planning import plan_load

    found = plan_load(command.config, command.settings)
    _json(found) if command.json else tables.plan(found, console)
    return DIFFERENT if found.problems else SAME


def _report(command: Report, console: Console) -> int:
    from titan_ckpt.tools.report import write_report

    output = command.output if command.output is not None else command.folder / "report.html"
    figures = write_report(command.folder, output)
    text = f"{output} is written: {os.path.getsize(output)} bytes"
    _json(figures, output=str(output)) if command.json else tables.say(console, text)
    return SAME
