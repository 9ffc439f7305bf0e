"""Train from a run file, look at the checkpoints of a run, and ask a running job for a save."""

from __future__ import annotations

import sys

import tyro

from titan_ckpt.cli.arguments import Command
from titan_ckpt.training import command as train


def main(args: list[str] | None = None) -> int:
    """Run the command line; 0 on success, 1 for a checkpoint that is not as it should be, 2 for bad arguments.

    `train` has exit codes of its own (titan_ckpt/training/command.py).
    """
    words = sys.argv[1:] if args is None else args
    if words[:1] == ["train"]:  # any --table.key VALUE may follow, which tyro cannot know
        return train.main(words[1:])
    command = tyro.cli(Command, args=args, prog="titan-ckpt", description=__doc__)
    from titan_ckpt.cli.commands import run  # not before the arguments are known to be good: it imports torch

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
