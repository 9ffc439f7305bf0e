"""One self-contained HTML page about a run: no script, no network, readable on a phone, in the dark and in print."""

from __future__ import annotations

import html
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from titan_ckpt.errors import size
from titan_ckpt.tools.figures import Figures, Session, phase, read_figures, waited

_MAX_ROWS = 60
"""Rows of a table; the newest are shown, and a sentence says how many there are."""
_LINES = (
    (("loss", "loss", "--a"), ("eval/loss", "evaluation loss", "--b")),
    (("grad_norm", "gradient norm", "--d"),),
    (("lr", "learning rate", "--c"),),
)
"""The plots: (column of metrics.jsonl, name, CSS colour) of each line."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6778; --line: #d9dee6; --page: #fff; --card: #f6f8fa;
  --a: #2563c9; --b: #c2571a; --c: #2e8b57; --d: #8b5cb5; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa5b5; --line: #333c4a;
  --page: #14181f; --card: #1b212a; --a: #6ea8ff; --b: #f0955a; --c: #5fc98d; --d: #bf95e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .2rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); font-size: .85rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .85rem; }
.wide :is(th, td):first-child { position: sticky; left: 0; background: var(--page); padding-right: .8rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.w { white-space: normal; overflow-wrap: anywhere; min-width: 10rem; }
figure { margin: 0; }
.bar { display: flex; gap: .5rem; height: 1.3rem; font-size: .85rem; print-color-adjust: exact; }
.bar span { flex: 0 0 5.5rem; } .bar div { flex: 1; display: flex; min-width: 0; } .bar b { flex: 0 0 4.5rem; }
.bad { color: var(--b); } pre { background: var(--card); padding: .8rem; overflow-x: auto; font-size: .8rem; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { white-space: normal; padding-right: .5rem; } td.w { min-width: 0; }
  details > pre { white-space: pre-wrap; }
  h2 { break-after: avoid; } tr, figure { break-inside: avoid; } }
.plot { position: relative; height: 12rem; margin: .6rem .8rem 1.6rem 4.2rem; font-size: .75rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; fill: none; stroke-width: 2; overflow: visible; }
.plot svg * { vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; } .dashed { stroke: var(--soft); stroke-dasharray: 4 3; }
.plot span { position: absolute; color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.plot .y { right: 100%; padding-right: .5rem; transform: translateY(50%); }
.plot .x { top: 100%; padding-top: .2rem; transform: translateX(-50%); }
"""
_MAX_STRETCHES = 300
"""A drawn line has at most this many stretches, and each stretch has two points."""
_MAX_TICKS = 6
_RESUME = '<path class="dashed" d="M{:.1f} 0V200"><title>resumed from step {}</title></path>'


def write_report(run: Path, output: Path) -> dict[str, Any]:
    """Write the page of a run, whole or not at all, and return its main figures. Raises: as read_figures; OSError."""
    figures = read_figures(run)
    draft = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.write_text(page(figures), encoding="utf-8", errors="backslashreplace")
        os.replace(draft, output)
    finally:
        draft.unlink(missing_ok=True)
    return dict(_headline(figures))


