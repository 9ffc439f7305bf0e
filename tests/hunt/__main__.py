"""Carry out one program of the hunt: python -m tests.hunt "1 thread adamw: save/copy; write:copy_"."""

from __future__ import annotations

import sys

from tests.hunt.programs import Program
from tests.hunt.workers import Workers


def main(text: str) -> int:
    """Print what was wrong; return 1 if anything was."""
    program = Program.parse(text)
    workers = Workers(program.ranks)
    try:
        wrong = workers.run(program)
    finally:
        workers.close()
    print(wrong or "nothing is wrong")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
