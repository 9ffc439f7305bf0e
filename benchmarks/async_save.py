"""An asynchronous save: how long training stands still, and how long until it is committed.

python -m benchmarks.async_save [--gb N] [--nproc N] [--pairs N] [--json]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    alternate_in_two,
    clean_folder,
    folder_bytes,
    local,
    local_bytes,
    measures,
    parse,
    rank,
    report,
    run,
    say,
    touch_free_memory,
    training_state,
    world_size,
)
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.arena import StagedFile
from titan_ckpt.formats.native.writer import WritePlan

OURS, DCP = "titan_ckpt", "dcp.async_save (torchtitan's async)"
LIMIT = "limit: memcpy, then O_DIRECT write"


def main(options: Options) -> dict[str, Any]:
    """Compare; the arena exists before the first save, as it does in training."""
    state = training_state(options.gb)
    folder = Path(options.folder)
    here = local_bytes(state)
    ours = _Ours(state, folder)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    planner = DefaultSavePlanner(enable_plan_caching=True)
    buffers = raw.make_buffers()
    host = Buffer.allocate(here)
    host.tensor.fill_(1)

    def dcp_async() -> Callable[[], object]:
        return _end_of(dcp.async_save(dict(state), checkpoint_id=folder / "dcp"))

    def dcp_best() -> Callable[[], object]:
        writer = FileSystemWriter(folder / "dcp", thread_count=2)
        saving = dcp.async_save(dict(state), storage_writer=writer, planner=planner, async_stager=stager)
        return _end_of(saving)

    def copy_then_write() -> Callable[[], object]:
        raw.copy([local(tensor) for tensor in state.values()], host)
        return lambda: raw.write_direct(folder / f"{rank()}.raw", here, buffers)

    cases: dict[str, Case] = {
        OURS: ours.save,
        DCP: dcp_async,
        "dcp.async_save, reused stager, plan cached": dcp_best,
        LIMIT: copy_then_write,
    }

    def before(_: str) -> None:
        clean_folder(folder)
        touch_free_memory(here)

    blocking, committed = alternate_in_two(cases, options.pairs, before)
    total = here * world_size()
    report(f"async save, training stands still, {total / 1e9:.2f} GB, {world_size()} rank(s)", blocking, total)
    report("async save, until committed", committed, total)
    clean_folder(folder)
    with PeakMemory() as peak:
        ours.save()()
    began = statistics.median(ours.began)
    say(f"  staging begins after {began * 1e3:.2f} ms; the rest may overlap with training")
    committing = statistics.median(ours.committing)
    say(f"  the commit, when all ranks have written, takes {committing * 1e3:.1f} ms")
    fixed: dict[str, Any] = {"bytes_written": folder_bytes(folder), "extra_peak_mib": peak.mib}
    peers = [DCP, "dcp.async_save, reused stager, plan cached"]
    ours.close()
    return {
        "blocking": measures(blocking, OURS, DCP, peers, LIMIT, **fixed)
        | {"overlapped_seconds": round(began, 5), "arena_mib": round(here / 2**20, 1)},
        "committed": measures(committed, OURS, DCP, peers, LIMIT, **fixed) | {"commit_seconds": round(committing, 5)},
    }


class _Ours:
    """Staged in this thread, written and committed in another."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state = state
        self._folder = folder
        self._coordinator = Coordinator.current()
        self._plan = WritePlan.of(state, self._coordinator)
        self._file = StagedFile(self._plan, pinned=any(value.is_cuda for value in state.values()))
        self._step = 0
        self.began: list[float] = []
        self.committing: list[float] = []

    def save(self) -> Callable[[], object]:
        """Return once the live tensors may change."""
        begin = time.perf_counter()
        assert WritePlan.of(self._state, self._coordinator, self._plan) is self._plan
        staging = self._file.begin(self._state)
        self.began.append(time.perf_counter() - begin)
        staging.wait()
        self._step += 1
        errors: list[BaseException] = []

        def commit() -> None:
            try:
                self._commit()
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=commit)
        thread.start()

        def wait() -> None:
            thread.join()
            if errors:
                raise errors[0]

        return wait

    def _commit(self) -> None:
        directory = CheckpointDirectory(self._folder / "ours", self._coordinator)
        attempt = directory.begin(self._step, self._plan.layout.num_bytes)
        records = [asdict(self._file.write(attempt.path))]
        gathered: list[Any] = self._coordinator.gather("written", records)  # type: ignore[arg-type]
        begin = time.perf_counter()
        directory.commit(
            attempt,
            Manifest(
                step=self._step,
                kind="full",
                attempt=attempt.id,
                world_size=world_size(),
                created_unix_seconds=time.time(),
                components=("model",),
                converters=[],
                base=None,
                resumed_from=None,
                files=tuple(FileRecord(**record) for of_rank in gathered for record in of_rank),
            ),
        )
        self.committing.append(time.perf_counter() - begin)
        directory.close()

    def close(self) -> None:
        self._file.close()


def _end_of(saving: Any) -> Callable[[], object]:
    """Wait until the live tensors may change; return what waits for the upload."""
    staged = getattr(saving, "staging_completion", None)
    if staged is not None:
        staged.result()
        return saving.upload_completion.result  # type: ignore[no-any-return]
    return saving.result  # type: ignore[no-any-return]


if __name__ == "__main__":
    run(parse("an asynchronous save of a training state"), main)
