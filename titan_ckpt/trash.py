"""Taking folders away so that nothing half-deleted is ever met: rename into `.trash`, sync, then unlink.

Owns deletion, setting aside, and what opening a checkpoint folder finds of saves and deletions that were interrupted.
The caller holds the lease. Decides nothing about which steps go.
"""

from __future__ import annotations

import logging
import stat
import uuid
from pathlib import Path

from titan_ckpt import posix
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.manifest import MANIFEST_NAME
from titan_ckpt.step_folders import (
    STAGING,
    TRASH,
    inspect,
    is_attempt_name,
    is_trashed_name,
    replaced_step_of,
    step_name,
    step_of,
)

logger = logging.getLogger(__name__)


def discard(root: Path, folder: Path, why: str) -> list[str]:
    """Delete one of our folders; return what could not be deleted, which the next opening tries again.

    `why` is "removed", "dead" or "preflight". Raises: OSError if the folder could not even be renamed.
    """
    place = root / TRASH / f"{why}-{_step_part(folder.name)}.{uuid.uuid4().hex}"
    posix.rename_noreplace(folder, place)
    posix.fsync_folder(root / TRASH)
    posix.fsync_folder(folder.parent)
    return empty(place)


def empty(place: Path) -> list[str]:
    """Unlink a trashed folder's files, manifest first, then the folder; return one line per failure."""
    problems: list[str] = []
    names = posix.list_folder(place)
    for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
        path = place / name
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                problems.append(f"{path}: a folder that is not ours")
            else:
                posix.unlink(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    if not problems:
        try:
            posix.rmdir(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
    return problems


def set_aside(root: Path, above: int) -> list[str]:
    """Rename every step above `above`, newest first, to `step-N.abandoned-<id>`; return the new names.

    Whole or not, they belong to a branch that a rollback left; folders without a manifest are not ours.
    """
    newer = [(step, name) for name in posix.list_folder(root) if (step := step_of(name)) is not None and step > above]
    renamed = []
    for step, name in sorted(newer, reverse=True):
        if not posix.is_real_folder(root / name) or not (root / name / MANIFEST_NAME).is_file():
            continue
        forget_replaced(root, step)
        aside = f"{name}.abandoned-{uuid.uuid4().hex[:8]}"
        posix.rename_noreplace(root / name, root / aside)
        renamed.append(aside)
    if renamed:
        posix.fsync_folder(root)
    return renamed


def forget_replaced(root: Path, step: int) -> None:
    """Make sure that no replaced version of a step comes back when the step itself goes."""
    forgotten = False
    for name in posix.list_folder(root / TRASH):
        if replaced_step_of(name) == step:
            posix.rename_noreplace(root / TRASH / name, root / TRASH / name.replace("replaced-", "removed-", 1))
            forgotten = True
    if forgotten:
        posix.fsync_folder(root / TRASH)


def recover(root: Path) -> list[str]:
    """Undo interrupted replacements, then clear away dead saves and deletions; return what could not be cleared."""
    _restore_replaced(root)
    problems = []
    for name in posix.list_folder(root / STAGING):
        if is_attempt_name(name) and posix.is_real_folder(root / STAGING / name):
            logger.info("%s: discarding %s, a save that was interrupted", root, name)
            problems += discard(root, root / STAGING / name, "dead")
    for name in posix.list_folder(root / TRASH):
        place = root / TRASH / name
        if is_trashed_name(name) and posix.is_real_folder(place) and not _only_version(root, place):
            problems += empty(place)
    return problems


def _only_version(root: Path, place: Path) -> bool:
    """Say whether this is a replaced step that is still needed: it could not be restored now, and may be later."""
    step = replaced_step_of(place.name)
    return step is not None and not (root / step_name(step)).exists() and (place / MANIFEST_NAME).exists()


def _restore_replaced(root: Path) -> None:
    """Put back each step that had been moved out of the way of one that never came."""
    found = []
    for name in posix.list_folder(root / TRASH):
        step = replaced_step_of(name)
        if step is None:
            continue
        try:
            found.append((inspect(root / TRASH / name, step).manifest.created_unix_seconds, step, name))
        except (CorruptCheckpointError, OSError) as error:
            logger.warning("%s: %s is not whole and is not restored: %s", root, name, error)
    for _, step, name in sorted(found, reverse=True):
        target = root / step_name(step)
        if not target.exists():
            logger.warning("%s: restoring step %d, whose replacement was interrupted", root, step)
            posix.rename_noreplace(root / TRASH / name, target)
            posix.fsync_folder(root)
            posix.fsync_folder(root / TRASH)


def _step_part(name: str) -> str:
    return name.partition(".")[0]
