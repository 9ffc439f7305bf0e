"""Texts that name a folder or a file on a mounted file system. A URI is refused, because no store of its kind is known.

Without the check, `s3://bucket/run` names a local folder `s3:`, and a run fills the disk of the machine it starts on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated

from titan_ckpt.encoding.toml import Check
from titan_ckpt.errors import ConfigError, without_credentials

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
_EXPECTED = "a path on a mounted file system (no URI such as s3:// is supported)"


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a URI, also in the form that pathlib gives it: Path("s3://bucket") is "s3:/bucket"."""
    return _URI.match(os.fspath(path)) is not None


def require_local(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Check paths by the name of their setting or argument. Raises: ConfigError listing every URI."""
    uris = {name: without_credentials(os.fspath(path)) for name, path in paths.items() if path and is_uri(path)}
    if problems := [f'{name}: expected {_EXPECTED}, found "{uri}"' for name, uri in uris.items()]:
        raise ConfigError(problems, "paths")


LocalPath = Annotated[
    str,
    Check("a string that is not empty", str.strip),
    Check(_EXPECTED, lambda path: not is_uri(path)),
]
"""The type of a setting that names a folder or a file."""
