"""The exports that runs have made at one place in a bucket: their records, their publication and their retention.

Owns `.titan_ckpt-exports/` beside the exports: an object for each, which names the attempt that writes it, and has the
size and the ETag of every file once it is published. A folder in a bucket is loadable by one of its files, which is
written last and deleted first (LOADABLE).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import partial

from titan_ckpt.config import ExportConfig
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.record import (
    RECORDS,
    Exports,
    RecordExport,
    Staged,
    steps_among,
    unrecorded,
    why_changed,
)
from titan_ckpt.stores.objects import BucketPath, ObjectFacts

LOADABLE = ("config.json", "adapter_config.json", ".metadata")
"""Without one of these no reader opens a folder as a model, an adapter or a DCP checkpoint."""
_CUT_SHORT_SECONDS = 86400.0
"""An export that has written nothing for so long, and is not published, is not under way any more."""
_TO_BE = "content_to_be"
"""Key of a record: the content of an export whose last file is about to be written, of which it has the size."""
_PROBE = re.compile(r"probe-[0-9a-f]{32}")
logger = logging.getLogger(__name__)


class BucketExports(Exports):
    """The exports below one place, of any run."""

    root: BucketPath
    _whose = "a run"
    renames = False

    def name_of(self, config: ExportConfig, step: int) -> str:
        return config.lands_in(step).rpartition("/")[2]

    def check(self) -> None:
        """Write, read, list and delete an object, so that a right which is missing is known before the first step."""
        place = self.root / RECORDS / f"probe-{uuid.uuid4().hex}"
        place.bucket.create(place.key, place.name.encode())
        place.read()
        place.bucket.list_names(self.root.key)
        place.bucket.delete([place.key])

    def is_there(self, name: str) -> bool:
        """Return whether an export of this name is published; it may have a path before it. Raises: StoreError."""
        return any(path in LOADABLE for path in self._objects(name.rpartition("/")[2]))

    def begin(self, name: str) -> Staged:
        there = self._unpublished(name)
        before = self._record(name)
        if there and (not before or before.get("content") is not None):
            raise FileExistsError(
                f"{self.root / name} holds objects that no export has left, such as {min(there)}; remove them or "
                "choose another folder"
            )
        attempt = uuid.uuid4().hex
        self._write({"folder": name, "attempt": attempt, "content": None})
        # in this order, because `publish` writes the last file before it reads the record
        if there and (there := self._unpublished(name)):
            logger.info("%s: removing what an export that was cut short left", self.root / name)
            self._delete(there)
        publish, abandon = partial(self._publish, name, attempt), partial(self._abandon, name, attempt)
        return Staged(self.root / name, publish, abandon, attempt)

    def _unpublished(self, name: str) -> dict[str, ObjectFacts]:
        """Return the objects of an export that is not published. Raises: FileExistsError if it is; StoreError."""
        there = self._objects(name)
        if any(path in LOADABLE for path in there):
            raise FileExistsError(f"{self.root / name} is there already; remove it or choose another folder")
        return there

    def _publish(self, name: str, attempt: str, record: RecordExport, last: tuple[str, bytes] | None) -> None:
        """Write the last file, if the place is this attempt's before and after that."""
        assert last is not None, "some file makes an export loadable"
        self.require_own(name, attempt)
        record(last)
        place, content = self.root / name / last[0], last[1]
        # `create` would take the same bytes for its own, and the other run, which is told, deletes them
        if place.bucket.content(place.key) is not None:
            raise FileExistsError(f"{place}: another run has written it. Give one of the two another folder")
        place.bucket.create(place.key, content)
        try:
            if place.read(len(content)) != content:
                raise ExportError(f"{place} read back differs from what was written")
            self.require_own(name, attempt)  # else the other run may have deleted files of this one
        except ExportError:
            place.bucket.delete([place.key])
            raise
        record(None)
        if record is unrecorded:
            with contextlib.suppress(OSError):  # the export is whole; a record that is left says that no run made it
                self.root.bucket.delete([self._record_at(name).key])

    def require_own(self, name: str, attempt: str) -> None:
        if self._record(name).get("attempt") != attempt:
            raise ExportError(
                f"{self.root / name}: another run exports to this name. Give one of the two another folder"
            )

    def _abandon(self, name: str, attempt: str) -> None:
        """Delete what was written; the record stays, because another rank may still be writing."""
        record = self._record(name)
        if record.get("attempt") == attempt and record.get("content") is None:
            self._delete(self._objects(name))

    def _content_of(self, name: str, what: tuple[str, bytes] | None) -> Mapping[str, Json]:
        """As of Exports: right before its last file is written, which is `what`, and without one when it is there."""
        record = self._record(name)
        content: dict[str, Json] = {path: _mark(facts) for path, facts in self._objects(name).items()}
        if what is not None:
            content[what[0]] = _size(len(what[1]))  # its version is not known yet
        key = "content" if what is None else _TO_BE
        return {**record, _TO_BE: None, "published_unix_seconds": time.time(), key: content}

    def _remove(self, name: str) -> None:
        """Delete an export, with the file first that makes it loadable.

        The record says so before anything is deleted, and goes last: a removal that is cut short is taken up again.
        """
        self._write({"folder": name, "content": None, "expired": True})
        self._delete(self._objects(name))
        self.root.bucket.delete([self._record_at(name).key])

    def _set_aside(self, name: str, step: int, above: int) -> None:
        """Make an export unloadable, if it is as a run published it.

        A bucket renames nothing, so the file that makes an export loadable gets another name, and the others stay
        until the export of that step is made again.
        """
        loadable = {path: facts for path, facts in self._objects(name).items() if path in LOADABLE}
        if not loadable or not (self._is_abandoned(name) or self.why_foreign(name) is None):
            return
        # the record goes first: without it nobody could export to this name again
        self._write({"folder": name, "content": None, "abandoned": True})
        for path, facts in loadable.items():
            place = self.root / name / path
            place.bucket.put(f"{place.key}.abandoned", place.read(facts.num_bytes))
            place.bucket.delete([place.key])
        logger.warning(
            "%s: set aside, because this run went back to step %d: %s is named *.abandoned. Retention does not "
            "delete it; the next export of step %d does", self.root / name, above, " or ".join(LOADABLE), step
        )  # fmt: skip

    def _forget_deleted(self, config: ExportConfig) -> None:
        """Delete records, and what `check` has left, that are a day old and of nothing that is there.

        An export that is under way has a newer record, or objects.
        """
        records = self.root.bucket.list_objects((self.root / RECORDS).key)
        old = _newest(records) - _CUT_SHORT_SECONDS
        names = [facts.key.rpartition("/")[2] for facts in records if facts.unix_seconds < old]
        gone = [name for name in names if _PROBE.fullmatch(name)]
        if steps := steps_among((name.removesuffix(".json") for name in names if name.endswith(".json")), config):
            there = self.steps_there(config)
            gone += [f"{self.name_of(config, step)}.json" for step in steps if step not in there]
        self.root.bucket.delete([(self.root / RECORDS / name).key for name in gone])

    def _why_kept(self, name: str) -> str | None:
        return self.why_foreign(name) if self.is_there(name) and not self._is_abandoned(name) else None

    def _is_abandoned(self, name: str) -> bool:
        """Return whether a call of `set_aside` has come so far that it may be made again."""
        return self._record(name).get("abandoned") is True

    def published_unix_seconds(self, name: str) -> float:
        """Return when an export was published, by its record; 0.0 without one. Raises: StoreError."""
        seconds = self._record(name).get("published_unix_seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def why_foreign(self, name: str) -> str | None:
        record = self._record(name)
        written = record.get("content") or record.get(_TO_BE)
        if not isinstance(written, dict):
            return "there is no record that a run " + ("has finished it" if record else "made it")
        found = {path: _mark(facts) for path, facts in self._objects(name).items()}
        # of the last file the size alone may have been recorded
        return why_changed(written, {path: mark[: len(str(written.get(path, mark)))] for path, mark in found.items()})

    def _is_leftover(self, name: str) -> bool:
        record = {} if name in self._left else self._record(name)
        if not record or record.get("content") is not None or record.get("abandoned") is True:
            return False
        objects = self._objects(name)
        now = _newest(self.root.bucket.list_objects((self.root / RECORDS).key))
        is_old = now - _newest(objects.values()) > _CUT_SHORT_SECONDS
        return record.get("expired") is True or (is_old and not {*LOADABLE} & objects.keys())

    def _objects(self, name: str) -> dict[str, ObjectFacts]:
        """Return the objects of a folder by their names in it."""
        place = self.root / name
        return {f.key.removeprefix(f"{place.key}/"): f for f in place.bucket.list_objects(place.key)}

    def _delete(self, objects: Mapping[str, ObjectFacts]) -> None:
        self.root.bucket.delete([facts.key for path, facts in objects.items() if path in LOADABLE])
        self.root.bucket.delete([facts.key for path, facts in objects.items() if path not in LOADABLE])

    def _record_at(self, name: str) -> BucketPath:
        return self.root / RECORDS / f"{name}.json"

    def _write(self, record: Mapping[str, Json]) -> None:
        path = self._record_at(str(record["folder"]))
        path.bucket.put(path.key, json.dumps(record, indent=1).encode())


def _newest(objects: Iterable[ObjectFacts]) -> float:
    """Return when the newest object was put. Of the records, that is about now, by the store's clock and no other."""
    return max((facts.unix_seconds for facts in objects), default=0.0)


def _mark(facts: ObjectFacts) -> str:
    return f"{_size(facts.num_bytes)}{' '.join(facts.version.values())}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes, "
