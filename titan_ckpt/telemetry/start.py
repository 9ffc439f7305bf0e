"""Describe how a process was started: versions, command line, git revision, settings. Starts no program."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
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
    """Return the commit that is checked out where a path is; None if there is none that plain files name."""
    try:
        for folder in (path.resolve(), *path.resolve().parents):
            git = folder / ".git"
            if git.is_file():  # a worktree or a submodule
                git = (folder / git.read_text().removeprefix("gitdir: ").strip()).resolve()
            if git.is_dir():
                return _head(git)
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text().strip()
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
