"""Judges the cases of the zoo in processes of their own, so that a case that crashes or hangs is a verdict, too.

Owns the worlds of one or two ranks and what their ends mean. Knows no case: a case is a name that a judge understands.
A world judges many cases, because its start takes longer than most cases do.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from titan_ckpt.testing.ranks import RankError, distributed

Row = tuple[str, str, str]
"""(configuration, "exact" | "refused" | "different", note)."""
Judge = Callable[[str, Path], list[Row]]
"""(name of a case, empty folder) -> its rows. Importable by name; with several ranks, all call it at the same time."""

_CASES = 24
"""Number of cases of one world."""
_CASE_SECONDS = 300
_CORES = 2
_ORDER = ("exact", "refused", "different")


def judged(judge: Judge, names: Sequence[str], ranks: int = 1) -> list[Row]:
    """Return the rows of all cases in their order; `_CORES` processes are at work at the same time."""
    batches = [names[i : i + _CASES] for i in range(0, len(names), _CASES)]
    with ThreadPoolExecutor(max(1, _CORES // ranks)) as pool:
        return [row for rows in pool.map(lambda batch: _batch(judge, batch, ranks), batches) for row in rows]


def _batch(judge: Judge, names: Sequence[str], ranks: int) -> list[Row]:
    """Return the rows of some cases. A world ends at the first different one; the next world has the rest."""
    waiting, rows = deque(names), []
    while waiting:
        end = ""
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            try:
                _WORLDS[ranks](judge, list(waiting), Path(folder))
            except RankError as error:
                end = " ".join(str(error).partition("--- ")[2].split())
            results = [_read(Path(folder, f"rank-{rank}.jsonl")) for rank in range(ranks)]
        while waiting and all(waiting[0] in result for result in results):
            name = waiting.popleft()
            rows += _worst([result[name] for result in results])
        if waiting and end and not any(verdict == "different" for result in results for verdict in _verdicts(result)):
            rows.append((waiting.popleft(), "different", f"crashed: {_reason(end)}"))
        elif waiting and (partly := [result[waiting[0]] for result in results if waiting[0] in result]):
            waiting.popleft()
            rows += _worst(partly)
    for name, verdict, note in rows:
        if verdict == "different":
            sys.stderr.write(f"different: {name} on {ranks} rank(s): {note}\n")
    sys.stderr.write(f"{judge.__module__} on {ranks} rank(s): {len(rows)} rows, up to {names[-1]}\n")
    return rows


def _reason(end: str) -> str:
    return f"longer than {_CASE_SECONDS} s" if "SIGALRM" in end else end[-300:]


def _read(path: Path) -> dict[str, list[Row]]:
    """Return the rows that a rank has written, by case."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: [(row[0], row[1], row[2]) for row in rows] for name, rows in map(json.loads, lines)}


def _verdicts(result: dict[str, list[Row]]) -> list[str]:
    return [verdict for rows in result.values() for _, verdict, _ in rows]


def _worst(of_ranks: Sequence[list[Row]]) -> list[Row]:
    """Return each row of a case with the worst verdict of any rank."""
    worst: dict[str, Row] = {}
    for row in (row for rows in of_ranks for row in rows):
        if row[0] not in worst or _ORDER.index(row[1]) > _ORDER.index(worst[row[0]][1]):
            worst[row[0]] = row
    return list(worst.values())


def _judge_all(judge: Judge, names: Sequence[str], folder: Path) -> None:
    """Write a line for each case. Raises: RuntimeError after a different one, which may have left the ranks apart."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (folder / f"rank-{rank}.jsonl").open("w") as out:
        for index, name in enumerate(names):
            signal.alarm(_CASE_SECONDS)
            (folder / str(index)).mkdir(exist_ok=True)
            rows = judge(name, folder / str(index))
            out.write(json.dumps([name, rows]) + "\n")
            out.flush()
            if any(verdict == "different" for _, verdict, _ in rows):
                raise RuntimeError(name)
    signal.alarm(0)


@distributed(nproc=1, timeout_seconds=_CASES * _CASE_SECONDS)
def _alone(judge: Judge, names: Sequence[str], folder: Path) -> None:
    dist.destroy_process_group()
    _judge_all(judge, names, folder)


@distributed(nproc=2, timeout_seconds=_CASES * _CASE_SECONDS)
def _on_two_ranks(judge: Judge, names: Sequence[str], folder: Path) -> None:
    _judge_all(judge, names, folder)


_WORLDS = {1: _alone, 2: _on_two_ranks}
