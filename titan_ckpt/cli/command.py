"""The contract of a command of `titan-ckpt`, what its run needs, and the exit codes. Knows no particular command."""

from __future__ import annotations

import inspect
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro
from rich.console import Console

from titan_ckpt.cli import tables
from titan_ckpt.errors import CheckpointError, CorruptCheckpointError, SaveError, printable

if TYPE_CHECKING:
    from titan_ckpt.stores.store import Place

_RETRY_SECONDS = 30.0
_PIPED_COLUMNS = 1000
"""Width of what goes to a file or another program, which would otherwise get rows that are cut at 80 columns."""

_FIRST = (
    "Train", "Init", "Ls", "Inspect", "Verify", "Diff", "Convert", "Merge", "Prune", "Pin", "Unpin", "Save", "Plan",
    "Report",
)  # fmt: skip
"""The order of the help; others come last."""

SAME, DIFFERENT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: fine or the same; different, damaged or refused; wrong use, or input that cannot be read; Ctrl-C."""


@dataclass(frozen=True)
class Command(ABC):
    """A command: its fields are its arguments, and its docstring is its help."""

    takes_urls: ClassVar[bool] = False
    """Whether its paths may be the URLs of places in a bucket."""
    damaged: ClassVar[int] = WRONG_USE
    """Exit code for a damaged checkpoint."""

    @abstractmethod
    def run(self, console: Console) -> int:
        """Do the work, print the result, and return the exit code. Raises: CheckpointError; OSError."""


@dataclass(frozen=True, kw_only=True)
class Shown(Command):
    """A command with a result that is shown, and with the argument for it."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of tables."""

    def show(self, found: Any, as_tables: Callable[[], None], **more: Any) -> int:
        """Print a result, with `more` in its JSON object."""
        print_json(found, **more) if self.json else as_tables()
        return SAME

    def say(self, console: Console, text: str, **found: Any) -> int:
        """Print a result that is one sentence."""
        return self.show(found, lambda: tables.say(console, text))


def commands() -> list[type[Command]]:
    """Return every command in the modules of the folder `commands`, in the order of the help.

    They are found, so that a new command is one file, and nothing here depends on them.
    """
    folder = import_module("titan_ckpt.cli.commands")
    modules = [import_module(f"{folder.__name__}.{module.name}") for module in iter_modules(folder.__path__)]
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    found = {cls.__name__: cls for cls in classes if issubclass(cls, Command) and not inspect.isabstract(cls)}
    return [found[name] for name in dict.fromkeys([*_FIRST, *sorted(found)])]


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


def print_json(value: Any, **more: Any) -> None:
    """Print a result as one JSON object."""
    data = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps({**data, **more}, default=str)
    with naming_standard_output():
        sys.stdout.write(f"{text}\n")


def place(path: Path) -> Place:
    """Return what an argument names; how a bucket is reached comes from the environment, as its credentials do.

    Raises: ConfigError.
    """
    from titan_ckpt.stores.store import StoreConfig, open_location

    return open_location(path, settings=StoreConfig(retry_seconds=_RETRY_SECONDS))


def run(command: Command) -> int:
    """Run a command and return the exit code; an error is one line on standard error."""
    from titan_ckpt.encoding.paths import require_local
    from titan_ckpt.stores.store import require_places

    is_shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Output(markup=True, emoji=False, width=None if is_shown else _PIPED_COLUMNS)
    try:
        (require_places if command.takes_urls else require_local)(dict(_paths(command)))
        return command.run(console)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written under its final name", INTERRUPTED)
    except SaveError as error:  # the folder's state refuses it: a live writer, a deletion that was first
        return _fail(str(error), DIFFERENT)
    except CorruptCheckpointError as error:
        return _fail(str(error), command.damaged)
    except CheckpointError as error:
        return _fail(str(error), WRONG_USE)
    except BrokenPipeError:  # main answers
        raise
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), WRONG_USE)


def _paths(command: Command) -> Iterator[tuple[str, Path]]:
    """Yield the name and the value of every argument that is a path, each of several by its number."""
    for name, value in vars(command).items():
        several = enumerate(value, 1) if isinstance(value, tuple) else ()
        for key, part in [(name, value), *((f"{name} {number}", part) for number, part in several)]:
            if isinstance(part, Path):
                yield key, part


def _fail(text: str, code: int) -> int:
    line = " ".join(printable(text).split())
    Console(stderr=True, soft_wrap=True, emoji=False).print(f"titan-ckpt: {line}", style="red", markup=False)
    return code
