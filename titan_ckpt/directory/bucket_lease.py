"""The right to write into a place in a bucket: one process has it at a time.

Owns `lease.json`, an object that names its holder and has an epoch, one higher with every holder. It is changed by
compare-and-swap, so two processes cannot both take it. As on a file system, a holder that can be shown to be alive
keeps the lease, and any other loses it to the next process that asks (`lease`).
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace

from titan_ckpt.directory.lease import held, refuse_living
from titan_ckpt.disk.holder import Holder, holder_from
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CommitConflictError, PreflightError
from titan_ckpt.stores.bucket import BucketPath, Version

LEASE_OBJECT = "lease.json"

logger = logging.getLogger(__name__)


class BucketLease:
    """The lease of a place, held by this process until `release`."""

    def __init__(self, place: BucketPath, epoch: int, holder: Holder) -> None:
        self.epoch = epoch
        self._place = place
        self._holder = holder
        self._content = _encode(epoch, holder)

    @staticmethod
    def acquire(root: BucketPath) -> BucketLease:
        """Take the lease, unless its holder is alive.

        Raises: CommitConflictError naming the holder; PreflightError if another program's object is there; OSError.
        """
        place = root / LEASE_OBJECT
        for is_last in (False, False, True):
            epoch, before, version = _read(place)
            if before is not None:
                refuse_living(root, place, before)
            lease = BucketLease(place, epoch + 1, Holder.current())
            try:
                if version is None:
                    place.bucket.create(place.key, lease._content)
                else:
                    place.bucket.replace(place.key, lease._content, version)
            except FileExistsError:
                other = _read(place)[1]
                if not is_last and (other is None or _is_this_process(other)):
                    continue  # a release, or an earlier request of this process, has arrived late
                raise CommitConflictError(
                    f"{root}: {other or 'another process'} has taken the lease at the same time. Stop one of the two"
                ) from None
            if before is not None:
                logger.warning(
                    "%s: taking over from %s, which did not close it; its unfinished saves are discarded", root, before
                )
            held.add(str(place))
            return lease
        raise AssertionError("the last try returns or raises")

    def check_process(self) -> None:
        """Check, without a request, that this process took the lease. Raises: CommitConflictError."""
        if os.getpid() != self._holder.pid:
            raise CommitConflictError(
                f"{self._place.parent}: held by {self._holder}; a process it forked may not commit"
            )

    def check(self) -> None:
        """Check that this process still holds the lease. Raises: CommitConflictError; OSError."""
        self.check_process()
        root = self._place.parent
        try:
            content, _ = self._place.bucket.read(self._place.key)
        except FileNotFoundError:
            raise CommitConflictError(
                f"{self._place} is gone: the folder was moved or cleared under this run"
            ) from None
        if content != self._content:
            _, other = _decode(content) or (0, None)
            raise CommitConflictError(
                f"{root}: taken over by {other or 'another process'} while this one, {self._holder}, was "
                "away. What it has committed stays; stop this process"
            )

    def release(self) -> None:
        """Give the lease back, once; does nothing in a forked process or if another process took the lease.

        A store that refuses it is logged: it must not hide why a save failed, and the next process takes it over.
        """
        if os.getpid() != self._holder.pid:
            return
        held.discard(str(self._place))
        try:
            content, version = self._place.bucket.read(self._place.key)
            if content == self._content:
                self._place.bucket.replace(self._place.key, _encode(self.epoch, None), version)
        except OSError as error:
            logger.warning("%s is not given back: %s", self._place, error)


def bucket_holder(root: BucketPath) -> Holder | None:
    """Return the process that the lease names, alive or not; None without one. Raises: OSError."""
    return _read(root / LEASE_OBJECT)[1]


def _is_this_process(holder: Holder) -> bool:
    return replace(holder, id="") == replace(Holder.current(), id="")


def _read(place: BucketPath) -> tuple[int, Holder | None, Version | None]:
    """Return the epoch, the holder and the version of the lease; its epoch is 0 if there is none.

    Raises: PreflightError if it is not a lease of ours; OSError.
    """
    try:
        content, version = place.bucket.read(place.key)
    except FileNotFoundError:
        return 0, None, None
    lease = _decode(content)
    if lease is None:
        raise PreflightError(
            f"{place}: expected a lease of titan_ckpt, found {len(content)} bytes of another program. Is the endpoint "
            "right? Else name another folder, or move the object away"
        )
    return *lease, version


def _encode(epoch: int, holder: Holder | None) -> bytes:
    return json.dumps({"epoch": epoch, "holder": None if holder is None else asdict(holder)}).encode()


def _decode(content: bytes) -> tuple[int, Holder | None] | None:
    """Return the epoch and the holder that the bytes name; None for anything else."""
    try:
        value: Json = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() != {"epoch", "holder"}:
        return None
    epoch, holder = value["epoch"], value["holder"]
    if type(epoch) is not int or (holder is not None and holder_from(holder) is None):
        return None
    return epoch, holder_from(holder)
