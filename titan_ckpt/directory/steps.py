"""Steps: what a checkpoint folder's writer and readers need of the place where it is.

Owns the rules that hold in any place: how a save begins, which steps expire, and what a run has rolled back to; and the
choice how a commit is made: `posix_steps` keeps steps on a mounted file system, `bucket_steps` in a bucket. Knows no
other ranks (`directory` handles them) and no tensors.
"""

from __future__ import annotations

import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.lease import Lease, refuse_living
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.directory.names import CommittedStep, Survey, step_name, step_of
from titan_ckpt.directory.retention import StepFacts, expired_steps, lacks_metric
from titan_ckpt.disk.kernel import Holder
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, CommitConflictError, PreflightError
from titan_ckpt.stores.objects import object_path
from titan_ckpt.stores.store import Place, local_path

logger = logging.getLogger(__name__)

SAME = "the save that rank 0 sees"
NO_FOLDER = "no such folder"
"""How a process sees a step if even the folder of all steps is not there."""
PROBE = bytes(range(256)) * 16
"""Each rank writes these bytes in a test save."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save in progress: every rank writes its files into `path`, and `commit` makes it a checkpoint."""

    step: int
    id: str
    path: Place

    @property
    def folder(self) -> Path:
        """Return `path` on a mounted file system."""
        assert isinstance(self.path, Path)
        return self.path


