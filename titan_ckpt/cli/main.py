"""Train from a run file, look at checkpoints of any format, compare, convert and merge them, and prune a run's folder.

Exit codes: 0 fine or the same; 1 different, damaged or refused; 2 wrong use, or input that cannot be read. `train` has
codes of its own (titan_ckpt/training/launch/command.py). Completion of your shell:
`titan-ckpt --tyro-print-completion bash` (or zsh, tcsh) prints a script to source.
"""

from __future__ import annotations

import sys

import tyro

from titan_ckpt.cli.arguments import Command
from titan_ckpt.training.launch import command as train


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code (see commands.py)."""
    given = sys.argv[1:] if args is None else args
    if given[:1] == ["train"]:  # any --table.key VALUE may follow, which tyro cannot know
        return train.main(given[1:])
    if given == ["--version"]:
        from importlib.metadata import version

        sys.stdout.write(f"titan-ckpt {version('titan-ckpt')}\n")
        return 0
    command = tyro.cli(Command, args=given, prog="titan-ckpt", description=__doc__)
    from titan_ckpt.cli.commands import run  # not before the arguments are known to be good

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
