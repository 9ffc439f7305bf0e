"""The environment's part in reaching a bucket: another endpoint than the provider's, and credentials.

Owns the names of the variables that are read here; the client reads all others itself.
"""

from __future__ import annotations

import contextlib
import os
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.stores.settings import is_endpoint

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that name another server than the provider's own, as the providers' tools know them."""
_IN_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
"""The client aborts where a header cannot have such a value, as with the line break at the end of a mounted secret."""
_UNUSABLE = "a line break, a space around it or another control character, which no request can carry"


def endpoint_of(scheme: str) -> str | None:
    """Return the endpoint that the environment names for buckets of a scheme; None for the provider's own.

    Raises: ConfigError naming the variable without its value, which may hold a password.
    """
    name = next(filter(os.environ.get, _ENDPOINTS.get(scheme, ())), None)
    if name is not None and not is_endpoint(os.environ[name]):
        problem = f"{name}: expected an http(s) URL without user, password or query; set it so, or unset it"
        raise ConfigError([problem], "environment")
    return name and os.environ[name]


def require_usable_keys() -> None:
    """Check S3's variables. Raises: ConfigError naming those that no request can carry, without their values."""
    problems = [
        f"{name}: has {_UNUSABLE}; set it without" for name in _IN_HEADERS if not _is_usable(os.environ.get(name, ""))
    ]
    if problems:
        raise ConfigError(problems, "environment")


def shared_credentials() -> dict[str, Any]:
    """Return the keys of AWS's shared credentials file, which the client does not read; {} if others come first."""
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*others, "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")):
        return {}
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    profile = os.environ.get("AWS_PROFILE", "default")
    parser = ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ConfigParserError, UnicodeDecodeError):
        parser.read(path)
    if not parser.has_section(profile):
        return {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
             "aws_session_token": "session_token"}  # fmt: skip
    keys = {ours: parser[profile][theirs] for theirs, ours in names.items() if theirs in parser[profile]}
    if wrong := [name for name, value in keys.items() if not _is_usable(value)]:
        raise ConfigError([f"{path}: {name} of [{profile}] has {_UNUSABLE}" for name in wrong], "environment")
    return keys


def _is_usable(value: str) -> bool:
    return value.isprintable() and value == value.strip()
