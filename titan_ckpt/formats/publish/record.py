"""A run's records of the exports that it has made, so that retention removes those and nothing else.

Owns `.titan_ckpt-exports/` in the run's folder: a file for each export, with the size of every file in it. Records are
not in the exports, because the bytes of an export depend on the weights and the settings alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import xxhash

from titan_ckpt.disk import posix
from titan_ckpt.encoding.strict_json import Json, parse
from titan_ckpt.errors import CorruptCheckpointError, listed

RECORDS = ".titan_ckpt-exports"
_MAX_BYTES = 1 << 24


def write_record(run: Path, name: str) -> None:
    """Record that the run has published the folder `name`, which is relative to the run's folder. Raises: OSError."""
    remove_record(run, name)
    posix.make_folders(run / RECORDS)
    record = {"folder": name, "content": _content(run / name)}
    posix.write_file(_path_of(run, name), json.dumps(record, indent=1).encode())


def remove_record(run: Path, name: str) -> None:
    """Remove the record of a folder, if there is one. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        posix.unlink(_path_of(run, name))


def recorded_folders(run: Path) -> list[str]:
    """Return the folders that the run has a record of, whether or not they are still there."""
    names: list[str] = []
    for file in posix.list_folder(run / RECORDS):
        with contextlib.suppress(OSError, CorruptCheckpointError):
            record = parse(posix.read_whole(run / RECORDS / file, _MAX_BYTES), _MAX_BYTES, file)
            name = record.get("folder") if isinstance(record, dict) else None
            if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts and name:
                names.append(name)
    return names


def why_foreign(run: Path, name: str) -> str | None:
    """Return why a folder is not an export as this run published it; None if it is."""
    if not posix.is_real_folder(run / name):
        return "it is no folder of its own"
    path = _path_of(run, name)
    record: Json = None
    with contextlib.suppress(OSError, CorruptCheckpointError):
        record = parse(posix.read_whole(path, _MAX_BYTES), _MAX_BYTES, str(path))
    written = record.get("content") if isinstance(record, dict) and record.get("folder") == name else None
    if not isinstance(written, dict):
        return "there is no record that this run made it"
    content = _content(run / name)
    changed = sorted(entry for entry in {*written, *content} if written.get(entry) != content.get(entry))
    return f"changed since: {listed(changed, ', ', most=3)}" if changed else None


def _path_of(run: Path, name: str) -> Path:
    return run / RECORDS / f"{xxhash.xxh3_128_hexdigest(name.encode())}.json"


def _content(folder: Path) -> dict[str, Json]:
    """Return the path of everything in a folder, each with its size; "no file" for what is none."""
    content: dict[str, Json] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            status = path.lstat()
            content[str(path.relative_to(folder))] = status.st_size if stat.S_ISREG(status.st_mode) else "no file"
    return content
