"""Texts that name a folder or a file on a mounted file system. A URI is refused, because no store of its kind is known.

Without the check, `s3://bucket/run` names a local folder `s3:`, and a run fills the disk of the machine it starts on.
So does `~/run` or `$SCRATCH/run` name a folder `~` or `$SCRATCH` in the current one, because no shell reads a run file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated

from titan_ckpt.encoding.toml import Check
from titan_ckpt.errors import ConfigError

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
_SHELL = re.compile(r"~[^/]*(/|$)|.*(\$[{(A-Z_]|`)", re.DOTALL)
_TORN = re.compile(r"\s|.*(\s$|[\x00-\x1f\x7f\ud800-\udfff])", re.DOTALL)
"""Also lone surrogates, which stand for bytes that are not UTF-8: manifests and records name folders, and are UTF-8."""
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
    if problems:
        raise ConfigError(problems, "paths")


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
