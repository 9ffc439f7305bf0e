"""Requests to a running job to save: files in its folder with the request, the answer, and the process that takes it.

Owns the three files. Knows no manager and sends no signal: any user who may write into the run's folder may ask.

Only the name of the file `save-request` counts, so `touch` makes one; its text, if any, names the request in the
answer.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_ckpt.disk import posix
from titan_ckpt.disk.kernel import Holder, holder_from
from titan_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SaveError

REQUEST = "save-request"
ANSWER = "save-answer.json"
TAKER = "save-taker.json"
"""The process that takes requests; it is there as long as the run is in its loop, and longer if it was killed."""
PIN = " pin"
"""End of the text of a request whose step is to be pinned."""
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the step that was saved, or the error."""

    request: str
    step: int
    error: str | None = None


def ask(run: Path, *, pin: bool = False) -> str:
    """Write a request and return its name. `pin`: the run pins the step before it may expire.

    Raises: CheckpointNotFoundError if no run can be there; CheckpointError if a request is waiting.
    """
    if not run.is_dir():
        raise CheckpointNotFoundError(f"{run} is no folder; name the folder that the run writes into (output_folder)")
    taker = _taker(run)
    if taker is None or not (taker.lives_here() or taker.may_live_elsewhere()):
        was = "there is no save-taker.json" if taker is None else f"{taker} has ended"
        raise CheckpointNotFoundError(
            f"{run}: no run is in its training loop here: {was}. Start it again, or name the folder it writes into "
            "(output_folder, or the manager's base_folder); a loop of your own needs a RunGuard"
        )
    name = uuid.uuid4().hex
    draft = run / f".{REQUEST}-{name}"
    name += PIN if pin else ""
    try:
        posix.write_file(draft, name.encode())
        posix.rename_noreplace(draft, run / REQUEST)
    except FileExistsError:
        raise CheckpointError(
            f"{run / REQUEST}: another request is waiting to be taken. If nothing runs there, remove it"
        ) from None
    finally:
        with suppress(FileNotFoundError):
            posix.unlink(draft)
    return name


def announce(run: Path) -> None:
    """Say that this process takes requests. Raises: OSError."""
    posix.replace_file(run / TAKER, json.dumps(asdict(Holder.current())).encode())


def retire(run: Path) -> None:
    """Say that this process takes no requests any more; its successor may have announced itself already."""
    with suppress(OSError):
        taker = _taker(run)
        if taker is not None and taker.pid == os.getpid() and taker.lives_here():
            posix.unlink(run / TAKER)


def _taker(run: Path) -> Holder | None:
    try:
        return holder_from(json.loads(posix.read_whole(run / TAKER, _MAX_BYTES)))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def take(run: Path) -> str | None:
    """Remove the waiting request and return its name, "" if it has none; None if there is no request.

    Raises: OSError for a folder, a link or a pipe of that name, which stays, and for a request that cannot be removed.
    """
    if (name := _waiting(run)) is None:
        return None
    with suppress(FileNotFoundError):
        posix.unlink(run / REQUEST)
    return name


def _waiting(run: Path) -> str | None:
    try:
        return posix.read_whole(run / REQUEST, _MAX_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def answer(run: Path, value: Answer) -> None:
    """Write the answer and replace an earlier one. Raises: OSError."""
    posix.replace_file(run / ANSWER, json.dumps(asdict(value)).encode())


def await_answer(run: Path, name: str, timeout_seconds: float) -> Answer:
    """Wait for the answer to a request; withdraw the request after the timeout. Raises: SaveError then."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            data = posix.read_whole(run / ANSWER, _MAX_BYTES)
            try:
                latest = Answer(**json.loads(data))
            except (ValueError, TypeError, RecursionError):
                fault = f"{run / ANSWER}: no answer of a run; remove it and ask again"
                raise CorruptCheckpointError(fault, str(run / ANSWER)) from None
            if latest.request == name:
                return latest
        time.sleep(0.2)
    if _waiting(run) == name:  # else the run has it, and what waits is another process's
        take(run)
    raise SaveError(
        f"{run}: no answer for {timeout_seconds:g} s. Is a run writing there, in a loop with a RunGuard, and are its "
        "steps shorter than that? --timeout-seconds waits longer"
    )
