"""The log of a training run on a console, in a file or in a pipe.

Owns how a log line looks, and which rank speaks: rank 0 from level INFO, the others warnings and errors alone.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from logging import LogRecord

from rich.console import Console
from rich.text import Text

from titan_ckpt.progress import CONSOLE


def configure_logging() -> None:
    """Log to standard error, with the time of day in front; a console gets colours, and bars below the lines."""
    rank = int(os.environ.get("RANK", "0"))
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    if CONSOLE.is_terminal and rank == 0:
        handler = ConsoleHandler(CONSOLE)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])


class ConsoleHandler(logging.Handler):
    """Prints records on a console, above its bars; a long line continues under its own text."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: LogRecord) -> None:
        """Print one record: the time, then the message; warnings are yellow and errors red."""
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        try:
            time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # noqa: DTZ006 - the reader's clock
            lines = Text(self.format(record), style=style).wrap(self._console, max(20, self._console.width - 9))
            for i, line in enumerate(lines):
                self._console.print(Text.assemble((f"{time} " if i == 0 else " " * 9, "dim"), line), soft_wrap=True)
        except Exception:
            self.handleError(record)
