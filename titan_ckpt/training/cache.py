"""Folders that are computed once and shared between runs and ranks. Knows nothing of what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def cached_folder(root: Path, name: str, key: Mapping[str, object], build: Callable[[Path], None]) -> Path:
    """Return `root/<name>-<digest of key>`, building it if it is not there.

    Any number of processes may ask at once: each that finds nothing builds in a folder of its own, the first rename
    wins, and all return that one. A build that dies leaves only its own temporary folder behind.
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
