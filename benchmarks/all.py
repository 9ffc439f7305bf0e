"""Every benchmark in turn, on one rank and on two: python -m benchmarks.all [--gb N] [--pairs N]."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

RUNS = (
    ("save", 1),
    ("save", 2),
    ("async_save", 1),
    ("async_save", 2),
    ("load", 1),
    ("load", 2),
    ("many_tensors", 1),
    ("many_tensors", 2),
    ("hf_export", 2),
    ("hf_load", 2),
    ("replicas", 2),
    ("shared_reads", 4),
    ("initialize", 2),
    ("own_state", 1),
    ("own_state", 2),
    ("scale", 1),
    ("step", 1),
    ("step", 2),
    ("store", 2),
)


def main() -> int:
    """Run them; end with one JSON object of all results, keyed `name` and `name --nproc 2`."""
    parser = argparse.ArgumentParser(description="every benchmark in turn")
    parser.add_argument("--gb", type=float, default=None, help="10^9 bytes of state; default: each benchmark's own")
    parser.add_argument("--pairs", type=int, default=5, help="turns of every case")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    failed = []
    for name, nproc in RUNS:
        key = name if nproc == 1 else f"{name} --nproc {nproc}"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--nproc", str(nproc), "--pairs", str(options.pairs)]
        if options.gb is not None:
            command += ["--gb", str(options.gb)]
        print(f"\n== python -m benchmarks.{key} --json", flush=True)
        output = _run([*command, "--json"])
        if output is None:
            failed.append(key)
        else:
            results[key] = json.loads(output)
    print(json.dumps(results))
    return 1 if failed else 0


def _run(command: list[str]) -> str | None:
    """Show what the benchmark prints; return its last line, or None if it failed."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last = line
            if not line.startswith("{"):
                print(line, end="", flush=True)
    return last if process.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
