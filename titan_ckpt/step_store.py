"""StepStore: the acts of the one process that changes a checkpoint folder. What they mean is docs/format.md.

Owns begin, commit, removal and pinning on a POSIX file system, and the lease that keeps a second writer out.
Knows no other ranks (`directory` speaks for them), no tensors and no file formats.

A step is committed by one rename of a complete, durable folder. Before it the save never happened; after it the step
never changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt import policy, posix, preflight, trash
from titan_ckpt.config import KeepConfig
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    NotACheckpointError,
    PreflightError,
    SaveError,
)
from titan_ckpt.lease import Lease
from titan_ckpt.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.step_folders import (
    PIN_NAME,
    STAGING,
    TRASH,
    CommittedStep,
    Survey,
    inspect,
    step_name,
    step_of,
    survey,
)

logger = logging.getLogger(__name__)

VISIBLE_SECONDS = 30.0
"""How long one rank may see an older listing than another: network file systems cache for seconds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save under way: every rank writes its files into `path`, which only `commit` makes a checkpoint."""

    step: int
    id: str
    path: Path


def attempt_at(root: Path, step: int, attempt_id: str) -> Attempt:
    """Return the attempt of this id; every rank finds the same folder."""
    return Attempt(step, attempt_id, root / STAGING / f"{step_name(step)}.{attempt_id}")


class StepStore:
    """A folder of committed steps, as its writer sees it. Nothing is touched before a method is called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lease: Lease | None = None
        self._protected: set[int] = set()
        self._rolled_back_to: int | None = None
        self._reported: set[tuple[str, str]] = set()

    def step_path(self, step: int) -> Path:
        """Return where a step is, or would be."""
        return self.root / step_name(step)

    def look(self) -> Survey:
        """Return what is there; log, once, what looks like a step and is none. Raises: NotACheckpointError; OSError.

        An interrupted replacement is undone first, so that its step is not missed, unless a living process is at it.
        """
        there = next(path for path in (self.root, *self.root.absolute().parents) if os.path.lexists(path))
        if not there.is_dir():
            raise NotACheckpointError(f"{there} is not a folder, so it cannot hold checkpoints; choose another path")
        found = survey(self.root)
        if self._lease is None and any(name.startswith(TRASH) for name, _ in found.rejected):
            with contextlib.suppress(CommitConflictError, OSError):
                self.open()
                self.close()
            found = survey(self.root)
        for name, reason in found.rejected:
            if (step_of(name) is not None or name.startswith(TRASH)) and (name, reason) not in self._reported:
                self._reported.add((name, reason))
                logger.warning("%s: %s is not a checkpoint that can be loaded: %s", self.root, name, reason)
        return found

    def inspect(self, step: int) -> CommittedStep:
        """Return one committed step. Raises: CheckpointNotFoundError; CorruptCheckpointError; OSError."""
        if not os.path.lexists(self.step_path(step)):
            steps = ", ".join(str(found.step) for found in survey(self.root).steps) or "none"
            raise CheckpointNotFoundError(f"{self.root}: step {step} is not there; committed steps: {steps}")
        return inspect(self.step_path(step), step)

    def open(self) -> Lease:
        """Take the lease, then undo or clear away what interrupted processes left; again: just return the lease.

        Raises: CommitConflictError; PreflightError; OSError.
        """
        if self._lease is None:
            posix.make_folders(self.root)
            lease = Lease.acquire(self.root)
            try:
                for name in (STAGING, TRASH):
                    self._make_own_folder(name)
                self._report(trash.recover(self.root))
            except BaseException:
                lease.release()
                raise
            self._lease = lease
        return self._lease

    def close(self) -> None:
        """Give the lease back; idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def resume_from(self, step: int) -> None:
        """Note that this run goes on from `step`; the next `begin` sets newer ones aside."""
        self._protected = {step}
        self._rolled_back_to = step

    def begin(self, step: int, num_bytes: int, replace: bool) -> Attempt:
        """Make the staging folder of a save of `num_bytes`. Raises: CommitConflictError; PreflightError; OSError."""
        self.open().check()
        self._leave_abandoned_branch()
        self._refuse_conflict(step, replace)
        preflight.require_space(self.root, num_bytes)
        attempt = attempt_at(self.root, step, uuid.uuid4().hex)
        posix.mkdir(attempt.path)
        return attempt

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Check what was written, seal it, move an old version away, and rename: the rename is the commit.

        A failed fsync is not tried again: the attempt fails. Raises: SaveError; CommitConflictError; OSError.
        """
        assert self._lease is not None, "begin() comes first"
        self._lease.check()
        _require_exactly(attempt.path, manifest)
        posix.write_file(attempt.path / MANIFEST_NAME, manifest.to_bytes())
        posix.fsync_folder(attempt.path)
        posix.fsync_folder(attempt.path.parent)
        self._lease.check()
        replaced = self._move_old_version(attempt)
        target = self.step_path(attempt.step)
        moved = False
        try:
            posix.rename_noreplace(attempt.path, target)
            moved = True
            posix.fsync_folder(self.root)
        except BaseException:
            self._undo(attempt, target if moved else None, replaced)
            raise
        if replaced is not None:
            self._report(trash.empty(replaced))
            with contextlib.suppress(OSError):
                posix.fsync_folder(replaced.parent)

    def abandon(self, attempt: Attempt) -> None:
        """Remove an attempt that will not be committed, as far as possible."""
        if attempt.path.exists():
            try:
                self._report(trash.discard(self.root, attempt.path, "dead"))
            except OSError as error:
                self._report([f"{attempt.path}: {error.strerror}"])

    def expired(self, keep: KeepConfig | None, protected: AbstractSet[int]) -> list[CommittedStep]:
        """Return the committed steps that the policy no longer keeps, weights-only ones counted apart.

        The one resumed from stays, and so does every step with something foreign, such as a pin, in it.
        """
        if keep is None:
            return []
        found = survey(self.root).steps
        stay = self._protected | protected | {step.step for step in found if step.foreign}
        expired: list[CommittedStep] = []
        for weights_only in (False, True):
            group = {step.step: step for step in found if (step.manifest.kind == "model") is weights_only}
            facts = {n: policy.StepFacts(s.manifest.created_unix_seconds, s.manifest.metrics) for n, s in group.items()}
            expired += [group[step] for step in policy.expired_steps(sorted(group), keep, stay, facts)]
        return expired

    def expire(self, keep: KeepConfig | None, protected: AbstractSet[int]) -> list[int]:
        """Delete expired steps; return those gone. Failures are logged, and tried again at the next opening."""
        gone: list[int] = []
        try:
            for step in self.expired(keep, protected):
                self.remove(step)
                gone.append(step.step)
        except (OSError, CheckpointError) as error:
            self._report([f"expired steps: {error}"])
        return gone

    def remove(self, step: CommittedStep) -> None:
        """Delete a committed step. Raises: SaveError where it holds foreign files; CommitConflictError; OSError."""
        self.open().check()
        if step.foreign:
            raise SaveError(f"{step.path}: holds what is not ours: {', '.join(step.foreign)}. Take it out first")
        trash.forget_replaced(self.root, step.step)
        self._report(trash.discard(self.root, step.path, "removed"))

    def pin(self, step: int) -> None:
        """Put a file PINNED into a step: what holds anything foreign is never expired."""
        if PIN_NAME not in self.inspect(step).foreign:
            posix.write_file(self.step_path(step) / PIN_NAME, b"")
            posix.fsync_folder(self.step_path(step))

    def unpin(self, step: int) -> None:
        """Delete the file PINNED."""
        if PIN_NAME in self.inspect(step).foreign:
            posix.unlink(self.step_path(step) / PIN_NAME)

    def _make_own_folder(self, name: str) -> None:
        path = self.root / name
        if not os.path.lexists(path):
            posix.make_folders(path)
        if not posix.is_real_folder(path) or path.stat().st_dev != self.root.stat().st_dev:
            raise PreflightError(
                f"{path}: must be a folder of its own on the file system of {self.root}, not a file, a link or a "
                "mount. Move it away"
            )

    def _leave_abandoned_branch(self) -> None:
        step = self._rolled_back_to
        if step is not None:
            for name in trash.set_aside(self.root, step):
                logger.warning("%s: set aside as %s: this run went back to step %d", self.root, name, step)
        self._rolled_back_to = None  # not before: what could not be renamed now is tried again by the next save

    def _refuse_conflict(self, step: int, replace: bool) -> None:
        path = self.step_path(step)
        steps = [found for name in posix.list_folder(self.root) if (found := step_of(name)) is not None]
        newer = [found for found in steps if found > step and (self.step_path(found) / MANIFEST_NAME).is_file()]
        if newer:
            raise CommitConflictError(
                f"{self.root}: step {step} would be older than step {max(newer)}, which is there and which this run "
                "does not go on from. Load a step first, or save to another folder"
            )
        if not os.path.lexists(path):
            return
        try:
            inspect(path, step)
        except (CorruptCheckpointError, OSError) as error:
            raise CommitConflictError(f"{path} is in the way and is not a checkpoint: {error}. Move it away") from None
        if not replace:
            raise CommitConflictError(f"{path}: step {step} is committed already, and committed steps do not change")

    def _move_old_version(self, attempt: Attempt) -> Path | None:
        """Make way for a replacement. From here to the rename an interruption is undone by the next opening."""
        target = self.step_path(attempt.step)
        if not target.exists():
            return None
        replaced = self.root / TRASH / f"replaced-{attempt.path.name}"
        posix.rename_noreplace(target, replaced)
        try:
            posix.fsync_folder(replaced.parent)
            posix.fsync_folder(self.root)
        except BaseException:
            self._undo(attempt, None, replaced)
            raise
        return replaced

    def _undo(self, attempt: Attempt, published: Path | None, replaced: Path | None) -> None:
        """Put things back after a failed commit, as far as possible; the next opening does what cannot be done now."""
        try:
            if published is not None:
                posix.rename_noreplace(published, attempt.path)
            if replaced is not None:
                posix.rename_noreplace(replaced, self.step_path(attempt.step))
            posix.fsync_folder(self.root)
        except OSError as error:
            self._report([f"step {attempt.step}: {error}"])

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            logger.warning("%s: left for the next opening: %s", self.root, problem)


def _require_exactly(path: Path, manifest: Manifest) -> None:
    """Wait for what other ranks wrote to be seen from here, too.

    Raises: SaveError unless the folder then holds the manifest's files in their sizes, and nothing else.
    """
    deadline = time.monotonic() + (VISIBLE_SECONDS if manifest.world_size > 1 else 0.0)
    while faults := _faults(path, manifest):
        if time.monotonic() > deadline:
            raise SaveError(f"{path}: {'; '.join(faults)}")
        time.sleep(0.1)


def _faults(path: Path, manifest: Manifest) -> list[str]:
    expected = {record.name: record.num_bytes for record in manifest.files}
    found = {name: (path / name).lstat().st_size for name in posix.list_folder(path)}
    missing = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    foreign = [f"{name} is not expected" for name in sorted(found.keys() - expected.keys())]
    sizes = [
        f"{name} has {found[name]} bytes, {size} were written"
        for name, size in expected.items()
        if found.get(name, size) != size
    ]
    return [*missing, *foreign, *sizes]
