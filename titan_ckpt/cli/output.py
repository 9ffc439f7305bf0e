"""Standard output of the commands."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """A console on which a reader that has gone is an error like any other; rich ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error
