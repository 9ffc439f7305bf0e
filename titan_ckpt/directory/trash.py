"""Deletion of folders: rename into `.trash`, sync, then unlink, so that no reader meets a half-deleted step.

Owns deletion, setting steps aside, and the clean-up after interrupted saves and deletions. The caller holds the lease
and decides which steps go.
"""

from __future__ import annotations

import logging
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from titan_ckpt.directory.manifest import MANIFEST_NAME
from titan_ckpt.directory.names import ATTEMPT_NAME, STAGING, TRASH, TRASHED_NAME, listed_steps, step_name
from titan_ckpt.disk import posix
from titan_ckpt.errors import SaveError

logger = logging.getLogger(__name__)


def discard(root: Path, folder: Path, why: str, content: Collection[str] | None = None) -> list[str]:
    """Delete one of our folders; return one line per failure. The next `recover` tries those again.

    `why` is "removed", "dead" or "preflight". `content`: the names that may be deleted; a folder that has come to hold
    another one stays.
    Raises: OSError if the folder could not be renamed; SaveError if it stays, as what a link leads to does.
    """
    require_real(folder)
    place = root / TRASH / f"{why}-{folder.name.partition('.')[0]}.{uuid.uuid4().hex}"
    posix.rename_noreplace(folder, place)
    if content is not None and (foreign := [name for name in posix.list_folder(place) if name not in content]):
        posix.rename_noreplace(place, folder)
        raise SaveError(f"{folder}: holds what is not ours: {', '.join(foreign)}. Take it out first")
    posix.fsync_folder(root / TRASH)
    posix.fsync_folder(folder.parent)
    return empty(place)


def require_real(folder: Path) -> None:
    """Raise SaveError for a link or a file that has the name of one of our folders: what it leads to is not ours.

    Raises: FileNotFoundError if there is nothing.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise SaveError(f"{folder}: is not a folder of its own, but a link or a file. Move it away")


def empty(place: Path) -> list[str]:
    """Unlink a trashed folder's files, manifest first, then the folder; return one line per failure."""
    stays = posix.remove_tree(place, first=MANIFEST_NAME, nested=False)
    return [f"{error.filename}: {error.strerror}" for error in stays]


def set_aside(root: Path, above: int, check: Callable[[], None]) -> Iterator[str]:
    """Rename every step above `above`, newest first, to `step-N.abandoned-<id>`; yield each new name.

    Damaged steps are renamed too: they belong to the branch that a rollback left. Folders without a manifest are not
    ours. `check`: as in `recover`.
    """
    folders = [(step, root / step_name(step)) for step in reversed(listed_steps(root)) if step > above]
    ours = [folder for _, folder in folders if posix.is_real_folder(folder) and (folder / MANIFEST_NAME).is_file()]
    check()
    for folder in ours:
        aside = f"{folder.name}.abandoned-{uuid.uuid4().hex[:8]}"
        posix.rename_noreplace(folder, root / aside)
        yield aside
    if ours:
        posix.fsync_folder(root)


def recover(root: Path, check: Callable[[], None]) -> list[str]:
    """Delete interrupted saves and finish interrupted deletions; return one line per failure.

    `check` raises if this process has lost the lease. It comes after the lists: what is in them is not of a process
    that takes the lease later, whose save may be under way.
    """
    problems = []
    attempts, trashed = posix.list_folder(root / STAGING), posix.list_folder(root / TRASH)
    check()
    for name in attempts:
        if ATTEMPT_NAME.fullmatch(name) and posix.is_real_folder(root / STAGING / name):
            logger.info("%s: discarding %s, a save that was interrupted", root, name)
            with suppress(FileNotFoundError):  # the holder before us has just committed it, or deleted it itself
                problems += discard(root, root / STAGING / name, "dead")
    for name in trashed:
        place = root / TRASH / name
        if TRASHED_NAME.fullmatch(name) and posix.is_real_folder(place):
            problems += empty(place)
    return problems