class Steps(ABC):
    """The committed steps of one place, as its writer sees them. Building the object touches nothing."""

    root: Any
    lease_kind: ClassVar[type[Lease]]

    def __init__(self) -> None:
        self._lease: Any = None
        self._protected: set[int] = set()
        self._rolled_back_to: int | None = None
        self._reported: set[tuple[str, str]] = set()
        self._has_leftovers = False
        """Whether something could not be deleted, or may still arrive in a bucket; the next save looks for it."""
        self._in_doubt: set[str] = set()
        """Ids of own attempts whose commit was sent, and of which it is not known whether it has arrived."""

    def step_path(self, step: int) -> Place:
        """Return the name of a step for users, whether or not it exists."""
        path: Place = self.root / step_name(step)
        return path

    @abstractmethod
    def files_of(self, step: int) -> Place:
        """Return where the files of a committed step are. Raises: as `inspect`, where only its commit says that."""

    @abstractmethod
    def attempt_at(self, step: int, attempt_id: str) -> Attempt:
        """Return the attempt with this id; its path is the same on every rank."""

    @abstractmethod
    def survey(self) -> Survey:
        """Return the committed steps, and what only looks like one. Raises: OSError."""

    @abstractmethod
    def inspect(self, step: int) -> CommittedStep:
        """Return one committed step. Raises: CheckpointNotFoundError; CorruptCheckpointError; OSError."""

    @abstractmethod
    def exists(self, step: int) -> bool:
        """Return whether a step is there, whatever is in it."""

    @abstractmethod
    def view(self, manifest: Manifest, expected: bytes, names: Sequence[str]) -> tuple[str, Place]:
        """Return how this process sees a step whose manifest is `expected` to rank 0, and where its files are.

        The first is SAME, NO_FOLDER or a description. `names`: as in `CheckpointDirectory.committed`.
        Raises: StoreError for a bucket that does not answer, which says nothing about the step.
        """

    def holder(self) -> Holder | None:
        """Return the process that the lease names, alive or not; None without one. Raises: OSError."""
        return self.lease_kind.named_in(self.root)

    def refuse_living_writer(self) -> None:
        """Check that no process is known to write here. Raises: CommitConflictError naming it; OSError."""
        if self._lease is None and (holder := self.holder()) is not None:
            refuse_living(self.root, self.lease_kind.at(self.root), holder)

    @abstractmethod
    def present(self) -> list[tuple[int, str]]:
        """Return (step, id) of all that has the place of a step, ascending; a step that is saved again has a new id."""

    def open(self) -> Lease:
        """Take the lease and clear away what interrupted processes left; a second call only returns the lease.

        Raises: CommitConflictError; PreflightError; OSError.
        """
        lease: Lease | None = self._lease
        if lease is None:
            lease = self.lease_kind(self.root)
            try:
                lease.take()
                self._recover(lease)
                self._lease = lease
            except BaseException:
                self._lease = None
                lease.release()
                raise
        return lease

    @abstractmethod
    def _recover(self, lease: Lease) -> None:
        """Clear away what interrupted processes left. Raises: CommitConflictError if the lease is lost; OSError."""

    def close(self) -> None:
        """Give the lease back; idempotent."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None  # only now: an interrupt may come before

    def leave_abandoned_branch(self) -> None:
        """Set aside the steps after the one that this run went back to, damaged ones, too.

        Raises: CommitConflictError if another process has taken the lease, whose steps these may be; OSError.
        """
        if self._rolled_back_to is not None:
            self._set_aside_after(self._rolled_back_to, self.open())
        self._rolled_back_to = None  # only now: if one stays in place, the next save tries it again

    @abstractmethod
    def _set_aside_after(self, above: int, lease: Lease) -> None:
        """Set aside every step after `above`, newest first, and log it. Raises: CommitConflictError; OSError."""

    def begin(self, step: int, num_bytes: int) -> Attempt:
        """Start a save of `num_bytes`. Raises: CommitConflictError; PreflightError; OSError."""
        lease = self.open()
        attempt = self.attempt_at(step, uuid.uuid4().hex)
        seen = self._check(lease)
        if self._has_leftovers or self._in_doubt:
            self._has_leftovers = False
            try:
                self._recover(lease)
            except BaseException as error:
                self._has_leftovers = True  # also after an interrupt, and where it refused to delete
                if not isinstance(error, OSError) or isinstance(error, CommitConflictError):
                    raise
                self._report([f"leftovers: {error}"])
                if self._in_doubt:  # a commit that arrives later could be of the step that is saved now
                    raise
        self.leave_abandoned_branch()
        self._make_place(attempt, num_bytes, seen)
        return attempt

    @abstractmethod
    def _check(self, lease: Lease) -> Any:
        """Check the lease, and return what was seen meanwhile. Raises: CommitConflictError; OSError."""

    @abstractmethod
    def _make_place(self, attempt: Attempt, num_bytes: int, seen: Any) -> None:
        """Make the place of an attempt, unless a step is in its way. `seen`: by `_check`. Raises: as `begin`."""

    @abstractmethod
    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Make a whole attempt a committed step. Raises: SaveError; CommitConflictError; OSError."""

    def abandon(self, attempt: Attempt) -> bool:
        """Remove an attempt that is not committed, as far as possible; return whether it turns out to be committed."""
        try:
            return self._abandon(attempt)
        except OSError as error:
            self._report([f"{attempt.path}: {error}"])
            return False

    @abstractmethod
    def _abandon(self, attempt: Attempt) -> bool:
        """Do so. Raises: OSError."""

    @abstractmethod
    def remove(self, step: CommittedStep) -> None:
        """Delete a committed step. Raises: SaveError if it is pinned; CommitConflictError; OSError."""

    @abstractmethod
    def set_aside(self) -> dict[str, int]:
        """Return the names of the steps that a rollback set aside, and how many bytes each has. Raises: OSError."""

    @abstractmethod
    def remove_set_aside(self, name: str, *, dry_run: bool = False) -> None:
        """Delete a step that was set aside, damaged or not; with `dry_run` only check that it may be deleted.

        Raises: SaveError if it is pinned or holds foreign files; CommitConflictError; OSError.
        """

    @abstractmethod
    def left_over(self) -> tuple[str, ...]:
        """Return the names of what could not be deleted whole."""

    @abstractmethod
    def pin(self, step: int) -> None:
        """Keep a step from expiring. A run that deletes it at the same time either leaves it, or is first.

        Raises: SaveError or CheckpointNotFoundError if the deletion was first; as `inspect`.
        """

    @abstractmethod
    def unpin(self, step: int) -> None:
        """Let a pinned step expire again."""

    @abstractmethod
    def begin_probe(self, num_bytes: int) -> str:
        """Rank 0: check that saves of `num_bytes` fit, and start a test save; return its name, "" if none is needed.

        Raises: PreflightError; OSError.
        """

    @abstractmethod
    def write_probe(self, name: str, rank: int) -> None:
        """Every rank: write a little. Raises: PreflightError; OSError."""

    @abstractmethod
    def end_probe(self, name: str, world_size: int) -> None:
        """Rank 0: read back and delete what all ranks wrote. Raises: PreflightError; OSError."""

    @abstractmethod
    def abandon_probe(self, name: str) -> None:
        """Rank 0: remove a failed test save, as far as possible."""

    def _check_probe(self, contents: list[bytes], world_size: int) -> None:
        """Raise PreflightError unless every rank's bytes of a test save came back."""
        if contents != [PROBE] * world_size:
            count = contents.count(PROBE)
            raise PreflightError(f"{self.root}: a test save failed: {count} of {world_size} ranks' bytes came back")

    def look(self) -> Survey:
        """Return the survey; log once every `step-N` that is not a committed step.

        Raises: NotACheckpointError; OSError.
        """
        seen = self.survey()
        for name, reason in seen.rejected:
            if step_of(name) is not None and (name, reason) not in self._reported:
                self._reported.add((name, reason))
                logger.warning("%s: %s is not a checkpoint that can be loaded: %s", self.root, name, reason)
        return seen

    def dcp_steps(self) -> list[int]:
        """Return the steps that torchtitan saved here, ascending. Raises: as `look`."""
        return [*self.look().dcp]

    def resume_from(self, step: int) -> None:
        """Record that this run continues from `step`; the next `begin` sets newer steps aside."""
        self._protected = {step}
        self._rolled_back_to = step

    def expired(self, keep: KeepConfig | None, protected: AbstractSet[int] = frozenset()) -> list[CommittedStep]:
        """Return the committed steps that the policy no longer keeps; weights-only steps are counted apart.

        The step resumed from stays, and so does every step that holds a foreign file, such as a pin.
        """
        if keep is None:
            return []
        steps = self._for_retention()
        stay = self._protected | protected | {step.step for step in steps if step.foreign}
        expired: list[CommittedStep] = []
        for weights_only in (False, True):
            group = {step.step: step for step in steps if (step.manifest.kind == "model") is weights_only}
            facts = {n: StepFacts(s.manifest.created_unix_seconds, s.manifest.metrics) for n, s in group.items()}
            if lacks_metric(keep, facts.values()) and len(group) > (keep.latest or 1):
                self._report_metric(keep.metric_name, facts.values())
            expired += [group[step] for step in expired_steps(sorted(group), keep, stay, facts)]
        return expired

    def _report_metric(self, metric: str, facts: Iterable[StepFacts]) -> None:
        """Log once that no save has the metric that retention compares, and which metrics saves have."""
        if ("metric", metric) not in self._reported:
            self._reported.add(("metric", metric))
            logger.warning(
                "%s: no save has had %s so far, by which keep.best chooses, so no step expires; the metrics are %s",
                self.root,
                metric,
                ", ".join(sorted({name for of_step in facts for name in of_step.metrics})) or "no metrics",
            )

    def _for_retention(self) -> Sequence[CommittedStep]:
        """Return the committed steps, ascending. Raises: OSError."""
        return self.survey().steps

    def expire(self, keep: KeepConfig | None) -> list[int]:
        """Delete expired steps and return them. Failures are logged and tried again when the folder is next opened."""
        gone: list[int] = []
        try:
            for step in self.expired(keep):
                self.remove(step)
                gone.append(step.step)
        except (OSError, CheckpointError) as error:
            self._report([f"expired steps: {error}"])
        return gone

    def _not_there(self, step: int, seen: Survey) -> CheckpointNotFoundError:
        steps = ", ".join(str(committed.step) for committed in seen.steps) or "none"
        return CheckpointNotFoundError(f"{self.root}: step {step} is not there; committed steps: {steps}")

    def _refuse_step_beside(self, step: int, committed: list[int]) -> None:
        """Raise CommitConflictError if a committed step is newer, or is this one."""
        if newer := [n for n in committed if n > step]:
            raise CommitConflictError(
                f"{self.root}: step {step} would be older than step {max(newer)}, which is there and which this run "
                "does not go on from. Load a step first, or save to another folder"
            )
        if step in committed:
            raise CommitConflictError(
                f"{self.step_path(step)}: step {step} is committed already, and committed steps do not change"
            )

    def _report(self, problems: list[str]) -> None:
        self._has_leftovers |= bool(problems)
        for problem in problems:
            logger.warning("%s: left for the next save: %s", self.root, problem)


