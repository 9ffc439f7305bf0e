"""One save at a time: stage, write, agree, commit, expire. In this thread, or in one helper thread.

Owns the order of a save and who waits for whom. Decides neither when a save is due (policy.py) nor what a checkpoint is
(directory.py), and knows no file format beyond asking the native writer for its files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from titan_ckpt import typed_json
from titan_ckpt.components import Snapshot
from titan_ckpt.config import SaveConfig
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import Coordinator
from titan_ckpt.manifest import FileRecord, Kind, Manifest
from titan_ckpt.staging import StagingHandle
from titan_ckpt.storage.native import NativeWriter
from titan_ckpt.storage.staged_folder import write_file

logger = logging.getLogger(__name__)

RUN_STATE = "state.json"


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


@dataclass(slots=True)
class SaveHandle:
    """A save under way. `wait` raises what went wrong, once."""

    step: int
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def resolve(self, error: BaseException | None) -> None:
        """Mark the save as ended; called once, by the thread that ran it."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Block until the save is committed. Raises: what the save raised, the first time only."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Saver:
    """Runs saves for a manager, at most one at a time; every rank calls the same methods in the same order."""

    def __init__(self, directory: CheckpointDirectory, coordinator: Coordinator, config: SaveConfig) -> None:
        """Bind to a directory; `coordinator` must be the directory's own, used by nobody else while a save runs."""
        self._directory = directory
        self._coordinator = coordinator
        self._config = config
        self._writer = NativeWriter()
        self._handle: SaveHandle | None = None
        self._staging: StagingHandle | None = None

    @property
    def busy(self) -> bool:
        return self._handle is not None and not self._handle.done

    def prepare(self, snapshot: Snapshot) -> None:
        """Plan the tensors, and reserve what staging needs, before the first save. Collective."""
        self._writer.plan(snapshot.tensors, self._coordinator)
        if self._config.async_mode != "disabled":
            self._writer.allocate(snapshot.tensors)

    def save(self, request: SaveRequest, snapshot: Snapshot) -> SaveHandle:
        """Start a save and return its handle; with async_mode "disabled" it has ended. Collective.

        The one before must have been waited for. Live tensors may change again once `wait_staged` has returned.
        """
        assert self._handle is None, "wait() for the save before this one"
        handle = self._handle = SaveHandle(request.step)
        state = {rank_state_name(self._coordinator.rank): typed_json.dumps(snapshot.rank, "rank state")}
        if self._coordinator.rank == 0:
            state[RUN_STATE] = typed_json.dumps(snapshot.run, "run state")
        self._writer.plan(snapshot.tensors, self._coordinator)
        if self._config.async_mode == "disabled":
            self._run(handle, request, snapshot, state, lambda folder: self._writer.write(folder, snapshot.tensors))
        else:
            staging = self._staging = self._writer.begin_staging(snapshot.frozen_tensors())

            def write_staged(folder: Path) -> list[FileRecord]:
                staging.finish()
                return self._writer.write_staged(folder)

            arguments = (handle, request, snapshot, state, write_staged)
            threading.Thread(target=self._run, args=arguments, name=f"titan_ckpt save {request.step}").start()
        return handle

    def wait_staged(self) -> None:
        """Return when live tensors may change: the save in flight has copied them. Raises: what the copy raised."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises: what it raised, once, on every rank."""
        self._staging = None
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def close(self) -> None:
        """Give back the staging memory; after `wait`."""
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
            logger.info("step %d saved in %.2f s", request.step, time.perf_counter() - started)
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
        except Exception as e:
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
        )
        self._directory.commit(attempt, manifest)
        self._directory.expire(self._config.keep)


def _write_file(path: Path, data: bytes) -> FileRecord:
    write_file(path, data, fsync=True)
    return FileRecord(path.name, len(data), xxhash.xxh3_128_hexdigest(data))
