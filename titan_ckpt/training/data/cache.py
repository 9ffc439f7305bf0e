"""Folders that are computed once and shared between runs and ranks. Knows nothing of their content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def cached_folder(root: Path, name: str, key: Mapping[str, object], build: Callable[[Path], None]) -> Path:
    """Return `root/<name>-<digest of key>`; build it if it does not exist.

    Any number of processes may call this at once: one builds in a temporary folder and renames it, and the others on
    its host wait. A build that dies leaves only its temporary folder behind, and the next process builds. Where the
    file system has no locks, on other hosts of some, and beside another user's lock, each process builds, and the
    first rename wins.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    final = root / f"{name}-{digest}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / f".{final.name}.lock"):
        if final.is_dir():
            return final
        attempt = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            build(attempt)
            attempt.chmod(0o755)
            try:
                os.rename(attempt, final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(attempt, ignore_errors=True)
        return final


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock on a file, and remove the file at the end. The lock of a process that dies ends with it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:  # another user's, who builds the same, or was killed
            yield
            return
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)  # its holder has removed it meanwhile
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
