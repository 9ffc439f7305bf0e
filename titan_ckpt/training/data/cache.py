"""Folders that are computed once and shared between runs and ranks. Knows nothing of their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def cached_folder(root: Path, name: str, key: Mapping[str, object], build: Callable[[Path], None]) -> Path:
    """Return `root/<name>-<digest of key>`; build it if it does not exist.

    Any number of processes may call this at once: each builds in its own temporary folder, the first rename wins, and
    all return that folder. A build that dies leaves only its temporary folder behind.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    final = root / f"{name}-{digest}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
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
