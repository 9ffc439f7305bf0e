"""Settings of a bucket, and the texts that name a place, in one or on a mounted file system.

Owns the list of known schemes. Only the place that a URL names needs a client, which is made here. Credentials are no
settings: they come by the provider's own environment and files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from titan_ckpt.encoding.paths import Whole, Written, hub_folder, is_uri, require
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys

if TYPE_CHECKING:
    from titan_ckpt.stores.store import Place

SCHEMES = ("s3", "gs", "az")
"""Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

OTHERS: dict[str, Callable[[str, str, StoreConfig], Any]] = {}
"""Scheme of a URL -> the class of another place for bytes, an ObjectStore made of scheme, name and settings."""

_BUCKET_URL = re.compile(r"([a-z][a-z0-9]*):/{1,2}([^/?#@:\s]+)((?:/[^/?#\x00-\x1f\x7f]+)*)/?")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")


def is_endpoint(text: str) -> bool:
    """Return whether this is the URL of a server, without anything secret."""
    return _ENDPOINT.fullmatch(text) is not None


_Endpoint = Annotated[str, Check("an http(s) URL without user, password or query", is_endpoint)]
_Seconds = Annotated[float, Check("above 0, at most 600 (seconds)", lambda s: 0 < s <= 600)]


@dataclass(frozen=True, slots=True)
class StoreConfig(Checked):
    """[checkpoint.store]: how the buckets of checkpoints, sources and exports are reached. Credentials, and the region
    of an S3 bucket (AWS_REGION), come from the provider's own environment and files.
    """

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "region": "the environment has it: AWS_REGION, by default us-east-1",
        "concurrency": "16 requests of a rank are in flight; it is no setting",
        "part_mib": "a part has 16 MiB, or more in a file of more than 9,000 parts; it is no setting",
    }

    endpoint: _Endpoint | None = None
    """URL of a server other than the provider's own, such as MinIO's; absent: AWS_ENDPOINT_URL or
    AZURE_STORAGE_ENDPOINT, or the provider's."""
    retry_seconds: _Seconds = 120.0
    """A request that has failed for this long is given up, and the save or load fails with the last answer."""
    single_writer: bool = False
    """You promise that one run at a time writes to the folder. Accepts stores without conditional puts, which cannot
    keep a second writer out."""


EXPECTED_PLACE = "a path on a mounted file system, or s3://bucket/key, gs://bucket/key or az://container/key"

FolderOrBucket = Annotated[
    str,
    Check("a string that is not empty", str.strip),
    Whole,
    Check(EXPECTED_PLACE, lambda text: not _is_unknown(text)),
    Written,
]
"""The type of a setting that names a folder, or a place in a bucket."""


def require_places(paths: Mapping[str, str | os.PathLike[str]]) -> None:
    """Check arguments that may name a bucket by their names. Raises: ConfigError listing all that are refused."""
    require(paths, EXPECTED_PLACE, _is_unknown)


def _is_unknown(text: str | os.PathLike[str]) -> bool:
    return is_uri(text) and split_url(text) is None


def split_url(text: str | os.PathLike[str]) -> tuple[str, str, str] | None:
    """Return (scheme, bucket, key) of a bucket's URL, None for any other text; key "" is the bucket itself.

    Reads also what pathlib makes of a URL: Path("s3://bucket/run") is "s3:/bucket/run".
    """
    match = _BUCKET_URL.fullmatch(os.fspath(text))
    if match is None or match[1] not in (*SCHEMES, *OTHERS) or any(part in (".", "..") for part in match[3].split("/")):
        return None
    return match[1], match[2], match[3].strip("/")


def open_location(
    text: str | os.PathLike[str], base_folder: str | Path = ".", settings: StoreConfig | None = None
) -> Place:
    """Return the place that a text names: in a bucket if it is a bucket's URL, else relative to a folder.

    Sends nothing. Raises: ConfigError if the client cannot be made.
    """
    parts = split_url(text)
    if parts is None:
        return Path(base_folder) / text
    from titan_ckpt.stores.bucket import Bucket
    from titan_ckpt.stores.objects import BucketPath

    scheme, name, key = parts
    return BucketPath(OTHERS.get(scheme, Bucket)(scheme, name, settings or StoreConfig()), key)


def open_source(text: str, settings: StoreConfig, revision: str | None = None) -> Place:
    """Return the place of weights to load: as `open_location` does, and the snapshot of a model's id (`hub_folder`).

    Raises: ConfigError if the client cannot be made; CheckpointNotFoundError for a revision that was not downloaded.
    """
    return open_location(hub_folder(text, revision) if split_url(text) is None else text, settings=settings)
