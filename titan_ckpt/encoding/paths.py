"""Texts that name a folder or a file on a mounted file system, or a model of the Hugging Face hub in the local cache.

A URI is refused, because no store of its kind is known. Without the check, `s3://bucket/run` names a local folder
`s3:`, and a run fills the disk of the machine it starts on. So does `~/run` or `$SCRATCH/run` name a folder `~` or
`$SCRATCH` in the current one, because no shell reads a run file.

Owns the layout of the cache. Sends no request: what the cache does not hold, `hf download` fetches.
Source: huggingface_hub, `constants.py` (the cache's place), `file_download.py` (its folders).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from titan_ckpt.encoding.toml import Check
from titan_ckpt.errors import CheckpointNotFoundError, listed, refuse

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
_SHELL = re.compile(r"~[^/]*(/|$)|.*(\$[{(A-Z_]|`)", re.DOTALL)
_TORN = re.compile(r"\s|.*(\s$|[\x00-\x1f\x7f\ud800-\udfff])", re.DOTALL)
"""Also lone surrogates, which stand for bytes that are not UTF-8: manifests and records name folders, and are UTF-8."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]*[\w-])?")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([^/]+)")
"""The end of a path in the cache: the id with "--" for "/", and the commit."""
_EXPECTED = "a path on a mounted file system (no URI such as s3:// is supported)"


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a URI, also in the form that pathlib gives it: Path("s3://bucket") is "s3:/bucket"."""
    return _URI.match(os.fspath(path)) is not None


def needs_shell(path: str | os.PathLike[str]) -> bool:
    """Return whether a shell would put a home folder or a variable into this path, as `~/run` and `$SCRATCH/run`."""
    return _SHELL.match(os.fspath(path)) is not None


def require_local(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Check paths by the name of their setting or argument. Raises: ConfigError listing all that are refused."""
    require({name: path for name, path in paths.items() if path}, _EXPECTED, is_uri)


def require(
    paths: Mapping[str, str | os.PathLike[str]], expected: str, is_wrong: Callable[[str | os.PathLike[str]], bool]
) -> None:
    """Raises: ConfigError listing every path that is wrong, which is not `expected`, and those that need a shell."""
    problems = [
        f'{name}: expected {said}, found "{os.fspath(path)}"'
        for name, path in paths.items()
        for said, refused in ((expected, is_wrong), (WRITTEN_OUT, needs_shell))
        if refused(path)
    ]
    refuse(*problems, source="paths")


WRITTEN_OUT = "a path without ~ and $NAME, which only a shell replaces: write it out"
Whole = Check(
    "a path without spaces around it, control characters such as line breaks, bytes that are not UTF-8, and names of "
    "more than 255 bytes",
    lambda path: not (_TORN.match(path) or any(len(name.encode(errors="replace")) > 255 for name in path.split("/"))),
)
Written = Check(WRITTEN_OUT, lambda path: not needs_shell(path))
LocalPath = Annotated[
    str,
    Check("a string that is not empty", str.strip),
    Whole,
    Check(_EXPECTED, lambda path: not is_uri(path)),
    Written,
]
"""The type of a setting that names a folder or a file."""


def hub_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the path that a name means: of an id, the snapshot in the cache, unless a file or folder has that name.

    `revision`: a branch, a tag or a commit; absent: main. An id that was never downloaded stays as it is.
    Raises: CheckpointNotFoundError if the cache holds other revisions alone.
    """
    text = os.fspath(name)
    downloaded = _cache() / f"models--{text.replace('/', '--')}"
    if os.path.lexists(text) or not _ID.fullmatch(text) or not downloaded.is_dir():
        return Path(text)
    wanted = revision or "main"
    ref = downloaded / "refs" / wanted
    snapshot = downloaded / "snapshots" / ((ref.read_text().strip() if ref.is_file() else "") or wanted)
    if not snapshot.is_dir():
        found = sorted(path.name for path in downloaded.glob("snapshots/*"))
        raise CheckpointNotFoundError(
            f"{text}: the Hugging Face cache {_cache()} does not hold its revision {wanted}, and has "
            f"{listed(found, ', ') or 'none'}: {_download(text, revision)}"
        )
    return snapshot


def how_to_get(path: str | os.PathLike[str]) -> str:
    """Return what fetches a model, as the end of an error about a path; empty if the path is no id and no snapshot.

    If a download was interrupted, the text names the files that are there.
    """
    text = os.fspath(path)
    if known := snapshot_of(snapshot := hub_folder(text)):
        is_cut = os.fspath(snapshot) != text and snapshot.is_dir()
        has = listed(sorted(entry.name for entry in snapshot.iterdir() if entry.exists()), ", ") if is_cut else ""
        found = f"the snapshot in the cache holds {has or 'nothing'}: " if is_cut else ""
        return f"; {found}{_download(*known)}"
    is_id = "/" in text and _ID.fullmatch(text) and not os.path.isdir(text.partition("/")[0])
    return f"; if it is a model of the Hugging Face hub: {_download(text)}" if is_id else ""


def snapshot_of(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Return the id and the commit of a snapshot in the cache; None for any other path."""
    match = _SNAPSHOT.fullmatch(os.path.relpath(path, _cache()))
    return None if match is None else (match[1].replace("--", "/"), match[2])


def _download(name: str, revision: str | None = None) -> str:
    return f"hf download {name}{f' --revision {revision}' if revision else ''}"


def _cache() -> Path:
    """Return the folder of the cache, as the environment of this moment says."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    place = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(place)))
