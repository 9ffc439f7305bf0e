"""The report of a run: every figure in the page is the one in the run's files, and nothing comes from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.forked import fork
from tests.tiny_run import AfterStep, settings
from titan_ckpt.cli.main import main
from titan_ckpt.errors import size
from titan_ckpt.telemetry.events import TELEMETRY, read_events
from titan_ckpt.tools.listing import list_run
from titan_ckpt.tools.report import ticks
from titan_ckpt.training.trainer import Trainer


def kill(trainer: Trainer) -> None:
    """End the process without a word."""
    trainer.manager.wait()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after step 5, resumed from step 4 and finished, with an export."""
    folder = tmp_path_factory.mktemp("report")
    checkpoint = {"save": {"interval": 2, "keep": {"latest": 2}}, "export": [{"format": "hf"}]}
    training, evaluation = {"steps": 8, "log_interval": 1}, {"interval": 4, "max_sequences": 2}
    config = settings(folder, training=training, checkpoint=checkpoint, evaluation=evaluation, data={"held_out": 0.2})
    pid = fork(Trainer(config, callbacks=[AfterStep(5, kill)]).run)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    Trainer(config).run()
    return folder / "run"


class Page(HTMLParser):
    """The sections of a page: id -> rows of its tables, as text; and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self._section = ""
        self._cell: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "polyline", "br"):
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"]
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, f"{tag} closes another element"
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._section][-1].append(self._cell)
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell += data


def test_the_page_has_the_figures_of_the_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss, steps, sizes, saves with their phases, the kill and the resume, retention, export, versions, settings."""
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [*read_events(run / TELEMETRY)]
    assert (told["last step"], told["loss"]) == ("8", f"{rows[-1]['loss']:.4f}")
    assert told["starts"] == "2"
    captions = [re.sub("<.*?>", "", caption) for caption in re.findall("<figcaption>(.*?)</figcaption>", text)]
    plots = ({"loss": "loss", "eval/loss": "evaluation loss"}, {"grad_norm": "gradient norm"}, {"lr": "learning rate"})
    for caption, columns in zip(captions, plots, strict=True):
        lines = []
        for column, name in columns.items():
            of = {row["step"]: row[column] for row in rows if column in row}
            lowest, highest = min(of.values()), max(of.values())
            lines.append(f"{name} of steps {min(of)} to {max(of)}, from {lowest:.4g} to {highest:.4g}")
        assert caption == "; ".join([*lines, "dashed: a resume"])
    assert (text.count("resumed from step 4"), text.count('<div class="bar">')) == (3, 4)
    assert told["evaluation loss"] == f"{[row['eval/loss'] for row in rows if 'eval/loss' in row][-1]:.4f}"
    listing = list_run(run)
    head, *steps = page.tables["steps"]
    assert head == ["step", "kind", "saved", "loss", "size", "ranks", "remarks"]
    assert [[r[0], r[3], r[4]] for r in steps] == [
        [str(s.step), f"{s.metrics['loss']:.4f}", size(s.num_bytes)] for s in listing.steps
    ]
    head, *saves = page.tables["saves"]
    expected = [event for event in events if event["event"] == "save"]
    assert [row[0] for row in saves] == [str(event["step"]) for event in expected] == ["2", "4", "6", "8"]
    for row, event in zip(saves, expected, strict=True):
        found = dict(zip(head, row, strict=True))
        assert found["size"] == size(event["num_bytes"])
        assert found["write s"] == f"{event['phases']['write']:.3f}"
        assert found["blocking s"] == f"{event['phases']['blocking']:.3f}"
    _, first, second = page.tables["starts"]
    assert (first[2:4], first[5]) == (["start", "4"], "killed")
    assert (second[2:4], re.fullmatch(r"[\d: -]+", second[5]) is not None) == (["4", "8"], True)
    assert page.tables["exports"][1][:2] == ["exports/step-8", "hf"]
    deleted = sorted({2, 4, 6, 8} - {step.step for step in listing.steps})
    count = f"{len(deleted)} step{'s' * (len(deleted) > 1)}"
    assert f"Retention has deleted {count}: {', '.join(map(str, deleted))}." in text
    versions: dict[str, str] = dict(page.tables["settings"])
    start = [event for event in events if event["event"] == "start"][-1]
    assert start["versions"].items() <= versions.items()
    assert "&quot;sequence_length&quot;: 16" in text


