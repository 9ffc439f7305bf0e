"""Standard output of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console


@contextmanager
def naming_standard_output() -> Iterator[None]:
    """Let an error of writing to standard output name it; a reader that has gone stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


class Output(Console):
    """A console on which a reader that has gone is an error like any other; rich ends the process."""

    def print(self, *objects: Any, **options: Any) -> None:
        with naming_standard_output():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error
