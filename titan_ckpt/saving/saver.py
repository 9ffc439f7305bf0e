"""Saver: stages, writes, agrees, commits and expires, in this thread or in a helper thread and its process.

Owns the order of a save, who waits for whom, and what is said of a failure that nobody waits for: it is logged when the
process ends. The settings say when a save is due, directory/ what a checkpoint is.
Knows no file format beyond asking the native writer for its files.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import xxhash

from titan_ckpt.components.snapshot import RUN_STATE, Snapshot, as_stored, divided, rank_state_name, run_parts
from titan_ckpt.config import SaveConfig
from titan_ckpt.directory.directory import CheckpointDirectory, os_errors_as
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.disk.workers import BackgroundCall
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.replicas import check_replicas
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import SaveError, listed
from titan_ckpt.formats.native.arena import StagedFile, StagingHandle
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.geometry.chunks import LazyTensor
from titan_ckpt.process import gc_paused
from titan_ckpt.stores.store import Place, store_of
from titan_ckpt.telemetry.events import Event, Telemetry
from titan_ckpt.types import StateDict

logger = logging.getLogger(__name__)


class SaveHandle(BackgroundCall):
    """A save in flight, or the exports of a step."""

    def __init__(self, step: int, act: Callable[[], object], name: str) -> None:
        super().__init__(act, f"titan_ckpt {name} {step}")
        self.step = step

    def run(self, *, make: bool = True) -> None:
        _unheard[id(self)] = self
        super().run(make=make)
        if self.done and self.error is None:
            self.hear()

    def succeeded(self) -> bool:
        """Block until the save has ended and return whether it is committed."""
        self.wait()
        return self.error is None

    def hear(self) -> None:
        """Note that somebody knows how it ended."""
        _unheard.pop(id(self), None)


_unheard: dict[int, SaveHandle] = {}
"""Saves that have failed, or may fail, and that nobody has waited for yet."""


def _report_unheard() -> None:
    """Log unheard failures when the process ends without `close`; the threads of saves have ended by then."""
    for handle in _unheard.values():
        error = handle.error
        logger.critical("what was saved or exported of step %d is not there: %s", handle.step, error, exc_info=error)


atexit.register(_report_unheard)
os.register_at_fork(after_in_child=_unheard.clear)  # the process that saves says it


class Saver:
    """Runs saves for a manager, at most one at a time; every rank calls the same methods in the same order."""

    def __init__(
        self, directory: CheckpointDirectory, coordinator: Coordinator, config: SaveConfig, telemetry: Telemetry
    ) -> None:
        """Bind to a directory. `coordinator` must be the directory's own; nothing else may use it while a save runs."""
        self._directory = directory
        self._coordinator = coordinator
        self._config = config
        self._telemetry = telemetry
        self._event: Event | None = None
        """The save in flight, or the last one."""
        self._plan: WritePlan | None = None
        """The plan of the last save; every save of the same tensors uses it."""
        self._file: StagedFile | None = None
        self.in_flight: SaveHandle | None = None
        self.exports_in_flight: SaveHandle | None = None
        self._staging: StagingHandle | None = None
        self._changed: Callable[[], list[str]] = list
        """Returns the names of the tensors that have changed since the last snapshot."""
        self._staged: tuple[int, StateDict] | None = None
        """The step whose copy is in the arena, and the live tensors it was copied from."""
        self.seconds: deque[float] = deque(maxlen=8)
        """Durations of the last saves, from copy to commit."""

    @property
    def busy(self) -> bool:
        return any(handle is not None and handle.is_running for handle in (self.in_flight, self.exports_in_flight))

    def has_staged(self, step: int) -> bool:
        """Return whether the arena holds a copy of this step, as the live tensors still are."""
        return self._staged is not None and self._staged[0] == step and not self._changed()

    @gc_paused()
    def save(
        self, step: int, described: Callable[..., Manifest], snapshot: Snapshot, event: Event, *, expire: bool
    ) -> None:
        """Start a save, which is `in_flight` then; with async_mode "disabled" it has ended. Collective.

        `described`: makes the manifest of the attempt, the time, the components and the files. `event` times the save,
        which ends it, unless this function raises. `expire`: whether older steps expire after the commit; not after a
        save that an exception caused, whose state may be broken.

        The previous save must have been waited for. Live tensors may change again once `wait_staged` has returned.
        Raises: StateEncodingError and SaveError, before anything is written.
        """
        assert self.in_flight is None and self.exports_in_flight is None, "wait() for the save before this one"
        self._staged = None
        state, snapshot = self._state_files(snapshot)
        plan = WritePlan.of(snapshot.tensors, self._coordinator, self._plan, snapshot.buffers, snapshot.casts)
        self._plan = plan
        mode = self._config.check_replicas
        if mode != "off" and self._coordinator.world_size > 1:
            own = snapshot.own_buffers
            held = {ranks: tuple(name for name in names if name not in own) for ranks, names in plan.replicas.items()}
            check_replicas(snapshot.tensors, held, self._coordinator, mode, step)
        self._event = event
        described = partial(described, components=snapshot.components)
        commit = self._telemetry.ending(event)(partial(self._commit, event, step, described, expire, state, plan))
        changed = snapshot.watched.changed

        def write_live(folder: Place) -> FileRecord:
            record = plan.write(folder, snapshot.tensors)
            _refuse_changed(step, changed())
            return record

        if self._config.async_mode == "disabled":
            handle = SaveHandle(step, lambda: commit(write_live), "save")
            handle.run()
            self.in_flight = handle
            return
        error: Exception | None = None
        file: StagedFile | None = None
        staging: StagingHandle | None = None
        try:
            file = self._file_for(plan, snapshot.tensors)
            staging = self._staging = file.begin(snapshot.frozen_tensors(), changed)
            if snapshot.made:
                staging.wait()
        except Exception as e:  # no memory for the copy: the other ranks learn of it when they have written
            error = e

        def write_staged(folder: Place) -> FileRecord:
            if error is not None:
                raise error
            assert file is not None and staging is not None
            with event.phase("staging"):
                _refuse_changed(step, staging.finish())
            return file.write(folder)

        # known before it runs, so that an interrupt cannot come between
        self.in_flight = SaveHandle(step, lambda: commit(write_staged), "save")
        self.in_flight.start()
        if not snapshot.casts:
            self._staged, self._changed = (step, snapshot.tensors), snapshot.watched.changed

    def prepare(self, snapshot: Snapshot) -> None:
        """Plan saves of these tensors, and begin to make memory for their copies ready in the background. Collective.

        For a step that is not due: the first save then finds memory that is touched and page-locked.
        Raises: StateEncodingError for a tensor that cannot be stored.
        """
        if self._config.async_mode != "disabled" and self._plan is None:
            self._plan = WritePlan.of(snapshot.tensors, self._coordinator, buffers=snapshot.buffers)
            with suppress(OSError, MemoryError, RuntimeError):  # the save will meet it again, and raise on all ranks
                # the states that are asked for at a save alone may hold tensors, too
                self._file_for(self._plan, snapshot.tensors, room=(1 << 20) + self._plan.data_bytes // 64)

    def _file_for(self, plan: WritePlan, tensors: StateDict, room: int = 0) -> StagedFile:
        """Return the memory for a copy; that of the last save, if it is large enough. `room`: as of StagedFile."""
        if self._file is None or (self._file.plan is not plan and not self._file.refit(plan)):
            self._release()  # the old memory comes back before the new is taken
            pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
            in_process, timeout_seconds = self._config.async_mode == "process", self._config.timeout_seconds
            self._file = StagedFile(
                plan, pinned=pinned, in_process=in_process, timeout_seconds=timeout_seconds, room=room
            )
            self._file.prepare()
        return self._file

    def staged(self) -> tuple[StateDict, dict[str, LazyTensor]]:
        """Return the live tensors of the save in flight, and their staged copies, which may not be filled yet."""
        assert self._staged is not None and self._file is not None
        _, live = self._staged
        return live, self._file.tensors(live)

    def export(self, step: int, exports: Sequence[Callable[[Coordinator], None]]) -> None:
        """Start exports of the staged copy of `step`, which run when its save is committed. Collective.

        `exports` exchange with other ranks through the Coordinator that they are given. `wait` raises the first error;
        an export is made even after another has failed.
        """
        assert self.has_staged(step) and self.exports_in_flight is None
        saved = self.in_flight

        def make_after_save() -> None:
            of_ranks = self._coordinator.gather(f"is step {step} saved", saved is None or saved.succeeded())
            if all(of_ranks):
                _make_all(exports, self._coordinator)
            else:  # the save's own handle has its error
                logger.warning("the exports of step %d are left out, because its save has failed", step)

        self.exports_in_flight = SaveHandle(step, make_after_save, "export")
        self.exports_in_flight.start()

    def _state_files(self, snapshot: Snapshot) -> tuple[dict[str, bytes], Snapshot]:
        """Return the JSON files that this rank writes, and the snapshot with the names of its tensors. Collective.

        Rank 0 writes the values that are equal on all ranks or can be merged; every rank writes the rest to its own
        file. The tensors of a value that each rank writes get names of this rank.
        """
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if world_size > 1:
            parts = self._coordinator.gather_distinct("run state", lambda: run_parts(snapshot))
            if len(parts["step"]) > 1:
                raise SaveError("the ranks save different steps: every rank must call save() with the same step")
            differing = {n: list(v.values()) for n, v in parts.items() if max(map(len, v)) < world_size}
            snapshot = divided(snapshot, differing, rank)

        def encoded() -> dict[str, bytes]:
            state = {rank_state_name(rank): typed_json.dumps(as_stored(snapshot.rank), "rank state")}
            run = {RUN_STATE: as_stored(snapshot.run)} if rank == 0 else {}
            return state | {name: typed_json.dumps(content, "run state") for name, content in run.items()}

        return self._coordinator.together("state files", encoded), snapshot

    def wait_staged(self) -> None:
        """Wait until the save in flight has copied the live tensors; they may change then. The save has its errors."""
        if self._staging is not None:
            assert self._event is not None
            with self._event.phase("stall"):
                self._staging.wait()
            self._staging = None

    def wait(self) -> None:
        """Wait for the save in flight and its exports; they stay known until `forget`. May be left and called again."""
        for handle in (self.in_flight, self.exports_in_flight):
            if handle is not None:
                handle.wait()

    def forget(self) -> None:
        """Forget a save and its exports that have ended, so that the next one can begin."""
        if self.in_flight is not None and self.in_flight.error is not None:
            self._staged = None
        self._staging = None
        for handle in (self.in_flight, self.exports_in_flight):
            if handle is not None:
                handle.hear()
        self.in_flight = self.exports_in_flight = None

    def forget_copy(self) -> None:
        """Forget which step was copied last: the run goes back, and what it makes of that step may be another."""
        self._staged = None

    def close(self) -> None:
        """Release the staging memory; call it after `wait`. May be left, and called again."""
        self._staged = None
        self._release()

    def leave_to_parent(self) -> None:
        """Know of no save and no memory; called in a forked process, which has neither their threads nor the memory."""
        self.in_flight = self.exports_in_flight = self._staging = self._file = self._staged = None

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _commit(
        self,
        event: Event,
        step: int,
        described: Callable[..., Manifest],
        expire: bool,
        state: dict[str, bytes],
        plan: WritePlan,
        write_tensors: Callable[[Place], FileRecord],
    ) -> None:
        """Write and commit one checkpoint. Collective.

        1 Rank 0 begins the attempt. 2 Every rank writes its files. 3 All agree. 4 Rank 0 commits. 5 Old steps expire.
        """
        started = time.perf_counter()
        attempt = self._directory.begin(step, plan.layout.num_bytes + sum(map(len, state.values())))

        def write() -> list[dict[str, Any]]:
            with os_errors_as(SaveError, f"{self._directory.root}: step {step} was not saved"):
                records = _write_all(attempt.path, write_tensors, state)
            return [asdict(record) for record in records]

        try:
            with event.phase("write"):
                gathered = self._coordinator.gather_results("written", write)
        except BaseException:
            self._directory.abandon(attempt)
            raise
        manifest = described(
            attempt=attempt.id,
            world_size=self._coordinator.world_size,
            created_unix_seconds=time.time(),
            files=tuple(FileRecord(**record) for rank in gathered for record in rank),
        )
        event.note(num_bytes=sum(file.num_bytes for file in manifest.files), world_size=manifest.world_size)
        with event.phase("commit"):
            self._directory.commit(attempt, manifest)
        if expire:
            with event.phase("expire"):
                event.note(expired=self._directory.expire(self._config.keep))
        self.seconds.append(time.perf_counter() - started)
        if self._coordinator.rank == 0:
            place = str(self._directory.step_path(step))
            event.note(folder=place, digest=xxhash.xxh3_128_hexdigest(manifest.to_bytes()))
            logger.info("step %d saved in %.2f s: %s", step, self.seconds[-1], place)


def _refuse_changed(step: int, names: Sequence[str]) -> None:
    """Raises: SaveError if there are names: those of tensors whose values at `step` are gone."""
    if names:
        raise SaveError(
            f"step {step} is not saved: {listed(names, ', ', ' ')} changed while the save was reading "
            f"{'it' if len(names) == 1 else 'them'}, outside of optimizer.step(), which waits by itself. Call "
            "maybe_wait_for_staging() before any other code that changes weights or optimizer state"
        )


def _make_all(exports: Sequence[Callable[[Coordinator], None]], coordinator: Coordinator) -> None:
    first: Exception | None = None
    for export in exports:
        try:
            export(coordinator)
        except Exception as error:
            if first is not None:
                logger.exception("another export failed")
            first = first or error
    if first is not None:
        raise first


def _write_all(
    folder: Place, write_tensors: Callable[[Place], FileRecord], state: Mapping[str, bytes]
) -> list[FileRecord]:
    """Write this rank's files."""
    files = [(folder / name, data) for name, data in state.items()]
    record = store_of(folder).put_beside(files, lambda: write_tensors(folder))
    return [record] + [FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in state.items()]
