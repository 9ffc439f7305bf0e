"""One save at a time: stage, write, agree, commit, expire. In this thread, or in one helper thread and its process.

Owns the order of a save and who waits for whom. Decides neither when a save is due (policy.py) nor what a checkpoint is
(directory.py), and knows no file format beyond asking the native writer for its files.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from titan_ckpt import typed_json
from titan_ckpt.components import STATES, Snapshot
from titan_ckpt.config import SaveConfig
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import FAILURES, Coordinator
from titan_ckpt.errors import SaveError
from titan_ckpt.manifest import FileRecord, Kind, Manifest
from titan_ckpt.optimizer_state import merge_groups
from titan_ckpt.replicas import check_replicas
from titan_ckpt.staging import StagingHandle
from titan_ckpt.storage.engine import collector_held
from titan_ckpt.storage.native import NativeWriter
from titan_ckpt.storage.staged_folder import write_file
from titan_ckpt.strict_json import Json
from titan_ckpt.tensors import LazyTensor
from titan_ckpt.types import StateDict

logger = logging.getLogger(__name__)

RUN_STATE = "state.json"

StageExports = Callable[[StateDict, Mapping[str, LazyTensor]], Callable[[Coordinator], None]]
"""(live tensors, their staged copies, not yet filled) -> what makes exports of the copies in another thread, talking to
other ranks by that line. Both are collective."""


def _joined(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {fqn: value for one in reversed(of_ranks) for fqn, value in one.items()}


_MERGE: dict[str, Callable[[Sequence[Any]], Any]] = {"optimizer": merge_groups, "model": _joined}
"""Parts that are by parameter or module: a pipeline stage has its own."""


def rank_state_name(rank: int) -> str:
    """Return the name of the file that holds one rank's state."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What one checkpoint is of; its content comes beside it."""

    step: int
    kind: Kind
    converters: list[dict[str, Any]] = field(default_factory=list)
    base: dict[str, Any] | None = None
    resumed_from: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    expire: bool = True
    """Let older steps expire after it. Not after a save that an exception caused: it may be of a broken run."""


