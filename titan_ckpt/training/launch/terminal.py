"""The log of a training run on a console, in a file or in a pipe.

Owns how a log line looks, and which rank speaks: rank 0 from level INFO, the others warnings and errors alone.
"""

from __future__ import annotations

import logging
import os
import sys
from logging import LogRecord

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from titan_ckpt.progress import CONSOLE

FOREIGN = {
    # torchao's wheel has kernels for other Pythons and GPUs; a converter that needs one says so itself
    "torchao": "Failed to load ",
    # nothing here uses these integer kernels
    "torchao.kernel.intmm": "Detected no triton",
    # torchao registers its enums in a way that torch 2.13 calls deprecated
    "torch.utils._pytree": "natively supported by torch.compile",
}
"""Logger of another library -> part of a warning that a user cannot act on. Nothing else of these loggers is hidden."""


def _is_wanted(record: LogRecord) -> bool:
    return FOREIGN[record.name] not in record.getMessage()


def hide_foreign() -> None:
    """Drop the warnings of other libraries that are in FOREIGN."""
    for name in FOREIGN:
        logging.getLogger(name).addFilter(_is_wanted)  # once, however often this is called


def configure_logging() -> None:
    """Log to standard error, with the time of day in front; a console gets colours, and bars below the lines."""
    hide_foreign()
    rank = int(os.environ.get("RANK", "0"))
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    if CONSOLE.is_terminal and rank == 0:
        handler = ConsoleHandler(CONSOLE)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])


def say(message: str) -> None:
    """Print the last word of the process on standard error: in red on a console, cut between words."""
    if CONSOLE.is_terminal:
        CONSOLE.print(Text(message, style="red"))
    else:
        print(message, file=sys.stderr)  # noqa: T201 - the process says why it ends, whatever its log is


class ConsoleHandler(RichHandler):
    """Prints records on a console, above its bars; a long line continues under its own text."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console=console, show_level=False, show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )

    def render_message(self, record: LogRecord, message: str) -> Text:
        """Return the message as it is; warnings are yellow and errors red."""
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        return Text(message, style=style)
