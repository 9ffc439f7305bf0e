"""Deleting and pinning steps by hand, beside or after the run that saved them. Imports no torch.

The order of operations, and what a kill in the middle leaves, are those of a run (directory/steps.py).
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.config import KeepConfig, from_dict
from titan_ckpt.directory.names import PIN_NAME, step_of
from titan_ckpt.directory.steps import Steps, open_steps, steps_at
from titan_ckpt.errors import CheckpointNotFoundError, CommitConflictError, ConfigError, NotACheckpointError, SaveError
from titan_ckpt.formats.publish.record import exports_at
from titan_ckpt.stores.store import Place, local_path
from titan_ckpt.tools.listing import committed_step, find_checkpoints, resumed_from

_SETTLE_SECONDS = 5.0
"""Longest time in which a step that is being deleted comes back, because its pin was seen."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The steps that a policy deletes and those that it keeps."""

    checkpoints: str
    deleted: tuple[int, ...]
    kept: tuple[int, ...]
    num_bytes: int
    """Size of the deleted steps."""
    set_aside: tuple[str, ...] = ()
    """Names of the steps and exports that rollbacks set aside and that are deleted, or would be if it was asked for."""
    set_aside_bytes: int = 0
    held: tuple[str, ...] = ()
    """One line for each other of these, which stays because it holds other files, such as a pin."""
    left_over: tuple[str, ...] = ()
    """Folders whose deletion could not be finished; the next run or `prune` tries again."""


def read_policy(text: str) -> KeepConfig:
    """Read the content of an inline table, such as "latest = 2, every = 1000". Raises: ConfigError."""
    try:
        return from_dict(KeepConfig, tomllib.loads(f"keep = {{ {text} }}")["keep"], "--keep")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f'{text!r} is no TOML ({error}); expected such as "latest = 2"'], "--keep") from None


def prune(
    folder: Place, keep: KeepConfig | None, *, set_aside: bool = False, dry_run: bool, take_lease: bool = False
) -> Pruned:
    """Delete the steps of a run that a policy no longer keeps; with `dry_run`, only say which.

    `set_aside`: also delete the steps that a rollback set aside, which no policy counts, and if `folder` is the run's
    own, the exports of these.
    Pinned steps, the step that the run resumed from, and steps with foreign files stay. The lease of the folder is held
    meanwhile. `take_lease` takes it from a process of another machine, whose end cannot be seen from here.
    Raises: CommitConflictError beside a live writer; SaveError; OSError; as find_checkpoints.
    """
    steps = steps_at(find_checkpoints(folder))
    if not dry_run:
        holder = steps.holder()
        if holder is not None and holder.may_live_elsewhere() and not take_lease:
            raise CommitConflictError(
                f"{steps.root}: {holder} writes here, and whether it has ended cannot be seen from this machine. Run "
                "this command there, or add --take-lease if it has ended: a live run that loses the lease stops saving"
            )
        steps.open()
    try:
        committed = steps.survey().steps
        expired = steps.expired(keep, resumed_from(step.manifest for step in committed))
        for step in expired if not dry_run else ():
            steps.remove(step)
        exports = exports_at(folder)
        aside: dict[str, int] = {}
        held: dict[str, str] = {}
        for found, remove in (
            (steps.set_aside(), steps.remove_set_aside),
            (exports.were_set_aside(), exports.remove_set_aside),
        ):
            aside |= found
            for name in found if set_aside else ():
                try:
                    remove(name, dry_run=dry_run)
                except CommitConflictError:
                    raise
                except SaveError as error:  # such as for a pin
                    held[name] = str(error)
        gone = {step.step for step in expired}
        return Pruned(
            str(steps.root),
            tuple(step.step for step in expired),
            tuple(step.step for step in committed if step.step not in gone),
            sum(file.num_bytes for step in expired for file in step.manifest.files),
            tuple(name for name in aside if name not in held),
            sum(num_bytes for name, num_bytes in aside.items() if name not in held),
            tuple(held.values()),
            () if dry_run else steps.left_over(),
        )
    finally:
        steps.close()


def pin(path: Place) -> int:
    """Keep a step whatever a policy says, and return its number.

    A run that deletes the step at the same time either sees the pin and leaves the step, or is first.
    Raises: SaveError, or CheckpointNotFoundError in a bucket, if the deletion was first; as committed_step.
    """
    steps, number = _step_at(path)
    folder = local_path(path)
    with contextlib.suppress(*(() if folder is None else (FileNotFoundError, CheckpointNotFoundError))):
        steps.pin(number)
    if folder is None:
        return number
    deadline = time.monotonic() + _SETTLE_SECONDS  # it was renamed away: with a pin it comes back
    while not os.path.lexists(folder / PIN_NAME):
        if time.monotonic() > deadline:
            raise SaveError(f"{path}: was deleted by its run before the pin; pin a step that is there")
        time.sleep(0.05)
    return number


def unpin(path: Place) -> int:
    """Let the policy decide about a step again, and return its number. Raises: OSError; as committed_step."""
    steps, number = _step_at(path)
    steps.unpin(number)
    return number


def _step_at(path: Place) -> tuple[Steps, int]:
    """Return the store of a step, and its number. Raises: NotACheckpointError; as committed_step."""
    if (folder := local_path(path)) is not None:
        return open_steps(Path(os.path.abspath(folder)).parent), committed_step(folder).step
    number = step_of(path.name)
    if number is None:
        raise NotACheckpointError(f"{path} is no step of titan_ckpt; name one, such as {path.parent / 'step-100'}")
    return steps_at(path.parent), number
