"""Look at the checkpoints of a run, and ask a running job for a save: `titan-ckpt ls | inspect | verify | save`."""

from __future__ import annotations

import sys

import tyro

from titan_ckpt.cli.arguments import Command


def main(args: list[str] | None = None) -> int:
    """Run the command line; 0 on success, 1 for a checkpoint that is not as it should be, 2 for bad arguments."""
    command = tyro.cli(Command, args=args, prog="titan-ckpt", description=__doc__)
    from titan_ckpt.cli.commands import run  # not before the arguments are known to be good: it imports torch

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
