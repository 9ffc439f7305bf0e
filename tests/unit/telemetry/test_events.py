"""Telemetry: a line for each load, save and export, with its phases; a failing sink or disk ends no run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import answer
from tests.hunt.slow import Slow, interrupted
from tests.run_folder import RunFolder
from tests.world import manager as build
from tests.world import step_on
from titan_ckpt import ExportConfig, KeepConfig, SaveConfig
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.errors import SaveError
from titan_ckpt.telemetry.events import TELEMETRY, Telemetry, append_line, git_revision, read_events


def run(folder: RunFolder | Path, async_mode: Any = "thread", sinks: Any = (), steps: int = 3, **changes: Any) -> None:
    folder = RunFolder(folder) if isinstance(folder, Path) else folder
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    save = SaveConfig(interval=1, async_mode=async_mode, keep=KeepConfig(latest=1), **changes)
    with build(folder, model, optimizer, save=save, export=(ExportConfig("dcp", interval=2),)) as manager:
        for sink in sinks:
            manager.telemetry.add_sink(sink)
        start = manager.load().step
        for step in range(start + 1, start + steps + 1):
            step_on(model, optimizer, torch.ones(1, 8))
            manager.save(step, last_step=step == start + steps)


@pytest.mark.parametrize("async_mode", ["disabled", "thread"])
def test_every_load_save_and_export_is_one_line(run_folder: RunFolder, async_mode: str) -> None:
    """Steps, bytes, seconds and phases agree with the folder and with each other; a sink gets the same objects."""
    seen: list[Mapping[str, Any]] = []
    run(run_folder, async_mode, [seen.append])
    run(run_folder, async_mode)
    events = [*read_events(run_folder.base / TELEMETRY)]
    assert json.loads(json.dumps(seen, default=str)) == events[: len(seen)]
    kinds = [event["event"] for event in events]
    assert [kinds.count(kind) for kind in ("start", "load", "save", "export", "end")] == [2, 2, 6, 4, 2]
    assert [event["step"] for event in events if event["event"] == "load"] == [0, 3]
    saved_in = {event["step"]: event["folder"] for event in events if event["event"] == "save"}
    assert [event["folder"] for event in events if event["event"] == "load"] == [None, saved_in[3]]
    assert [event["step"] for event in events if event["event"] == "save"] == [1, 2, 3, 4, 5, 6]
    last = [event for event in events if event["event"] == "save"][-1]
    manifest = Manifest.from_bytes(run_folder.read(6, "MANIFEST.json"))
    assert last["num_bytes"] == sum(file.num_bytes for file in manifest.files)
    assert last["expired"] == [5]
    for event in events:
        if event["event"] in ("start", "end"):
            continue
        assert event["error"] is None
        phases = event["phases"]
        assert set(phases) >= {
            "save": {"queued", "blocking", "write", "commit", "expire"},
            "load": {"restore", "preflight"},
            "export": set(),
        }.get(event["event"], set())
        assert all(0 <= seconds <= event["seconds"] for seconds in phases.values())
        if event["event"] == "save":
            assert phases["write"] + phases["commit"] <= event["seconds"]
            assert ("staging" in phases) is (async_mode == "thread")
    exports = [event for event in events if event["event"] == "export"]
    assert [(e["step"], e["format"], e["background"]) for e in exports][:1] == [(2, "dcp", async_mode == "thread")]
    folder = Path(exports[-1]["folder"])
    assert exports[-1]["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_a_run_records_what_it_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command line without the users of URLs, versions, world size and every setting as resolved."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--mirror=https://me:secret@host/a?sig=b"])
    run(tmp_path)
    start = next(read_events(tmp_path / TELEMETRY))
    assert start["event"] == "start"
    assert start["versions"]["torch"] == torch.__version__.partition("+")[0] or start["versions"]["torch"]
    assert start["command"][1:] == ["train.py", "--mirror=https://***@host/a?***"]
    assert start["world_size"] == 1
    assert start["config"]["save"]["keep"] == {"latest": 1, "every": None, "best": None, "metric": "loss"}


def test_a_run_that_only_loads_writes_nothing(tmp_path: Path) -> None:
    """The folder may be a live run's, whose file it would garble: all files stay as they are, and sinks get events."""
    run(tmp_path, steps=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    seen: list[Mapping[str, Any]] = []
    model = nn.Linear(8, 8)
    with build(tmp_path, model, save=None) as manager:
        manager.telemetry.add_sink(seen.append)
        assert manager.load().step == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [event["event"] for event in seen] == ["start", "load", "end"]


def test_the_git_revision_is_what_git_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch, packed refs, a worktree and a detached head; no revision outside of a repository.

    A run that a hook of another repository starts has that one in its environment.
    """

    def git(*words: str, at: Path = tmp_path / "repo") -> str:
        at.mkdir(exist_ok=True)
        options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *options, *words], cwd=at, check=True, capture_output=True, text=True).stdout

    assert git_revision(tmp_path) is None or git_revision(Path("/")) is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    expected = git("rev-parse", "HEAD").strip()
    assert git_revision(tmp_path / "repo") == expected
    git("pack-refs", "--all")
    git("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "other")
    assert git_revision(tmp_path / "tree") == git_revision(tmp_path / "repo") == expected
    git("checkout", "-q", "--detach")
    assert git_revision(tmp_path / "repo") == expected
    git("init", "-q", at=tmp_path / "other")
    git("commit", "-q", "--allow-empty", "-m", "two", at=tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert git_revision(tmp_path / "repo") == expected


def test_a_failed_save_is_a_line_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is in the event, and is raised as before."""
    monkeypatch.setattr("titan_ckpt.saving.saver._write_all", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(SaveError):
        run(tmp_path, steps=1)
    saves = [event for event in read_events(tmp_path / TELEMETRY) if event["event"] == "save"]
    assert [event["step"] for event in saves] == [1]
    assert saves[0]["error"].startswith("SaveError: ")
    assert "full" in saves[0]["error"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_sink_or_a_disk_that_fails_ends_no_run(
    make: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is named once in the log; the saves are made, and other sinks get every event. A pipe holds nobody up."""
    make(tmp_path / TELEMETRY)

    def broken(values: Mapping[str, Any]) -> None:
        raise ValueError("no such server")

    seen: list[Mapping[str, Any]] = []
    with caplog.at_level(logging.WARNING):
        run(tmp_path, sinks=[broken, seen.append])
    assert (tmp_path / "checkpoints/step-3").is_dir()
    assert [event["event"] for event in seen].count("save") == 3
    assert sum("no such server" in record.getMessage() for record in caplog.records) == 1
    assert sum(TELEMETRY in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("async_mode", ["disabled", "thread"])
def test_a_sink_that_saves_is_refused_and_ends_no_run(
    async_mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would wait for the save that it is told about. The refusal is in the log, and every event is a line."""
    with build(tmp_path, nn.Linear(2, 2), async_mode=async_mode, export=(ExportConfig("dcp", interval=1),)) as manager:
        for act in (partial(manager.save, 9), manager.wait):
            manager.telemetry.add_sink(lambda values, act=act: values["event"] == "save" and act())  # type: ignore[misc]
        for step in (1, 2):
            manager.save(step)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
    assert caplog.text.count("a sink of telemetry is told about 'save' before it has ended") == 2
    kinds = [event["event"] for event in read_events(tmp_path / TELEMETRY)]
    assert [kinds.count(kind) for kind in ("save", "export")] == [2, 2]


def test_a_sink_that_makes_an_event_gets_it(tmp_path: Path) -> None:
    """No lock is held while sinks are called."""
    seen: list[str] = []
    telemetry = Telemetry(tmp_path, 0, 1, None)

    def make_another(values: Mapping[str, Any]) -> None:
        seen.append(values["event"])
        if len(seen) == 1:
            telemetry.finish()

    telemetry.add_sink(make_another)
    thread = threading.Thread(target=telemetry.start, daemon=True)
    thread.start()
    thread.join(60)
    assert seen == ["start", "end"] == [event["event"] for event in read_events(tmp_path / TELEMETRY)]


def test_lines_that_wait_for_a_disk_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses the second of two lines has the first one already."""
    path, refused = tmp_path / "run" / TELEMETRY, [False, True]

    def append(path: Path, text: str) -> None:
        if refused and refused.pop(0):
            raise OSError(28, "full")
        append_line(path, text)

    monkeypatch.setattr("titan_ckpt.telemetry.events.append_line", append)
    telemetry = Telemetry(tmp_path / "run", 0, 1, None)
    for step in (1, 2):  # there is no folder before the first load
        telemetry._emit({"event": "load", "step": step, "error": None if step > 1 else "no base"})
    telemetry._emit({"event": "save", "step": 3, "error": None})
    assert [event["step"] for event in read_events(path)] == [1, 2, 3]


def test_a_line_that_a_kill_has_cut_costs_no_other(tmp_path: Path) -> None:
    """The next event begins a line of its own; the half one is passed over."""
    path = tmp_path / TELEMETRY
    append_line(path, '{"event": "save", "step": 1}')
    with path.open("ab") as file:
        file.write(b'{"event": "save", "st')
    append_line(path, '{"event": "save", "step": 3}')
    assert [event["step"] for event in read_events(path)] == [1, 3]
    assert json.loads(path.read_text().splitlines()[0])["step"] == 1


def test_an_interrupt_at_any_opcode_of_an_event_leaves_nothing_that_the_next_one_waits_for(tmp_path: Path) -> None:
    """Another thread writes the next event at once, so that a save or close() does not wait for ever."""
    telemetry = Telemetry(tmp_path, 0, 1, None)
    for at in itertools.count():
        with suppress(KeyboardInterrupt), interrupted(Slow(), f"all@{at}"):
            with telemetry.event("load"):
                pass
            break
        thread = threading.Thread(target=telemetry.finish, daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive(), f"the event after an interrupt before opcode {at} is waited for"
    assert at > 100
    events = [event["event"] for event in read_events(tmp_path / TELEMETRY)]
    assert events.count("end") == at


def test_an_event_that_cannot_be_written_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings and values of a user's own that are no JSON, or cannot be copied, and a sink that cannot be shown."""

    @dataclass
    class Settings:
        lock: Any

    class Unshown:
        def __call__(self, values: Mapping[str, Any]) -> None: ...

        def __repr__(self) -> str:
            raise RuntimeError("not built yet")

        __str__ = __repr__

    telemetry = Telemetry(tmp_path, 0, 1, Settings(threading.Lock()))
    telemetry.add_sink(Unshown())
    telemetry.start()
    telemetry.settings = {("a", 1): 2, "value": 3}
    telemetry.start()
    for step, value in enumerate((Unshown(), 1)):
        with telemetry.event("save", step=step, value=value):
            pass
    events = [*read_events(tmp_path / TELEMETRY)]
    assert [(event["event"], event.get("step")) for event in events] == [("start", None), ("save", 1)]
    assert events[0]["config"] == {"value": 3}
    assert "cannot pickle" in caplog.text and "not built yet" in caplog.text


def test_a_line_of_which_a_full_disk_takes_a_part_is_written_when_there_is_room(tmp_path: Path) -> None:
    """write(2) says how much it has taken, and fails only if that is nothing."""

    def run() -> list[int]:
        telemetry = Telemetry(tmp_path, 0, 1, None)
        telemetry._emit({"event": "save", "step": 1, "error": None})
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (tmp_path / TELEMETRY).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, most[1]))
        telemetry._emit({"event": "save", "step": 2, "error": None})
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        telemetry._emit({"event": "save", "step": 3, "error": None})
        return [event["step"] for event in read_events(tmp_path / TELEMETRY)]

    assert answer(run) == ([1, 2, 3], 0)
