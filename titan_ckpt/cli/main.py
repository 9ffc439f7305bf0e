"""Train from a run file, look at checkpoints of any format, compare, convert and merge them, and prune a run's folder.

Exit codes: 0 fine or the same; 1 different, damaged or refused; 2 wrong use, or input that cannot be read. `train` has
codes of its own (docs/resume.md). Completion of your shell:
`titan-ckpt --tyro-print-completion bash` (or zsh, tcsh) prints a script to source.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout
from typing import Any, TextIO, Union

import tyro
from rich.text import Text

from titan_ckpt.cli.command import Command, Output, commands, run
from titan_ckpt.training.launch import command as train


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code (see command.py)."""
    given = sys.argv[1:] if args is None else args
    sys.stdout, sys.stderr = (out or open(os.devnull, "w") for out in (sys.stdout, sys.stderr))  # noqa: SIM115
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):  # a locale that lacks a character ends no command
            out.reconfigure(errors="backslashreplace")
    if given[:1] == ["train"]:  # any --table.key VALUE may follow, which tyro cannot know
        return train.main(given[1:])
    try:
        if given == ["--version"]:
            from importlib.metadata import version

            sys.stdout.write(f"titan-ckpt {version('titan-ckpt')}\n")
        code = 0 if given == ["--version"] else run(_parsed(given))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 128 + signal.SIGPIPE
    except OSError as error:
        sys.stderr.write(f"titan-ckpt: standard output: {error.strerror}\n")
        return 2
    return code


class _Paragraphs(io.StringIO):
    """Standard output on which lines are cut between words; tyro leaves long ones to the terminal, which cuts words."""

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"

    def flush_to(self, out: TextIO) -> None:
        bullet = "\u2022" if "utf" in self.encoding.lower() else "-"
        usage, newline, rest = self.getvalue().replace("\u2022", bullet).partition("\n")
        text = Text.from_ansi(usage.replace(",", ", ") + newline + rest)
        Output(file=out, width=shutil.get_terminal_size().columns).print(text, end="")


def _parsed(given: list[str]) -> Command:
    """Return the command; the process ends after --help and with code 2 after arguments that cannot be understood."""
    choices: Any = Union[tuple(commands())]  # noqa: UP007 - made of a list
    if not {"-h", "--help"} & {*given}:
        return tyro.cli(choices, args=given, prog="titan-ckpt", description=__doc__)  # type: ignore[no-any-return]
    shown = _Paragraphs()
    try:
        with redirect_stdout(shown):
            return tyro.cli(choices, args=given, prog="titan-ckpt", description=__doc__)  # type: ignore[no-any-return]
    finally:
        shown.flush_to(sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
