"""Whether a bucket keeps what a commit rests on: a conditional put that fails where it must.

Some servers accept the condition and ignore it; with them, two writers would both believe that they have committed.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable

from titan_ckpt.errors import PreflightError
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import BucketPath

logger = logging.getLogger(__name__)


def probe(folder: BucketPath) -> None:
    """Put, read, list and delete an object below `folder`, and put it twice. Nothing of it stays.

    Raises: PreflightError naming all that the store lacks; StoreError for a right that the credentials lack.
    """
    place = folder / f"probe-{uuid.uuid4().hex}"
    try:
        lacks = _lacks(place)
    finally:
        with contextlib.suppress(StoreError):
            place.bucket.delete([place.key])
    if lacks:
        raise PreflightError(
            f"{folder}: this store cannot commit: {'; '.join(lacks)}. Two writers could overwrite each other. Take "
            "another store, or set checkpoint.store.single_writer = true if you make sure that there is one"
            if not place.bucket.settings.single_writer
            else f"{folder}: this store cannot hold checkpoints: {'; '.join(lacks)}"
        )


def _lacks(place: BucketPath) -> list[str]:
    bucket, key = place.bucket, place.key
    first, second, third = (f"{name} {uuid.uuid4().hex}".encode() for name in ("first", "second", "third"))
    lacks: list[str] = []

    def must_fail(act: Callable[[], object], what: str) -> None:
        with contextlib.suppress(FileExistsError):
            act()
            lacks.append(what)

    bucket.create(key, first)
    if key not in [facts.key for facts in bucket.list_files(place.parent.key)]:
        lacks.append("a listing does not show what was just written")
    content, version = bucket.read(key)
    if content != first:
        lacks.append("what is read is not what was written")
    if bucket.scheme != "gs" and version.get("version", "null") != "null":
        logger.warning(
            "%s keeps old versions, so deleted steps go on taking space: give it a rule that deletes old versions",
            bucket,
        )
    if not bucket.settings.single_writer:
        must_fail(lambda: bucket.create(key, second), "a put with If-None-Match: * overwrites what is there")
        content, version = bucket.read(key)
        try:
            bucket.replace(key, third, version)
        except FileExistsError:
            lacks.append("a put with the right If-Match is refused")
        must_fail(lambda: bucket.replace(key, second, version), "a put with an old If-Match overwrites what is there")
    try:
        bucket.delete([key])
        bucket.create(key, second)
    except FileExistsError:
        lacks.append("an object that was deleted cannot be created again")
    except StoreError as error:
        if not lacks:
            raise
        lacks.append(f"objects cannot be deleted ({error})")
    return lacks
