"""PosixSteps: the operations of the one process that changes a checkpoint folder. docs/format.md specifies them.

Owns how steps are started, committed, removed, set aside and pinned on a POSIX file system, the clean-up after
interrupted saves and deletions, and the lease that keeps a second writer out.
Knows no other ranks (`directory` handles them), no tensors and no file formats.

A step is committed by one rename of a complete, durable folder. Without the rename the save never happened; after it
the step never changes. A folder is deleted by a rename into `.trash`, a sync, and then its files, so that no reader
meets a half-deleted step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

import xxhash

from titan_ckpt.directory.lease import FileLease, Lease
from titan_ckpt.directory.manifest import MANIFEST_NAME, MAX_BYTES, Manifest
from titan_ckpt.directory.names import (
    ATTEMPT_NAME,
    NAME_IN_A_STEP,
    PIN_NAME,
    STAGING,
    TRASH,
    TRASHED_NAME,
    CommittedStep,
    Survey,
    inspect,
    is_set_aside_name,
    listed_steps,
    step_name,
    survey,
)
from titan_ckpt.directory.steps import NO_FOLDER, PROBE, SAME, Attempt, Steps, faults_of
from titan_ckpt.disk import posix
from titan_ckpt.errors import (
    CommitConflictError,
    CorruptCheckpointError,
    NotACheckpointError,
    PreflightError,
    SaveError,
)
from titan_ckpt.stores.store import may_pass, read_twice

logger = logging.getLogger(__name__)

VISIBLE_SECONDS = 30.0
"""Longest time that a rank may see an older listing than the others; network file systems cache for seconds."""
SPACE_FACTOR = 1.05
"""Free bytes required per byte of a save, for block rounding, the manifest, and files that others write meanwhile."""


class PosixSteps(Steps):
    """A folder of committed steps on a mounted file system, as its writer sees it."""

    lease_kind = FileLease

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root: Path = root
        self._inspected: dict[int, tuple[tuple[int, ...], CommittedStep]] = {}
        """The steps that retention has inspected, each beside what marks a change of its folder."""

    def step_path(self, step: int) -> Path:
        return self.root / step_name(step)

    def files_of(self, step: int) -> Path:
        return self.step_path(step)

    def attempt_at(self, step: int, attempt_id: str) -> Attempt:
        return Attempt(step, attempt_id, self.root / STAGING / f"{step_name(step)}.{attempt_id}")

    def survey(self) -> Survey:
        return survey(self.root)

    def look(self) -> Survey:
        nearest = next(path for path in (self.root, *self.root.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise NotACheckpointError(f"{nearest} is not a folder, so it cannot hold checkpoints; choose another path")
        return super().look()

    def exists(self, step: int) -> bool:
        return os.path.lexists(self.step_path(step))

    def view(self, manifest: Manifest, expected: bytes, names: Sequence[str]) -> tuple[str, Path]:
        path = self.step_path(manifest.step)
        try:
            content = read_twice(path / MANIFEST_NAME, lambda path: posix.read_whole(path, MAX_BYTES))
        except (CorruptCheckpointError, OSError) as error:
            if may_pass(error):
                raise
            return "nothing" if self.root.is_dir() else NO_FOLDER, path
        return SAME if content == expected else "another save", path

    def inspect(self, step: int) -> CommittedStep:
        path = self.step_path(step)
        try:
            return inspect(path, step)
        except (CorruptCheckpointError, OSError):
            if os.path.lexists(path):
                raise
        raise self._not_there(step, survey(self.root))

    def present(self) -> list[tuple[int, str]]:
        steps = listed_steps(self.root) if self.root.is_dir() else []
        found = [(step, _digest_of_manifest(self.step_path(step))) for step in steps]
        return [
            (step, digest) for step, digest in found if digest or self.exists(step)
        ]  # its writer may just remove one

    def _check(self, lease: Lease) -> None:
        lease.check()

    def _make_place(self, attempt: Attempt, num_bytes: int, seen: None) -> None:
        """Make the staging folder."""
        self._refuse_conflict(attempt.step)
        self._require_space(num_bytes)
        posix.mkdir(attempt.folder)

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Check what was written, write the manifest, and rename the folder: the rename is the commit.

        A failed fsync fails the attempt and is not tried again. Raises: SaveError; CommitConflictError; OSError.
        """
        assert self._lease is not None, "begin() comes first"
        self._lease.check()
        folder = attempt.folder
        _require_exactly(folder, manifest)
        posix.write_file(folder / MANIFEST_NAME, manifest.to_bytes())
        posix.fsync_folder(folder)
        posix.fsync_folder(folder.parent)
        self._lease.check()
        try:
            posix.rename_noreplace(folder, self.step_path(attempt.step))
            posix.fsync_folder(self.root)
        except BaseException as error:
            if (left := self._undo(attempt, manifest)) and isinstance(error, OSError):
                raise SaveError(left) from error
            raise

    def _abandon(self, attempt: Attempt) -> bool:
        if (folder := attempt.folder).exists():
            self._report(self._discard(folder, "dead"))
        return False

    def _for_retention(self) -> list[CommittedStep]:
        """Return the committed steps; inspect only those that are new or have changed since the last call.

        A save would otherwise ask for the size of every rank's file in every step that is kept.
        """
        inspected: dict[int, tuple[tuple[int, ...], CommittedStep]] = {}
        for step in listed_steps(self.root):
            path = self.step_path(step)
            with contextlib.suppress(CorruptCheckpointError, OSError):
                status = path.lstat()
                mark = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                if (before := self._inspected.get(step)) is not None and before[0] == mark:
                    inspected[step] = before
                else:
                    inspected[step] = mark, inspect(path, step)
        self._inspected = inspected
        return [step for _, step in inspected.values()]

    def remove(self, step: CommittedStep) -> None:
        """Delete a committed step. Raises: SaveError if it holds foreign files; CommitConflictError; OSError."""
        self.open().check()
        if step.foreign:
            raise SaveError(f"{step.path}: holds what is not ours: {', '.join(step.foreign)}. Take it out first")
        content = {MANIFEST_NAME, *(record.name for record in step.manifest.files)}
        self._report(self._discard(self.step_path(step.step), "removed", content))

    def set_aside(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in filter(is_set_aside_name, posix.list_folder(self.root)):
            folder = self.root / name
            files = folder.iterdir() if posix.is_real_folder(folder) else ()
            found[name] = sum(path.lstat().st_size for path in files)
        return found

    def remove_set_aside(self, name: str, *, dry_run: bool = False) -> None:
        folder = self.root / name
        _require_real(folder)
        names = posix.list_folder(folder)
        if foreign := [name for name in names if not NAME_IN_A_STEP.fullmatch(name)]:
            raise SaveError(f"{folder}: holds what is not ours: {', '.join(foreign)}. Take it out first")
        if not dry_run:
            self.open().check()
            self._report(self._discard(folder, "removed", names))

    def left_over(self) -> tuple[str, ...]:
        return tuple(posix.list_folder(self.root / TRASH))

    def pin(self, step: int) -> None:
        """Write a file PINNED into a step; a step that holds a foreign file never expires."""
        path = self.step_path(step)
        if PIN_NAME not in self.inspect(step).foreign:
            posix.write_file(path / PIN_NAME, b"")
            posix.fsync_folder(path)

    def unpin(self, step: int) -> None:
        """Delete the file PINNED."""
        if PIN_NAME in self.inspect(step).foreign:
            posix.unlink(self.step_path(step) / PIN_NAME)

    def begin_probe(self, num_bytes: int) -> str:
        self._require_space(num_bytes)
        name = f"step-0.{uuid.uuid4().hex}"
        posix.mkdir(self.root / STAGING / name)
        return name

    def write_probe(self, name: str, rank: int) -> None:
        try:
            posix.write_file(self.root / STAGING / name / f"probe-{rank:05d}", PROBE)
        except FileNotFoundError:
            raise PreflightError(
                f"{self.root}: rank {rank} on {socket.gethostname()} does not see what rank 0 makes there. The folder "
                "must be on a file system that all ranks share"
            ) from None

    def end_probe(self, name: str, world_size: int) -> None:
        """Sync, rename, read back and delete the files of all ranks. Raises: PreflightError; OSError."""
        staging = self.root / STAGING / name
        place = self.root / TRASH / f"preflight-{name}"
        posix.fsync_folder(staging)
        posix.fsync_folder(staging.parent)
        posix.rename_noreplace(staging, place)
        posix.fsync_folder(place.parent)
        posix.fsync_folder(self.root)
        contents = [posix.read_whole(place / name, len(PROBE)) for name in posix.list_folder(place)]
        problems = _emptied(place)
        self._check_probe(contents, world_size)
        if problems:
            raise PreflightError(f"{self.root}: a test save failed: {'; '.join(problems)}")

    def abandon_probe(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._discard(self.root / STAGING / name, "preflight")

    def _require_space(self, num_bytes: int) -> None:
        """Check the free space. Raises: PreflightError if less than 1.05 x `num_bytes` is free for this user."""
        status = os.statvfs(self.root)
        free = status.f_bavail * status.f_frsize
        wanted = int(num_bytes * SPACE_FACTOR)
        if status.f_blocks and free < wanted:  # without blocks the file system does not say, as ramfs
            failure = PreflightError(
                f"{self.root}: a save takes {_mib(num_bytes)} MiB and wants {_mib(wanted)} MiB free, found "
                f"{_mib(free)} MiB. Free some space, keep fewer steps, or choose another folder"
            )
            failure.errno = errno.ENOSPC
            raise failure

    def _recover(self, lease: Lease) -> None:
        for name in (STAGING, TRASH):
            self._make_own_folder(name)
        problems = []
        attempts, trashed = posix.list_folder(self.root / STAGING), posix.list_folder(self.root / TRASH)
        lease.check()  # after the lists: what is in them is not of a process that takes the lease later, and may save
        for name in attempts:
            folder = self.root / STAGING / name
            if ATTEMPT_NAME.fullmatch(name) and posix.is_real_folder(folder):
                logger.info("%s: discarding %s, a save that was interrupted", self.root, name)
                with contextlib.suppress(FileNotFoundError):  # the holder before us has just committed or deleted it
                    problems += self._discard(folder, "dead")
        for name in trashed:
            place = self.root / TRASH / name
            if TRASHED_NAME.fullmatch(name) and posix.is_real_folder(place):
                problems += _emptied(place)
        self._report(problems)

    def _discard(self, folder: Path, why: str, content: Collection[str] | None = None) -> list[str]:
        """Delete one of our folders; return one line per failure. The next `_recover` tries those again.

        `why` is "removed", "dead" or "preflight". `content`: the names that may be deleted; a folder that has come to
        hold another one stays.
        Raises: OSError if the folder could not be renamed; SaveError if it stays, as what a link leads to does.
        """
        _require_real(folder)
        place = self.root / TRASH / f"{why}-{folder.name.partition('.')[0]}.{uuid.uuid4().hex}"
        posix.rename_noreplace(folder, place)
        if content is not None and (foreign := [name for name in posix.list_folder(place) if name not in content]):
            posix.rename_noreplace(place, folder)
            raise SaveError(f"{folder}: holds what is not ours: {', '.join(foreign)}. Take it out first")
        posix.fsync_folder(place.parent)
        posix.fsync_folder(folder.parent)
        return _emptied(place)

    def _make_own_folder(self, name: str) -> None:
        path = self.root / name
        if not os.path.lexists(path):
            posix.make_folders(path)
        if not posix.is_real_folder(path) or path.stat().st_dev != self.root.stat().st_dev:
            raise PreflightError(
                f"{path}: must be a folder of its own on the file system of {self.root}, not a file, a link or a "
                "mount. Move it away"
            )

    def _set_aside_after(self, above: int, lease: Lease) -> None:
        """Rename them to `step-N.abandoned-<id>`. What has no manifest is not ours; damaged steps are."""
        folders = [self.step_path(step) for step in reversed(listed_steps(self.root)) if step > above]
        ours = [folder for folder in folders if posix.is_real_folder(folder) and (folder / MANIFEST_NAME).is_file()]
        lease.check()
        for folder in ours:
            aside = f"{folder.name}.abandoned-{uuid.uuid4().hex[:8]}"
            posix.rename_noreplace(folder, self.root / aside)
            logger.warning(
                "%s: set aside as %s, because this run went back to step %d. Retention does not delete it; "
                "`titan-ckpt prune RUN --set-aside` does", self.root, aside, above
            )  # fmt: skip
        if ours:
            posix.fsync_folder(self.root)

    def _refuse_conflict(self, step: int) -> None:
        path = self.step_path(step)
        newer = [n for n in listed_steps(self.root) if n > step and (self.step_path(n) / MANIFEST_NAME).is_file()]
        self._refuse_step_beside(step, newer)
        if not os.path.lexists(path):
            return
        try:
            inspect(path, step)
        except (CorruptCheckpointError, OSError) as error:
            raise CommitConflictError(f"{path} is in the way and is not a checkpoint: {error}. Move it away") from None
        self._refuse_step_beside(step, [step])

    def _undo(self, attempt: Attempt, manifest: Manifest) -> str:
        """Rename a step whose commit failed or was interrupted back into staging; return, and log, what is left.

        The rename may have failed because a successor has removed the attempt. Then the step that is there has another
        manifest, and stays: it is the successor's.
        """
        step = self.step_path(attempt.step)
        try:
            there = step / MANIFEST_NAME
            if os.path.lexists(there) and there.read_bytes() == manifest.to_bytes():
                posix.rename_noreplace(step, attempt.folder)
                posix.fsync_folder(self.root)
        except OSError as error:
            where = "may be there" if os.path.lexists(attempt.folder) else "is there, but may be gone"
            left = f"{step}: {where} after a power failure, because it could not be taken back: {error}"
            logger.warning("%s", left)
            return left
        return ""


def _digest_of_manifest(folder: Path) -> str:
    """Return what tells two saves of a step apart, "" without one; inodes change at any time on some FUSE mounts."""
    with contextlib.suppress(OSError):
        return xxhash.xxh3_128_hexdigest(posix.read_whole(folder / MANIFEST_NAME, MAX_BYTES))
    return ""


def _require_exactly(path: Path, manifest: Manifest) -> None:
    """Wait until this process sees the files that other ranks wrote.

    Raises: SaveError unless the folder then holds exactly the manifest's files in their sizes.
    """
    deadline = time.monotonic() + (VISIBLE_SECONDS if manifest.world_size > 1 else 0.0)
    while True:
        actual = {name: (path / name).lstat().st_size for name in posix.list_folder(path)}
        if not (faults := faults_of(manifest, actual, exactly=True)):
            return
        if time.monotonic() > deadline:
            raise SaveError(f"{path}: {'; '.join(faults)}")
        time.sleep(0.1)


def _require_real(folder: Path) -> None:
    """Raise SaveError for a link or a file that has the name of one of our folders: what it leads to is not ours.

    Raises: FileNotFoundError if there is nothing.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise SaveError(f"{folder}: is not a folder of its own, but a link or a file. Move it away")


def _emptied(place: Path) -> list[str]:
    """Unlink a trashed folder's files, manifest first, then the folder; return one line per failure."""
    stays = posix.remove_tree(place, first=MANIFEST_NAME, nested=False)
    return [f"{error.filename}: {error.strerror}" for error in stays]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
