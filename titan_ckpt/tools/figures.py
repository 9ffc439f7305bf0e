"""The figures of a run's report, read from the files that the run left. Decides nothing about their looks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_ckpt.errors import CheckpointNotFoundError, NotACheckpointError
from titan_ckpt.telemetry.events import METRICS, TELEMETRY, read_events
from titan_ckpt.tools.listing import Listing, list_run

_MOST = {"unix_seconds": 2.2e11, "seconds": 2.2e11, "num_bytes": 2**63, "world_size": 2**31}
"""Larger numbers are not believed; the calendar ends at the first."""


@dataclass(frozen=True, slots=True)
class Session:
    """One process of the run, from its start to its end or to the kill that left no end."""

    started: float
    host: str
    world_size: int
    resumed_step: int | None
    """The step that it went on from; None if it did not finish loading."""
    saved_step: int | None
    """The last step that it saved."""
    ended: float | None
    """None: it was killed, or is still running."""
    failures: int
    """Number of loads, saves and exports that failed."""
    seconds: float
    """From its start to its end, or to its last sign of life."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that a report shows."""

    folder: str
    metrics: tuple[Mapping[str, Any], ...]
    saves: tuple[Mapping[str, Any], ...]
    exports: tuple[Mapping[str, Any], ...]
    loads: tuple[Mapping[str, Any], ...]
    sessions: tuple[Session, ...]
    listing: Listing | None
    """None if the run has saved nothing yet."""
    start: Mapping[str, Any]
    """The last event "start": versions, command and settings."""


def waited(save: Mapping[str, Any]) -> float:
    """Return the time for which training waited for one save."""
    return sum(phase(save, name) for name in ("queued", "blocking", "stall"))


def phase(event: Mapping[str, Any], name: str) -> float:
    """Return the seconds of one phase; 0 if the event has none of this name."""
    phases = event.get("phases")
    value = phases.get(name, 0.0) if isinstance(phases, Mapping) else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def read_figures(run: Path) -> Figures:
    """Read a run's folder. Raises: CheckpointNotFoundError; NotACheckpointError if no run has written there."""
    if not run.is_dir():
        raise CheckpointNotFoundError(f"{run} is no folder; name a run's folder")
    metrics = [row for row in read_events(run / METRICS) if type(s := row.get("step")) is int and 0 <= s < 2**53]
    events = [event for event in read_events(run / TELEMETRY) if _is_sound(event)]
    listing = None
    with contextlib.suppress(NotACheckpointError):
        listing = list_run(run)
    if not (metrics or events or listing):
        raise NotACheckpointError(f"{run} holds no {METRICS}, no {TELEMETRY} and no checkpoints; name a run's folder")
    of_kind = {kind: tuple(e for e in events if e.get("event") == kind) for kind in ("save", "export", "load", "start")}
    return Figures(
        str(run),
        tuple(metrics),
        of_kind["save"],
        of_kind["export"],
        of_kind["load"],
        tuple(_sessions(events, [time for row in metrics if isinstance(time := row.get("unix_seconds"), float)])),
        listing,
        of_kind["start"][-1] if of_kind["start"] else {},
    )


def _is_sound(event: Mapping[str, Any]) -> bool:
    """Return whether a line says what a run would write; any other one is passed over, as one that a kill has cut."""
    step, error, expired = event.get("step", 0), event.get("error"), event.get("expired", [])
    command = event.get("command", [])
    return (
        all(type(n := event.get(name, 0)) in (int, float) and 0 <= n < most for name, most in _MOST.items())
        and all(isinstance(event.get(name, {}), dict) for name in ("phases", "versions", "config"))
        and isinstance(event.get("git"), str | None)
        and isinstance(command, list)
        and all(isinstance(part, str) for part in command)
        and isinstance(expired, list)
        and all(type(value) is int for value in expired)
        and (step is None or type(step) is int)
        and (error is None or isinstance(error, str))
        and all(isinstance(event.get(name, ""), str) for name in ("event", "host", "format", "kind"))
        and isinstance(event.get("folder"), str | None)
    )


def _sessions(events: Sequence[Mapping[str, Any]], row_times: Sequence[float]) -> Iterator[Session]:
    """Yield the processes of the run. `row_times`: when rows of metrics.jsonl were written, as unix seconds."""
    starts = [i for i, event in enumerate(events) if event.get("event") == "start"]
    for first, after in pairwise([*starts, len(events)]):
        own = events[first:after]
        started = own[0].get("unix_seconds", 0.0)
        next_start = events[after].get("unix_seconds", math.inf) if after < len(events) else math.inf
        seen = [event.get("unix_seconds", started) + event.get("seconds", 0.0) for event in own]
        seen += [time for time in row_times if started <= time < next_start]
        newest = {event.get("event"): event for event in own if event.get("error") is None}
        yield Session(
            started,
            str(own[0].get("host", "")),
            int(own[0].get("world_size", 1)),
            newest.get("load", {}).get("step"),
            newest.get("save", {}).get("step"),
            newest.get("end", {}).get("unix_seconds"),
            sum(event.get("error") is not None for event in own if event.get("event") != "end"),
            min(max(seen) - started, _MOST["seconds"]),
        )
