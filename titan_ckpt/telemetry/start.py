"""Describe how a process was started: versions, command line, git revision, settings."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from titan_ckpt.errors import without_credentials

_PACKAGES = ("titan-ckpt", "torch", "transformers", "peft", "torchao", "torchtitan", "safetensors", "numpy")


def describe_start(world_size: int, config: object) -> dict[str, Any]:
    """Return the event "start". `config`: the settings as resolved, a dataclass or a dict."""
    settings: Any = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return {
        "event": "start",
        "unix_seconds": round(time.time(), 6),
        "command": [sys.executable, *map(without_credentials, sys.argv)],
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "world_size": world_size,
        "versions": {"python": platform.python_version(), **_versions()},
        "git": git_revision(Path(sys.argv[0] or ".")) or git_revision(Path.cwd()),
        "config": settings,
    }


@functools.cache  # the metadata of a package is parsed whole, which takes longer than the rest of a start
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision(path: Path) -> str | None:
    """Return the commit that is checked out where a path is; None without one, and where git is not installed."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    command = ["git", "-c", "safe.directory=*", "rev-parse", "--verify", "HEAD"]  # also of another owner's repository
    here = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set by a hook of git
    try:
        found = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else found.stdout.strip()