def page(figures: Figures) -> str:
    """Return the page."""
    name = Path(figures.folder).resolve().name
    cards = "".join(f"<div><b>{_text(value)}</b>{_text(title)}</div>" for title, value in _headline(figures))
    parts = [
        f"<h1>{_text(name)}</h1>",
        f'<p class="soft">{_text(Path(figures.folder).resolve())}</p>',
        f'<div class="cards">{cards}</div>',
        *_section("Loss, gradients and learning rate", _training(figures)),
        *_section("Saves", _saves(figures)),
        *_section("Starts, kills and resumes", _sessions(figures.sessions)),
        *_section("Steps on disk", _steps(figures)),
        *_section("Exports", _exports(figures)),
        *_section("Settings and versions", _start(figures.start)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(name)}: titan-ckpt report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _headline(figures: Figures) -> Iterator[tuple[str, str]]:
    if figures.metrics:
        last = figures.metrics[-1]
        yield "last step", str(last["step"])
        if isinstance(last.get("loss"), (int, float)):
            yield "loss", f"{last['loss']:.4f}"
        evaluated = [row["eval/loss"] for row in figures.metrics if _is_finite(row.get("eval/loss"))]
        if evaluated:
            yield "evaluation loss", f"{evaluated[-1]:.4f}"
        if isinstance(last.get("tokens_per_second"), (int, float)):
            yield "tokens per second", f"{last['tokens_per_second']:,.0f}"
    if figures.listing is not None:
        yield "steps on disk", str(len(figures.listing.steps))
        yield "size of all steps", size(sum(step.num_bytes for step in figures.listing.steps))
    done = [save for save in figures.saves if save.get("error") is None]
    if figures.saves:
        yield "saves", str(len(done))
        yield "training waited", f"{sum(map(waited, figures.saves)):.2f} s"
    failed = sum(event.get("error") is not None for event in (*figures.saves, *figures.exports, *figures.loads))
    if failed:
        yield "failed", str(failed)
    if figures.sessions:
        yield "starts", str(len(figures.sessions))
        yield "total time", _span(sum(session.seconds for session in figures.sessions))


def _section(title: str, parts: Iterable[str]) -> list[str]:
    """Return a section, or nothing if it has no content."""
    content = [*parts]
    return [
        f'<section id="{title.split()[0].lower().strip(",")}">',
        f"<h2>{title}</h2>",
        *content,
        "</section>",
    ] * bool(content)


def _training(figures: Figures) -> Iterator[str]:
    resumed = [s.resumed_step for s in figures.sessions[1:] if s.resumed_step]
    for shown in _LINES:
        lines = []
        for column, name, color in shown:
            points = [(row["step"], float(row[column])) for row in figures.metrics if _is_finite(row.get(column))]
            if len(points) > 1:
                lines.append(Line(name, color, points))
        if lines:
            yield plot(lines, resumed)


def _saves(figures: Figures) -> Iterator[str]:
    shown = figures.saves[-_MAX_ROWS:]
    if not shown:
        return
    longest = max(sum(seconds for _, seconds, _ in _parts(save)) for save in shown[-20:]) or 1.0
    for save in shown[-20:]:
        parts = "".join(
            f'<i style="width:{seconds / longest:.1%};background:var({color})" title="{name}: {seconds:.3f} s"></i>'
            for name, seconds, color in _parts(save)
        )
        total = f"{sum(seconds for _, seconds, _ in _parts(save)):.2f} s"
        yield f'<div class="bar"><span>step {_text(save.get("step"))}</span><div>{parts}</div><b>{total}</b></div>'
    names = ", ".join(f'<b style="color:var({color})">{name}</b>' for name, _, color in _parts(shown[-1]))
    yield f'<p class="soft">Seconds of the last saves: {names}; all but the first part run beside training.</p>'
    columns = ("step", "kind", "begun", "size", "waited s", "queued s", "blocking s", "stall s", "copy s", "write s")
    yield _table(
        (*columns, "commit s", "result"),
        [
            (
                save.get("step"),
                save.get("kind"),
                _time(save.get("unix_seconds")),
                size(save.get("num_bytes", 0)),
                f"{waited(save):.3f}",
                *(f"{phase(save, name):.3f}" for name in ("queued", "blocking", "stall", "staging", "write", "commit")),
                save.get("error") or "saved",
            )
            for save in shown
        ],
        len(figures.saves),
    )


def _sessions(sessions: Sequence[Session]) -> Iterator[str]:
    rows = []
    for number, session in enumerate(sessions, 1):
        last = number == len(sessions)
        end = _time(session.ended) if session.ended else "running, or killed" if last else "killed"
        resumed = "not loaded" if session.resumed_step is None else session.resumed_step or "start"
        saved = "" if session.saved_step is None else session.saved_step
        where = f"{session.host}, {session.world_size} rank{'s' * (session.world_size > 1)}"
        ran = _span(session.seconds)
        rows.append((number, _time(session.started), resumed, saved, session.failures, end, ran, where))
    if rows:
        columns = ("start", "time", "went on from step", "last saved", "failures", "ended", "ran", "where")
        yield _table(columns, rows[-_MAX_ROWS:], len(rows))


def _steps(figures: Figures) -> Iterator[str]:
    listing = figures.listing
    if listing is None:
        return
    rows = [
        (step.step, step.kind, _time(step.created_unix_seconds), *step.cells[1:]) for step in listing.steps[-_MAX_ROWS:]
    ]
    yield _table(("step", "kind", "saved", "loss", "size", "ranks", "remarks"), rows, len(listing.steps))
    deleted = [step for save in figures.saves for step in save.get("expired", []) or []]
    if deleted:
        newest = ", ".join(map(str, deleted[-20:]))
        count = f"{len(deleted)} step{'s' * (len(deleted) > 1)}"
        yield f"<p>Retention has deleted {count}: {'..., ' if len(deleted) > 20 else ''}{newest}.</p>"
    for name, reason in listing.rejected:
        yield f'<p class="bad">{_text(name)} cannot be loaded: {_text(reason)}</p>'


def _exports(figures: Figures) -> Iterator[str]:
    if figures.listing is None or not figures.listing.exports:
        return
    seconds = {Path(str(e.get("folder"))).name + str(e.get("format")): e.get("seconds") for e in figures.exports}
    rows = []
    for export in figures.listing.exports:
        path = Path(export.path)
        took = seconds.get(path.name + export.format.partition(",")[0])
        proof = "read back and compared when it was published" if export.changed is None else export.changed
        name = os.path.relpath(path, figures.folder)
        rows.append((name, export.format, size(export.num_bytes), "" if took is None else f"{took:.2f}", proof))
    yield _table(("export", "format", "size", "seconds", "proof"), rows[-_MAX_ROWS:], len(rows))


def _start(start: Mapping[str, Any]) -> Iterator[str]:
    if not start:
        return
    versions = start.get("versions")
    rows = [*(versions.items() if isinstance(versions, Mapping) else ()), ("git", start.get("git") or "no repository")]
    rows.append(("command", " ".join(map(str, start.get("command") or ()))))
    yield _table(("what", "value"), rows, len(rows))
    config = json.dumps(start.get("config"), indent=1, default=str)
    yield f"<details><summary>Settings as resolved</summary><pre>{_text(config)}</pre></details>"


def _parts(save: Mapping[str, Any]) -> tuple[tuple[str, float, str], ...]:
    """Return the parts of a save as (name, seconds, CSS colour)."""
    return (
        ("training waits", waited(save), "--b"),
        ("copy", phase(save, "staging"), "--d"),
        ("write", phase(save, "write"), "--a"),
        ("commit", phase(save, "commit") + phase(save, "expire"), "--c"),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], total: int) -> str:
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    head = "".join(f"<th{_class(is_n)}>{_text(c)}</th>" for c, is_n in zip(columns, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(is_n, str(cell))}>{_text(cell)}</td>" for cell, is_n in zip(row, numeric, strict=True))
        + "</tr>\n"
        for row in rows
    )
    more = f'<p class="soft">The newest {len(rows)} of {total}.</p>' if total > len(rows) else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>{more}'