def test_the_total_time_is_that_in_which_the_run_was_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From each start to its end, or to the last event or row of a process that was killed."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "unix_seconds": 1060.0}\n')
    events = [
        {"event": "start", "unix_seconds": 1000.0},
        {"event": "save", "unix_seconds": 1010.0, "seconds": 30.0},
        {"event": "start", "unix_seconds": 5000.0},
        {"event": "save", "unix_seconds": 5010.0, "seconds": 90.5},
    ]
    (tmp_path / TELEMETRY).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total time"] == "0:02:40"
    _, first, second = Page((tmp_path / "report.html").read_text()).tables["starts"]
    assert (first[6], second[6]) == ("0:01:00", "0:01:40")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 8, [0, 2, 4, 6, 8]), (4.95, 7.63, [5, 5.5, 6, 6.5, 7, 7.5]), (3.3e-4, 4e-3, [1e-3, 2e-3, 3e-3, 4e-3]),
     (1, 240, [50, 100, 150, 200]), (2, 2, [2]), (1, 2, [1, 1.2, 1.4, 1.6, 1.8, 2]), (1e16, 1e16 + 2, [1e16])],
)  # fmt: skip
def test_axes_have_round_numbers(low: float, high: float, expected: list[float]) -> None:
    """At most six, within the values, evenly spaced."""
    assert ticks(low, high) == pytest.approx(expected)


def test_axes_have_ticks_and_tables_scroll_on_their_own(run: Path) -> None:
    """A narrow screen does not shrink labels, which are text; the first column stays while a table moves."""
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    for plot in re.findall(r"<figure>.*?</figure>", text):
        assert re.findall(r'<span class="x" style="left:[\d.]+%">(\d+)</span>', plot) == ["2", "4", "6", "8"]
        assert 2 <= len(re.findall(r'<span class="y"', plot)) <= 6
    assert text.count("<table>") == text.count('<div class="wide" tabindex="0"><table>') > 3
    assert ".wide { overflow-x: auto; }" in text
    assert ".wide :is(th, td):first-child { position: sticky; left: 0;" in text


def test_the_page_needs_nothing_from_elsewhere(run: Path) -> None:
    """No script, no address, no file of its own; it says its width, so that a phone shows it readable."""
    assert main(["report", str(run), "-o", str(run / "page.html")]) == 0
    text = (run / "page.html").read_text()
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "object")]
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href", "xlink:href", "action")]
    assert "http" not in text.replace("&quot;", "").split("<section")[0]
    assert "@import" not in text
    assert "url(" not in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "@media print" in text
    assert "@media screen and (prefers-color-scheme: dark)" in text, "paper is white"


def test_a_run_with_hostile_names_cannot_inject_html(tmp_path: Path) -> None:
    """The page shows the content of a file as text."""
    (tmp_path / "run").mkdir()
    bad = "<script>alert(1)</script>"
    (tmp_path / "run/metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "lr": NaN}\n{"step": 2, "loss": Infinity}\ncut'
    )
    lines = [{"event": "start", "host": bad, "config": {"a": bad}}, {"event": "save", "step": 1, "error": bad}]
    (tmp_path / "run" / TELEMETRY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run/report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_steps_alone_make_a_page(run: Path, tmp_path: Path) -> None:
    """The telemetry of a run may be lost, or never have been written."""
    steps = Path(shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints")).parent
    assert main(["report", str(steps)]) == 0
    assert "step" in (steps / "report.html").read_text()


@pytest.mark.parametrize(
    "line",
    [{"event": "start", "world_size": "x"}, {"event": "start", "unix_seconds": 1e300}, {"event": "save", "step": "x"},
     {"event": "save", "phases": [1]}, {"event": "save", "expired": 5}, {"event": "export", "folder": 5}, {}],
)  # fmt: skip
def test_lines_that_no_run_would_write_are_passed_over(tmp_path: Path, line: dict[str, Any]) -> None:
    """As one that a kill has cut: the page is written from the others, and so it is without any."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    (run / TELEMETRY).write_text(json.dumps(line) + "\n")
    assert main(["report", str(run)]) == 0
    assert "<polyline" in (run / "report.html").read_text()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and no page."""
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
