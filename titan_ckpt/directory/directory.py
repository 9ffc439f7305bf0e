"""CheckpointDirectory: the committed steps of a run, the same for all of its ranks.

Owns the agreement between ranks: rank 0 alone reads, decides and changes the folder (`Steps`), and every rank gets
its result or its error. Knows no tensors and no file formats. docs/format.md specifies the files on disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from titan_ckpt.config import KeepConfig
from titan_ckpt.directory import posix_steps
from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.directory.names import CommittedStep, step_name, step_of
from titan_ckpt.directory.steps import NO_FOLDER, SAME, Attempt, open_steps
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PreflightError,
    SaveError,
)
from titan_ckpt.stores.store import Place

logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")  # JSON


class CheckpointDirectory:
    """Committed steps, in a folder or in a bucket.

    Methods are collective unless they say otherwise; one thread uses the object at a time.
    Reading changes nothing. The first `begin` or `preflight` takes the lease and deletes the folders that
    interrupted processes left.
    """

    def __init__(self, root: Place, coordinator: Coordinator) -> None:
        """Bind to a place, which need not exist; nothing is touched. Raises: ConfigError for a Path that is a URI."""
        self._coordinator = coordinator
        self._store = open_steps(root)
        self._listed: dict[int, CommittedStep] = {}
        """On rank 0, the steps that `steps` has found last."""
        self._listed_dcp: list[int] = []
        """The steps of torchtitan's that `candidates` has found last."""
        self.root = self._store.root

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, and those that could not be read: whoever opens one gets its error.

        Raises: CorruptCheckpointError if there is no committed step but content that looks like one, because a fresh
        start beside it would hide a loss; NotACheckpointError if the path is a file.
        """
        return self._look()[0]

    def candidates(self) -> list[int]:
        """Return the steps that a run may resume, ascending: `steps`, and those that torchtitan saved here.

        Raises: as `steps`.
        """
        own, self._listed_dcp = self._look()
        return sorted({*own, *self._listed_dcp})

    def is_dcp(self, step: int, *, as_listed: bool = False) -> bool:
        """Return whether torchtitan saved a step in this folder; such steps never expire here.

        `as_listed`: `candidates` was called just before, so that nobody need look once more.
        """
        return step in (self._listed_dcp if as_listed else self._on_rank_0("dcp steps", self._store.dcp_steps))

    def _look(self) -> tuple[list[int], list[int]]:
        """Return what `steps` returns, and the steps of torchtitan's, both ascending. Raises: as `steps`."""

        def look() -> list[list[int]]:
            survey = self._store.look()
            if survey.rejected and not survey.steps and not survey.dcp and not survey.unread:
                raise CorruptCheckpointError(
                    f"{self.root} holds no checkpoint that can be loaded, but content that looks like one:"
                    f"{survey.explain()}\n  Repair it, name it in [[checkpoint.initial_load]], move it away, or choose "
                    "another folder: a run is not started afresh beside it",
                    str(self.root),
                )
            self._listed = {step.step: step for step in survey.steps}
            return [sorted({*self._listed, *survey.unread}), sorted(survey.dcp)]

        own, dcp = self._on_rank_0("steps", look)
        return own, dcp

    def blocked_after(self, step: int) -> list[str]:
        """Return the names of folders, torchtitan's or broken ones, that are in the way of steps after `step`."""

        def look() -> list[str]:
            survey = self._store.look()
            broken = [name for name, _ in survey.rejected if (step_of(name) or 0) > step]
            return broken + [step_name(n) for n in survey.dcp if n > step]

        return self._on_rank_0("blocked steps", look)

    def committed(self, step: int, names: Sequence[str] = (), *, as_listed: bool = False) -> tuple[Manifest, Place]:
        """Return a committed step's manifest and where its files are, when every rank sees the same save of that step.

        `names`: the files that this rank will open. In a bucket they are asked for beside the manifest, so that nobody
        waits for one after the other; the place that is returned knows them, or their heads.
        `as_listed`: `steps` was called just before, so that rank 0 need not look for the step once more. Every rank
        reads the manifest all the same.
        Raises: CheckpointNotFoundError, also if the step is deleted meanwhile; CorruptCheckpointError, naming a rank
        that sees a different save.
        """

        def look() -> str:
            listed, self._listed = self._listed, {}
            found = listed.get(step) if as_listed else None
            return (found or self._store.inspect(step)).manifest_bytes.decode()

        text = self._on_rank_0(f"manifest of step {step}", look)
        manifest = Manifest.from_bytes(text.encode(), str(self.step_path(step) / MANIFEST_NAME))
        return manifest, self._await_same_view(manifest, text.encode(), names)

    def exists(self, step: int) -> bool:
        """Return whether a step's folder is there, whatever is in it."""
        return self._on_rank_0(f"has step {step}", lambda: self._store.exists(step))

    def exists_here(self, step: int) -> bool:
        """Return whether this rank sees a step. Not collective."""
        return self._store.exists(step)

    def step_path(self, step: int) -> Place:
        """Return the name of a step, whether or not it exists. Not collective."""
        return self._store.step_path(step)

    def resume_from(self, step: int) -> None:
        """Record that this run continues from `step`: it never expires, and newer steps are an abandoned branch.

        The next `begin` sets those aside, so that only loading an old step changes nothing. Not collective.
        """
        self._store.resume_from(step)

    def leave_abandoned_branch(self) -> None:
        """Set aside the steps after the one that this run went back to, as the next `begin` would. Collective.

        Raises: CommitConflictError; PreflightError; PeerError.
        """
        what = f"{self.root}: newer steps are not set aside"
        self._on_rank_0("leave branch", self._store.leave_abandoned_branch, SaveError, what)

    def present(self) -> list[tuple[int, str]]:
        """Return what `claim` compares: (step, id) of all that has the place of a step.

        Raises: CommitConflictError if another process is known to write here.
        """

        def look() -> list[tuple[int, str]]:
            self._store.refuse_living_writer()
            return self._store.present()

        return [(step, id_) for step, id_ in self._on_rank_0("present steps", look)]

    def claim(self, before: Sequence[tuple[int, str]]) -> bool:
        """Take the lease, and return whether steps have come, gone or changed since `present` returned `before`.

        Afterwards no other process commits a step here, unless it takes the lease.
        Raises: PreflightError; CommitConflictError; PeerError.
        """

        def act() -> bool:
            self._store.open()
            return self._store.present() != before

        return self._on_rank_0("lease", act, PreflightError, self._no_saves)

    @property
    def _no_saves(self) -> str:
        return f"{self.root}: saves cannot work here"

    def preflight(self, num_bytes: int) -> None:
        """Check that saves can work in this folder: the lease, space for all ranks' `num_bytes`, and a tiny real save.

        1. All ranks tell their bytes. 2. Rank 0 checks the space and makes a folder. 3. All ranks write into it.
        4. Rank 0 renames it, reads it back and deletes it.
        Raises: PreflightError; CommitConflictError; PeerError.
        """
        sizes: list[Any] = self._coordinator.gather("preflight bytes", num_bytes)
        what = self._no_saves

        name = ""

        def begin() -> str:
            nonlocal name
            self._store.open()
            name = self._store.begin_probe(sum(sizes))
            return name

        def write() -> None:
            with os_errors_as(PreflightError, what):
                self._store.write_probe(name, self._coordinator.rank)

        try:
            name = self._on_rank_0("preflight", begin, PreflightError, what)
            if not name:
                return
            self._coordinator.together("preflight write", write)
            ranks = self._coordinator.world_size
            self._on_rank_0("preflight end", lambda: self._store.end_probe(name, ranks), PreflightError, what)
        except BaseException:
            if self._coordinator.rank == 0 and name:
                self._store.abandon_probe(name)
            raise

    def begin(self, step: int, num_bytes: int = 0) -> Attempt:
        """Start a save: 1. all ranks tell their bytes, 2. rank 0 makes the staging folder, 3. all learn its name.

        Raises: CommitConflictError; PreflightError for lack of space; SaveError; PeerError.
        """
        sizes: list[Any] = self._coordinator.gather(f"begin step {step}", num_bytes)
        begun: list[Attempt] = []

        def start() -> str:
            begun.append(self._store.begin(step, sum(sizes)))
            return begun[0].id

        what = f"{self.root}: step {step} cannot be saved"
        try:
            attempt_id = self._on_rank_0(f"staging of step {step}", start, SaveError, what)
        except BaseException:  # another rank may be lost, which will never write into the folder
            for attempt in begun:
                self._store.abandon(attempt)
            raise
        return self._store.attempt_at(step, attempt_id)

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Make the attempt a committed step; every rank's files are durable and rank 0's `manifest` lists them.

        When this returns, the step survives a power failure. When it raises, the attempt is gone and nothing else has
        changed; but a bucket that stopped answering for good may have committed it, and a folder that can neither be
        synced nor renamed back stays, which the error says.
        Raises: SaveError naming files that are missing, unexpected or of a wrong size; CommitConflictError; PeerError.
        """
        assert (manifest.step, manifest.attempt) == (attempt.step, attempt.id)

        def finish() -> None:
            try:
                self._store.commit(attempt, manifest)
            except BaseException as error:
                if not (self._store.abandon(attempt) and isinstance(error, Exception)):
                    raise
                logger.warning("%s: is committed, although the answer was lost: %s", attempt.path, error)

        what = f"{self.root}: step {attempt.step} was not saved"
        self._on_rank_0(f"commit of step {attempt.step}", finish, SaveError, what)

    def abandon(self, attempt: Attempt) -> None:
        """Remove an attempt that will not be committed, as far as possible. Not collective: rank 0 acts."""
        if self._coordinator.rank == 0:
            self._store.abandon(attempt)

    def expire(self, keep: KeepConfig | None) -> list[int]:
        """Delete the committed steps that the policy no longer keeps; return them on rank 0. Not collective.

        Only committed steps count, weights-only ones apart from those that a run can resume from. Pinned steps, the
        step resumed from and steps with foreign files stay. Never raises, because the save before it is committed.
        """
        return self._store.expire(keep) if self._coordinator.rank == 0 else []

    def close(self) -> None:
        """Give the lease back. Not collective; idempotent."""
        self._store.close()

    def _on_rank_0(
        self, tag: str, act: Callable[[], _Value], error_type: type[SaveError] | None = None, what: str = ""
    ) -> _Value:
        """Run `act` on rank 0 and give its value or its error to every rank; an OSError becomes `error_type`."""

        def translated() -> _Value:
            with os_errors_as(error_type, what):
                return act()

        return self._coordinator.on_rank_0(tag, translated)

    def _await_same_view(self, manifest: Manifest, expected: bytes, names: Sequence[str]) -> Place:
        """Wait until every rank sees the save that rank 0 chose: network file systems cache listings for seconds.

        A rank that does not even see the folder has another disk there, and is not waited for. That ranks see different
        saves is no damage of the step: no older one is loaded in its place.
        Return where its files are.
        Raises: CheckpointNotFoundError; StoreError, and PeerError on the other ranks.
        """
        deadline = time.monotonic() + posix_steps.VISIBLE_SECONDS
        step, path = manifest.step, self.step_path(manifest.step)
        view, files = "", path

        def look() -> list[bool]:
            nonlocal view, files
            view, files = self._store.view(manifest, expected, names)
            is_same = view == SAME
            is_late = time.monotonic() > deadline or view == NO_FOLDER
            return [is_same, not (is_same or self._store.exists(step)), is_late]

        while True:
            of_ranks = self._coordinator.gather_results(f"view of step {step}", look)
            if all(is_same for is_same, _, _ in of_ranks):
                return files
            if of_ranks[0][1]:  # rank 0 decides for all
                raise CheckpointNotFoundError(f"{path}: was deleted while it was being opened; load another step")
            if any(is_late for _, _, is_late in of_ranks):
                break
            time.sleep(0.1)
        error = CheckpointNotFoundError(
            f"{path}: rank {self._coordinator.rank} on {socket.gethostname()} sees {view}, rank 0 a committed step. Is "
            "the folder on a file system that all ranks share, and mounted on this machine?"
        )
        self._coordinator.barrier(f"different views of step {step}", None if view == SAME else error)
        raise AssertionError("some rank has raised")


@contextlib.contextmanager
def os_errors_as(error_type: type[SaveError] | None, what: str) -> Iterator[None]:
    """Raise an OSError of the block as `error_type`, with its errno; `what` names the folder and what failed."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error_type is None:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = error_type(f"{what}: {error}{'. Free some space, or keep fewer steps' if full else ''}")
        failure.errno = error.errno
        raise failure from error