def _class(is_number: bool, cell: str = "") -> str:
    return ' class="n"' if is_number else ' class="w"' if len(cell) >= 40 else ""


def _is_number(cell: object) -> bool:
    text = str(cell)
    return text == "" or text.split()[0].replace(".", "", 1).replace(",", "").lstrip("-").isdigit()


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300  # also false for NaN


def _span(seconds: float) -> str:
    return str(timedelta(seconds=min(round(seconds), 10**13)))


def _time(unix_seconds: object) -> str:
    if not isinstance(unix_seconds, (int, float)):
        return ""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _text(value: object) -> str:
    return html.escape("" if value is None else str(value))


@dataclass(frozen=True, slots=True)
class Line:
    """Values by step, in the order of the steps, as finite numbers."""

    name: str
    color: str
    """The name of a CSS variable."""
    points: Sequence[tuple[int, float]]


def plot(lines: Sequence[Line], resumed: Iterable[int]) -> str:
    """Return a figure with axes. `resumed`: steps that get a dashed mark. No line without a point may be given."""
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    across, down = _Axis(min(steps), max(steps), 1000), _Axis(min(values), max(values), 200)
    y_ticks, x_ticks = ticks(down.low, down.high), [t for t in ticks(across.low, across.high) if t == int(t)]
    grid = "".join(f'<path class="grid" d="M0 {200 - down.at(tick):.1f}H1000"/>' for tick in y_ticks)
    grid += "".join(f'<path class="grid" d="M{across.at(tick):.1f} 0V200"/>' for tick in x_ticks)
    inside = [step for step in resumed if across.low <= step <= across.high]
    marks = "".join(_RESUME.format(across.at(step), step) for step in inside)
    drawn = "".join(_polyline(line, across, down) for line in lines)
    labels = "".join(f'<span class="y" style="bottom:{down.at(t) / 2:.2f}%">{_number(t)}</span>' for t in y_ticks)
    labels += "".join(f'<span class="x" style="left:{across.at(t) / 10:.2f}%">{_number(t)}</span>' for t in x_ticks)
    svg = f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none">{grid}{drawn}{marks}</svg>'
    caption = "; ".join(map(_caption, lines)) + "; dashed: a resume" * bool(inside)
    return f'<figure><figcaption>{caption}</figcaption><div class="plot">{svg}{labels}</div></figure>'


def ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers from `low` to `high`, evenly spaced; one number if there is no other between."""
    span = high - low
    unit = 10.0 ** (math.floor(math.log10(span)) - 1) if span > 0 else 0.0
    if unit == 0.0 or low + unit == low:
        return [low]
    for factor in (1, 2, 5, 10, 20, 50):
        first, last = math.ceil(low / (unit * factor)), math.floor(high / (unit * factor))
        if last - first < _MAX_TICKS:
            return [n * (unit * factor) for n in range(first, last + 1)]
    return [low]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        """Return the place of a value, from 0 to `length`; that of the only value is the middle."""
        span = self.high - self.low
        return (value - self.low) / span * self.length if span else self.length / 2


def _polyline(line: Line, across: _Axis, down: _Axis) -> str:
    """Draw a line through points, of each stretch the lowest and the highest, so that no spike is lost."""
    width = len(line.points) // _MAX_STRETCHES + 1
    stretches = [line.points[at : at + width] for at in range(0, len(line.points), width)]
    kept = [p for few in stretches for p in sorted({min(few, key=lambda p: p[1]), max(few, key=lambda p: p[1])})]
    path = " ".join(f"{across.at(x):.1f},{200 - down.at(y):.1f}" for x, y in kept)
    return f'<polyline points="{path}" stroke="var({line.color})"/>'


def _caption(line: Line) -> str:
    low, high = min(value for _, value in line.points), max(value for _, value in line.points)
    steps = f"of steps {line.points[0][0]} to {line.points[-1][0]}"
    name = f'<b style="color:var({line.color})">{html.escape(line.name)}</b>'
    return f"{name} {steps}, from {low:.4g} to {high:.4g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.6g}"