@dataclass(slots=True)
class SaveHandle:
    """A save under way. `wait` raises what went wrong, once."""

    step: int
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _failed: bool = False

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Return what went wrong so far, without taking it from who waits."""
        return self._error

    def resolve(self, error: BaseException | None) -> None:
        """Mark the save as ended; called once, by the thread that ran it."""
        self._error, self._failed = error, error is not None
        if self._failed:
            _unheard[id(self)] = self
        self._done.set()

    def succeeded(self) -> bool:
        """Block until the save has ended, and say whether it is committed; leaves its error to `wait`."""
        self._done.wait()
        return not self._failed

    def wait(self) -> None:
        """Block until the save is committed. Raises: what the save raised, the first time only."""
        self._done.wait()
        error, self._error = self._error, None
        _unheard.pop(id(self), None)
        if error is not None:
            raise error


_unheard: dict[int, SaveHandle] = {}
"""Saves that have failed, and nobody has waited for them yet."""


def _report_unheard() -> None:
    """Log them where the process ends without `close`; it has waited for the threads of saves by then."""
    for handle in _unheard.values():
        error = handle.error
        logger.critical("what was saved or exported of step %d is not there: %s", handle.step, error, exc_info=error)


atexit.register(_report_unheard)


class Saver:
    """Runs saves for a manager, at most one at a time; every rank calls the same methods in the same order."""

    def __init__(self, directory: CheckpointDirectory, coordinator: Coordinator, config: SaveConfig) -> None:
        """Bind to a directory; `coordinator` must be the directory's own, used by nobody else while a save runs."""
        self._directory = directory
        self._coordinator = coordinator
        self._config = config
        self._writer = NativeWriter(in_process=config.async_mode == "process")
        self._handle: SaveHandle | None = None
        self._exports: SaveHandle | None = None
        self._staging: StagingHandle | None = None
        self._staged: tuple[int, StateDict] | None = None
        """The step whose copy is in the arena, and the live tensors that it is of."""
        self._seconds: deque[float] = deque(maxlen=8)

    @property
    def in_flight(self) -> SaveHandle | None:
        return self._handle

    @property
    def longest_seconds(self) -> float | None:
        """Return the longest of the last saves, from its copy's begin to its commit; None before there was one."""
        return max(self._seconds, default=None)

    @property
    def busy(self) -> bool:
        return any(handle is not None and not handle.done for handle in (self._handle, self._exports))

    def has_staged(self, step: int) -> bool:
        """Say whether there is a copy of this step, which is no older than the live tensors if they are of it."""
        return self._staged is not None and self._staged[0] == step

    @collector_held()
    def save(self, request: SaveRequest, take: Callable[[], Snapshot]) -> SaveHandle:
        """Start a save and return its handle; with async_mode "disabled" it has ended. Collective.

        The one before must have been waited for. Live tensors may change again once `wait_staged` has returned.
        Raises: what `take` raises on any rank, and StateEncodingError, before anything is written.
        """
        assert self._handle is None and self._exports is None, "wait() for the save before this one"
        self._staged = None
        snapshot, state = self._take(take)
        self._writer.plan(snapshot.tensors, self._coordinator)
        mode = self._config.check_replicas
        if mode != "off" and self._coordinator.world_size > 1:
            replicas = self._writer.replicas
            check_replicas(snapshot.tensors, replicas, snapshot.volatile, self._coordinator, mode, request.step)
        if self._config.async_mode == "disabled":
            handle = self._handle = SaveHandle(request.step)
            self._run(handle, request, snapshot, state, lambda folder: self._writer.write(folder, snapshot.tensors))
            return handle
        error: BaseException | None = None
        try:
            self._staging = self._writer.begin_staging(snapshot.frozen_tensors())
        except Exception as e:  # no memory for the copy: told to the other ranks when they have written
            error = e
        else:
            self._staged = request.step, snapshot.tensors
        staging = self._staging

        def write_staged(folder: Path) -> list[FileRecord]:
            if staging is None:
                assert error is not None
                raise error
            staging.finish()
            return self._writer.write_staged(folder)

        handle = self._handle = SaveHandle(request.step)
        arguments = (handle, request, snapshot, state, write_staged)
        threading.Thread(target=self._run, args=arguments, name=f"titan_ckpt save {request.step}").start()
        return handle

    def export(self, step: int, stage_exports: StageExports) -> None:
        """Begin exports of the staged copy of `step`, to be made once its save is committed; `wait` raises for them.

        Collective, and called while the live tensors are still those of the step.
        Raises: what `stage_exports` raises.
        """
        assert self.has_staged(step) and self._exports is None
        assert self._staged is not None
        _, live = self._staged
        make = stage_exports(live, self._writer.staged(live))
        saved = self._handle
        handle = self._exports = SaveHandle(step)

        def run() -> None:
            error: BaseException | None = None
            try:
                if saved is None or saved.succeeded():  # its own error is raised for it
                    make(self._coordinator)
            except BaseException as e:
                error = e
            handle.resolve(error)

        threading.Thread(target=run, name=f"titan_ckpt export {step}").start()

    def _take(self, take: Callable[[], Snapshot]) -> tuple[Snapshot, dict[str, bytes]]:
        """Take the snapshot on all ranks; return it with the JSON files that this rank writes.

        1 Every rank posts a digest of each part of its run state. 2 Where they differ, all post the parts that can be
        merged. 3 Rank 0 writes what all have alike or merged; every rank keeps the rest in its own file.
        """
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        error: BaseException | None = None
        snapshot = Snapshot({}, {}, {}, ())
        digests: dict[str, Json] = {}
        try:
            snapshot = take()
            if world_size > 1:
                parts = _run_parts(snapshot.run)
                digests = {n: xxhash.xxh3_128_hexdigest(typed_json.dumps(v, n)) for n, v in parts.items()}
        except FAILURES as e:
            error = e
        gathered: list[Any] = self._coordinator.gather("snapshot", digests, error)
        names = dict.fromkeys(name for of_rank in gathered for name in of_rank)
        differing = [name for name in names if len({of_rank.get(name) for of_rank in gathered}) > 1]
        run, own = snapshot.run, snapshot.rank
        if "step" in differing:
            raise SaveError("the ranks save different steps: every rank must call save() with the same step")
        if differing:
            mine = {name: typed_json.encode(run[name]) for name in differing if name in _MERGE and name in run}
            of_ranks = [typed_json.decode(one, "run state") for one in self._coordinator.gather("run state", mine)]
            run, own = _divide(run, own, differing, of_ranks)
        state: dict[str, bytes] = {}
        try:
            state[rank_state_name(rank)] = typed_json.dumps(own, "rank state")
            if rank == 0:
                state[RUN_STATE] = typed_json.dumps(run, "run state")
        except Exception as e:
            error = e
        self._coordinator.barrier("state files", error)
        return snapshot, state

    def wait_staged(self) -> None:
        """Return when live tensors may change: the save in flight has copied them. Raises: what the copy raised."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.wait()

    def wait(self) -> None:
        """Wait for the save in flight, and exports of it. Raises: what either raised, once, on every rank."""
        self._staging = None
        handle, self._handle = self._handle, None
        exports, self._exports = self._exports, None
        try:
            if handle is not None:
                handle.wait()
        except BaseException:
            self._staged = None
            raise
        finally:
            if exports is not None:
                exports.wait()

    def close(self) -> None:
        """Give back the staging memory; after `wait`."""
        self._staged = None
        self._writer.close()

    def _run(
        self,
        handle: SaveHandle,
        request: SaveRequest,
        snapshot: Snapshot,
        state: dict[str, bytes],
        write_tensors: Callable[[Path], list[FileRecord]],
    ) -> None:
        started = time.perf_counter()
        try:
            self._commit(request, snapshot, state, write_tensors)
        except BaseException as error:
            handle.resolve(error)
        else:
            seconds = time.perf_counter() - started
            self._seconds.append(seconds)
            logger.info("step %d saved in %.2f s", request.step, seconds)
            handle.resolve(None)

    def _commit(
        self,
        request: SaveRequest,
        snapshot: Snapshot,
        state: dict[str, bytes],
        write_tensors: Callable[[Path], list[FileRecord]],
    ) -> None:
        """1 Begin the attempt. 2 Every rank writes its files. 3 All agree. 4 Rank 0 commits. 5 Old steps expire."""
        attempt = self._directory.begin(request.step, self._writer.num_bytes + sum(map(len, state.values())))
        error: BaseException | None = None
        records: list[FileRecord] = []
        try:
            records = [
                *write_tensors(attempt.path),
                *(_write_file(attempt.path / n, data) for n, data in state.items()),
            ]
        except BaseException as e:  # also an interrupt from the keyboard: the other ranks wait for an answer
            error = e
        try:
            gathered: list[Any] = self._coordinator.gather("written", [asdict(r) for r in records], error)
        except BaseException:
            self._directory.abandon(attempt)
            raise
        manifest = Manifest(
            step=request.step,
            kind=request.kind,
            attempt=attempt.id,
            world_size=self._coordinator.world_size,
            created_unix_seconds=time.time(),
            components=snapshot.components,
            converters=request.converters,
            base=request.base,
            resumed_from=request.resumed_from,
            files=tuple(FileRecord(**record) for rank in gathered for record in rank),
            metrics=request.metrics,
        )
        self._directory.commit(attempt, manifest)
        if request.expire:
            self._directory.expire(self._config.keep)


def _run_parts(run: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a run state that may be alike on all ranks one by one: each user state is one."""
    parts = {name: value for name, value in run.items() if name != "states"}
    return parts | {f"{STATES}{name}": value for name, value in run.get("states", {}).items()}


def _divide(
    run: dict[str, Any], rank: dict[str, Any], differing: Sequence[str], of_ranks: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (run state, rank state), where a differing part is merged over the ranks, or goes to the rank's state."""
    run, rank = dict(run), dict(rank)
    states = dict(run.get("states", {}))
    for name in differing:
        if name in _MERGE:
            run[name] = _MERGE[name]([one[name] for one in of_ranks if name in one])
        elif name.startswith(STATES):
            key = name.removeprefix(STATES)
            if key in states:
                rank.setdefault("states", {})[key] = states.pop(key)
        elif name in run:
            rank[name] = run.pop(name)
    if "states" in run:
        run["states"] = states
    return run, rank


def with_rank_parts(run: dict[str, Any], rank: dict[str, Any] | None) -> dict[str, Any]:
    """Return the run state with what its ranks did not have alike, which each rank kept for itself."""
    if rank is None:
        return run
    own = {name: rank[name] for name in ("lr_scheduler",) if name in rank}
    return {**run, **own, "states": run.get("states", {}) | rank.get("states", {})}


def _write_file(path: Path, data: bytes) -> FileRecord:
    write_file(path, data, fsync=True)
    return FileRecord(path.name, len(data), xxhash.xxh3_128_hexdigest(data))