def steps_at(root: Place) -> Steps:
    """Return the steps of a place, by the name that it is given; nothing is touched, and no torch is imported."""
    if (folder := local_path(root)) is not None:
        from titan_ckpt.directory.posix_steps import PosixSteps

        return PosixSteps(folder)
    from titan_ckpt.directory.bucket_steps import BucketSteps

    return BucketSteps(object_path(root))


def open_steps(root: Place) -> Steps:
    """Return the steps of a place, by its absolute name. Raises: ConfigError for a Path that is a URI."""
    folder = local_path(root)
    require_local({"root": folder})
    return steps_at(root if folder is None else Path(os.path.abspath(folder)))


def faults_of(manifest: Manifest, actual: Mapping[str, int], *, exactly: bool = False) -> list[str]:
    """Return the differences of an attempt's files from its manifest; `exactly`: also files that it does not list.

    `actual`: the size of each file.
    """
    expected = {record.name: record.num_bytes for record in manifest.files}
    faults = [f"{name} is missing" for name in sorted(expected.keys() - actual.keys())]
    if exactly:
        faults += [f"{name} is not expected" for name in sorted(actual.keys() - expected.keys())]
    return faults + [
        f"{name} has {actual[name]} bytes, {size} were written"
        for name, size in expected.items()
        if actual.get(name, size) != size
    ]
