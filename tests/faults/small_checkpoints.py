"""The smallest real checkpoints: two little files a step, through CheckpointDirectory. What the fault matrix saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import xxhash

from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import FileRecord, Manifest
from titan_ckpt.directory.steps import Attempt
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.stores.store import Place, store_of

FILES = ("rank-00000.safetensors", "state.json")


def payload(step: int, value: int, name: str) -> bytes:
    """Return bytes that tell which save and which file they are of."""
    return f"{step}:{value}:{name}:".encode() * 40


def alone() -> Coordinator:
    """Return the coordinator of a run of one process."""
    return Coordinator(0, 1, None, "", 30.0)


def open_directory(root: Path) -> CheckpointDirectory:
    """Bind to a folder in a run of one process."""
    return CheckpointDirectory(root, alone())


def manifest_of(attempt: Attempt, files: list[FileRecord], **changes: Any) -> Manifest:
    """Return a plausible manifest of an attempt."""
    values: dict[str, Any] = {
        "kind": "full", "world_size": 1, "components": ("model",), "converters": [], "base": None, "resumed_from": None,
        "created_unix_seconds": time.time(),
    }  # fmt: skip
    return Manifest(step=attempt.step, attempt=attempt.id, files=tuple(files), **(values | changes))


def write_files(attempt: Attempt, value: int, names: tuple[str, ...] = FILES) -> list[FileRecord]:
    """Write an attempt's files durably and say what was written."""
    records = []
    for name in names:
        data = payload(attempt.step, value, name)
        posix.write_file(attempt.folder / name, data)
        records.append(FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data)))
    return records


def commit_step(directory: CheckpointDirectory, step: int, value: int = 0, **changes: Any) -> Manifest:
    """Save one step in a directory that is open."""
    attempt = directory.begin(step, num_bytes=1000)
    manifest = manifest_of(attempt, write_files(attempt, value), **changes)
    directory.commit(attempt, manifest)
    return manifest


def save(root: Path, step: int, value: int, keep: int | None = 2) -> None:
    """Open, commit one step, expire old ones, close: all that a save does to a file system."""
    directory = open_directory(root)
    try:
        commit_step(directory, step, value)
        directory.expire(None if keep is None else KeepConfig(latest=keep))
    finally:
        directory.close()


def read_value(path: Place, manifest: Manifest) -> int:
    """Read every file of a step back. Raises: CorruptCheckpointError where bytes differ; AssertionError for a mix."""
    values = set()
    for record in manifest.files:
        data = store_of(path).read_whole(path / record.name, 10**6)
        if xxhash.xxh3_128_hexdigest(data) != record.digest:
            raise CorruptCheckpointError(f"{path / record.name}: digest", str(path / record.name))
        step, value, name = data.split(b":")[:3]
        assert (int(step), name.decode()) == (manifest.step, record.name), f"{path}: another step's bytes"
        values.add(int(value))
    assert len(values) == 1, f"{path}: a mix of saves: {values}"
    return values.pop()


def load(root: Path) -> tuple[int, int] | None:
    """Return (step, value) of the newest step that can be read, going down the ladder; None for a fresh start.

    Raises: CorruptCheckpointError where there is content and none of it can be read.
    """
    directory = open_directory(root)
    try:
        steps = directory.steps()
        for step in reversed(steps):
            try:
                return step, read_value(root / f"step-{step}", directory.committed(step)[0])
            except CorruptCheckpointError:
                if step == steps[0]:
                    raise
        if saved_by_torch := directory.candidates():  # steps for the manager, which resumes from those of torchtitan
            raise CorruptCheckpointError(f"{root}: step {saved_by_torch[0]} holds no value of this test")
        return None
    finally:
        directory.close()
