"""Asking a running job for a save from outside: a file in its folder, and a file with the answer.

Owns the two files. Knows no manager and sends no signal: whoever may write into the run's folder may ask.

`save-request` is taken by its name alone, so `touch` makes one; its text, if any, names the request in the answer.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_ckpt import posix
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

REQUEST = "save-request"
ANSWER = "save-answer.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: the step that holds its state, or why there is none."""

    request: str
    step: int
    error: str | None = None


def ask(run: Path) -> str:
    """Leave a request; return its name. Raises: CheckpointNotFoundError; CheckpointError if one is there already."""
    if not run.is_dir():
        raise CheckpointNotFoundError(f"{run} is no folder; name the folder that the run writes into (output_folder)")
    name = uuid.uuid4().hex
    draft = run / f".{REQUEST}-{name}"
    posix.write_file(draft, name.encode())
    try:
        posix.rename_noreplace(draft, run / REQUEST)
    except FileExistsError:
        posix.unlink(draft)
        raise CheckpointError(
            f"{run / REQUEST}: another request is waiting to be taken. If nothing runs there, remove it"
        ) from None
    return name


def pending(run: Path) -> str | None:
    """Return the name of the request that waits, "" for one without a name, None where there is none."""
    try:
        return posix.read_whole(run / REQUEST, _MAX_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def withdraw(run: Path) -> None:
    """Remove the request."""
    with suppress(FileNotFoundError):
        posix.unlink(run / REQUEST)


def answer(run: Path, value: Answer) -> None:
    """Leave the answer, in place of the one before."""
    draft = run / f".{ANSWER}-{uuid.uuid4().hex}"
    posix.write_file(draft, json.dumps(asdict(value)).encode())
    with suppress(FileNotFoundError):
        posix.unlink(run / ANSWER)
    posix.rename_noreplace(draft, run / ANSWER)


def await_answer(run: Path, name: str, timeout_seconds: float) -> Answer:
    """Wait for the answer to a request. Raises: CheckpointError when none came, after withdrawing the request."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            found = _read(run / ANSWER)
            if found.request == name:
                return found
        time.sleep(0.2)
    withdraw(run)
    raise CheckpointError(
        f"{run}: no answer for {timeout_seconds:g} s. Is a run writing there, in a loop with a RunGuard, and are its "
        "steps shorter than that? --timeout-seconds waits longer"
    )


def _read(path: Path) -> Answer:
    data = posix.read_whole(path, _MAX_BYTES)
    try:
        found = Answer(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        raise CorruptCheckpointError(f"{path}: no answer of a run; remove it and ask again", str(path)) from None
    return found
