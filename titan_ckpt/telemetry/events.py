"""Events of a run: one JSON object in a line for every load, save and export, in telemetry.jsonl and to your own sinks.

Owns how an event is timed and written, and what a process was started with (the event "start"). A sink or a disk that
fails is logged once and never ends a run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import json
import logging
import os
import platform
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from titan_ckpt.errors import CheckpointError, without_credentials

TELEMETRY = "telemetry.jsonl"
METRICS = "metrics.jsonl"
"""The file beside it with a row for each step that a trainer has reported."""
Kind = Literal["load", "save", "export"]
Sink = Callable[[Mapping[str, Any]], None]
"""Gets every event of rank 0, in the thread that made it, when the event has ended. Two threads may call it at once."""

_PACKAGES = ("titan-ckpt", "torch", "transformers", "peft", "torchao", "torchtitan", "safetensors", "numpy")

logger = logging.getLogger(__name__)


class Event:
    """An event that is under way. Its phases may be timed by any thread, one thread for each phase."""

    def __init__(self, kind: Kind, /, **values: Any) -> None:
        self._kind, self._values = kind, values
        self._phases: dict[str, float] = {}
        self._running: dict[str, float] = {}
        self._unix_seconds = time.time()
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase; a phase that is running when the event ends counts until then."""
        started = self._running[name] = time.perf_counter()
        try:
            yield
        finally:
            self._running.pop(name, None)
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def note(self, **values: Any) -> None:
        """Add values to the event."""
        self._values |= values

    def ended(self, error: BaseException | None) -> dict[str, Any]:
        """Return the event's object."""
        now = time.perf_counter()
        running = {name: self._phases.get(name, 0.0) + now - started for name, started in self._running.copy().items()}
        return {
            "event": self._kind,
            "unix_seconds": round(self._unix_seconds, 6),
            "seconds": round(now - self._started, 6),
            **self._values,
            "phases": {name: round(seconds, 6) for name, seconds in (self._phases | running).items()},
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }


class Telemetry:
    """Writes the events of one run; only rank 0 writes and calls sinks, all ranks may time."""

    def __init__(self, folder: Path | None, rank: int, world_size: int, settings: object) -> None:
        """Bind to a run's folder; nothing is written before the first event, and without a folder only sinks get it."""
        self.settings = settings
        """The configuration of the run, for the event "start": a dataclass, or a dict of plain values."""
        self._path = None if folder is None else folder / TELEMETRY
        self._rank = rank
        self._world_size = world_size
        self._sinks: list[Sink] = []
        self._failed: set[str] = set()
        self._waiting: deque[str] = deque()
        self._in_sink = threading.local()

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with every later event."""
        self._sinks.append(sink)

    def refuse_in_sink(self) -> None:
        """Raise CheckpointError in a sink, whose call would wait for the save, load or export that it is told about."""
        if event := getattr(self._in_sink, "event", None):
            raise CheckpointError(
                f"a sink of telemetry is told about {event!r} before it has ended, and on rank 0 alone, so that it "
                "cannot save, load, export or wait: let it set a flag, and do so after the next step"
            )

    def start(self) -> None:
        """Write what this process was started with: versions, command line, git revision and settings."""
        if self._rank == 0:
            self._try("the event of the start", lambda: self._emit(describe_start(self._world_size, self.settings)))

    def finish(self) -> None:
        """Write that this process ended the run's saves in order; a killed one leaves no such line."""
        if self._rank == 0:
            self._emit({"event": "end", "unix_seconds": round(time.time(), 6)})

    @contextlib.contextmanager
    def event(self, kind: Kind, /, **values: Any) -> Iterator[Event]:
        """Time the block as an event. An error of the block is noted in the event, and raised."""
        event = Event(kind, **values)
        with self.ending(event):
            yield event

    @contextlib.contextmanager
    def ending(self, event: Event) -> Iterator[None]:
        """Write the event when the block ends, with the block's error if there is one."""
        with self.failing(event):
            yield
        self._end(event, None)

    @contextlib.contextmanager
    def failing(self, event: Event) -> Iterator[None]:
        """Write the event if the block fails."""
        try:
            yield
        except BaseException as error:
            self._end(event, error)
            raise

    def _end(self, event: Event, error: BaseException | None) -> None:
        if self._rank == 0:
            self._emit(event.ended(error))

    def _emit(self, values: Mapping[str, Any]) -> None:
        if self._path is not None:
            self._try("the file", partial(self._write, self._path, values))
        outer, self._in_sink.event = getattr(self._in_sink, "event", None), values["event"]
        try:
            for number, sink in enumerate(self._sinks):  # the repr of a model's method is as long as the model's
                name = getattr(sink, "__qualname__", type(sink).__qualname__)
                self._try(f"sink {number} ({name})", partial(sink, values))
        finally:
            self._in_sink.event = outer

    def _write(self, path: Path, values: Mapping[str, Any]) -> None:
        """Append an event to the file. A start that comes to nothing makes no folder: its lines wait for the next.

        Threads write beside each other without a lock, which an interrupt might leave locked. One line is written at a
        time: a disk that is full for a while gets no line twice. Lines that wait are text, which can be written.
        """
        self._waiting.append(json.dumps(values, default=str, skipkeys=True))
        if path.parent.is_dir() or (values["event"] not in ("start", "end") and not values["error"]):
            with contextlib.suppress(IndexError):  # all lines are taken
                while line := self._waiting.popleft():
                    try:
                        append_line(path, line)
                    except BaseException:
                        self._waiting.appendleft(line)
                        raise

    def _try(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if what not in self._failed:
                where = f"{self._path or TELEMETRY}: {what}"
                logger.warning(f"{where} has failed, and an event is missing; the run goes on: {error}")
            self._failed.add(what)


def append_line(path: Path, text: str) -> None:
    """Append a line, in one write; a line that a kill or a full disk has cut stays alone.

    Raises: OSError, also for a pipe of that name, for whose reader nothing waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        is_cut = status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"
        before = "\n" if is_cut else ""
        line = f"{before}{text}\n".encode()
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a telemetry.jsonl; a line that a kill or a full disk has cut is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


def describe_start(world_size: int, config: object) -> dict[str, Any]:
    """Return the event "start". `config`: the settings as resolved, a dataclass or a dict."""
    settings: Any = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return {
        "event": "start",
        "unix_seconds": round(time.time(), 6),
        "command": [sys.executable, *map(without_credentials, sys.argv)],
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "world_size": world_size,
        "versions": {"python": platform.python_version(), **_versions()},
        "git": _started_from(Path(sys.argv[0] or "."), Path.cwd()),
        "config": settings,
    }


@functools.cache  # the metadata of a package is parsed whole, which takes longer than the rest of a start
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache  # each is a process; a later commit is not what this process was started from
def _started_from(script: Path, folder: Path) -> str | None:
    return git_revision(script) or git_revision(folder)


def git_revision(path: Path) -> str | None:
    """Return the commit that is checked out where a path is; None without one, and where git is not installed."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    command = ["git", "-c", "safe.directory=*", "rev-parse", "--verify", "HEAD"]  # also of another owner's repository
    here = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set by a hook of git
    try:
        found = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else found.stdout.strip()
