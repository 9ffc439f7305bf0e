"""The console, and metrics.jsonl: one JSON object per logged step. Knows no run; callbacks/console.py says when."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """An append-only file of JSON objects, each with its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, object]) -> None:
        """Add a row; it is with the operating system when this returns, so a killed process loses none."""
        with self.path.open("a") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, and a last line that a kill cut short; atomic. Makes the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= step]
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        new.write_text("".join(kept))
        new.replace(self.path)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl in the order of their steps; nothing where there is no file."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # what a killed process had not written to its end
