"""Run a command whose processes all stand still for ten seconds at random moments, as on a machine that is suspended.

python -m tests.standstill python -m pytest tests/faults/test_run_guard.py

Processes that a test has stopped itself are left as they are.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SECONDS = 10.0
MOST_SECONDS_BETWEEN = 15.0
_MARK = "TITAN_CKPT_STANDSTILL"


def running(mark: bytes) -> list[int]:
    """Return the processes that run with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "TZ" and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def main(command: list[str]) -> int:
    """Run the command and return its exit code."""
    number = str(os.getpid())
    process = subprocess.Popen(command, env={**os.environ, _MARK: number})
    drawn = random.Random()
    count = 0
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(drawn.uniform(0.0, MOST_SECONDS_BETWEEN))
            break
        stopped = running(f"{_MARK}={number}".encode())
        count += 1
        for how, seconds in ((signal.SIGSTOP, SECONDS), (signal.SIGCONT, 0.0)):
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            time.sleep(seconds)
    print(f"the processes stood still {count} times", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
