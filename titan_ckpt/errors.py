"""Exceptions of this package. Each carries data; its message says what, where, expected, found, and the next step.

CheckpointError
├── ConfigError (ValueError)             an invalid setting; nothing was started
│   └── DataError                        training data that cannot be used, found in the middle of a run
├── CheckpointNotFoundError (FileNotFoundError)  the named folder or step does not exist
├── NotACheckpointError (ValueError)     the folder exists and holds no checkpoint of a known format
├── CorruptCheckpointError (ValueError)  bytes, sizes, digests or structure differ from what was committed
├── HalfLoadedError (RuntimeError)       a load that failed has overwritten the run; nothing is kept until one succeeds
├── LoadMismatchError (ValueError)       names, shapes or dtypes do not fit the model; carries the LoadReport
├── BaseMismatchError (ValueError)       an adapter was trained on a different base
├── ConverterError (ValueError)          a converter, or a set of converters, that cannot work
├── KeyMapError (ValueError)             a name that is not in the model's table
├── StateEncodingError (TypeError)       a value that typed JSON cannot encode; carries its path
├── GradientError (FloatingPointError)   a gradient is not finite; it reached no weight
├── SaveError (OSError)                  a save that did not commit; the previous checkpoints are untouched
│   ├── PreflightError                   found before step 1: no space, no permission, a failing test save
│   ├── CommitConflictError              another writer holds the folder, or the step is already committed
│   ├── ReplicaMismatchError             ranks hold different values of a replicated tensor; names both
│   └── PeerError                        another rank failed or did not answer in time; names the ranks
└── ExportError (RuntimeError)           an export failed or its check failed; nothing was published
    └── ExportSettingError (ValueError)  found before step 1: an export that this run cannot make
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ckpt.types import LoadReport


_MAX_MESSAGE = 16_000
_NEW_LINE = re.compile(r"\n(?=[^\s])")
_USER = re.compile(r"\b([A-Za-z][\w+.-]*:/{1,2})(?:[^/\s@?]+|[^\s@?:]*:[^\s@?]*)@")
_QUERY = re.compile(r"\b([A-Za-z][\w+.-]*:/[^\s?]*\?)[^\s\"']+")


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return "1 tensor" or "2 tensors". `many`: the text after any other number than 1; by default `one` and an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(lines: Sequence[str], separator: str = "; ", last: str | None = None, most: int = 8) -> str:
    """Join the first `most` lines, for a message that stays readable, and say how many more there are.

    `last` stands before "and 3 more"; by default it is the separator.
    """
    text = separator.join(lines[:most])
    return text if len(lines) <= most else f"{text}{separator if last is None else last}and {len(lines) - most} more"


def age(unix_seconds: float) -> str:
    """Return a time of the past in words that fit a column: "3 min", "2 h", "5 d"."""
    seconds = max(0.0, time.time() - unix_seconds)
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"


def size(num_bytes: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def without_credentials(text: str) -> str:
    """Return the text with *** for the user, the password and the query of each URL, which people paste with them."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


def printable(text: str) -> str:
    """Return a message as a terminal or a log may show it, whatever names and values of files are in it.

    Control characters are escaped, and lines after the first are indented, so that none looks like another message.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
        text = _NEW_LINE.sub("\n  ", text)
    return text


class CheckpointError(Exception):
    """Base of all errors that this package raises on purpose. Each can be pickled, as between processes."""

    repeats: bool | None = None
    """Whether another rank of this host has raised the same error before; None if that is not known."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _MAX_MESSAGE:  # it quotes a file
            message = f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
        super().__init__(printable(message))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[CheckpointError], message: str, carried: Mapping[str, object]) -> CheckpointError:
    """Return an error as it was, without its constructor, which may take other arguments than a message."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(carried)
    return error


class ConfigError(CheckpointError, ValueError):
    """Settings are invalid. Carries `problems`, one line each: `path.to.key: cause`, without credentials of URLs."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = tuple(map(without_credentials, problems))
        self.source = source
        lines = "\n".join(f"  {line}" for line in self.problems)
        super().__init__(f"{without_credentials(source)}: {len(self.problems)} problem(s)\n{lines}")


def refuse(*faults: str, source: str = "config") -> None:
    """Raises: ConfigError listing these faults, if there are any."""
    if faults:
        raise ConfigError(faults, source)


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ConfigError that the block raises to others, with which they are refused later."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class DataError(ConfigError):
    """Training data cannot be used, and only the rank that reads it may know; the steps before it are whole."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A folder or step that was named does not exist."""


class NotACheckpointError(CheckpointError, ValueError):
    """A folder holds no checkpoint of a known format."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """A file differs from what was committed. Carries `path`, and the names of all tensors `overwritten` in memory."""

    def __init__(self, message: str, path: str = "", overwritten: Sequence[str] = ()) -> None:
        self.path = path
        self.overwritten = tuple(overwritten)
        super().__init__(message)


class HalfLoadedError(CheckpointError, RuntimeError):
    """A load that did not succeed has overwritten the run. Carries its `source` and the tensors `overwritten` here."""

    def __init__(self, message: str, source: str, overwritten: Sequence[str]) -> None:
        self.source = source
        self.overwritten = tuple(overwritten)
        super().__init__(message)


class LoadMismatchError(CheckpointError, ValueError):
    """The source does not fit the model. Carries `report`, which lists every key."""

    def __init__(self, message: str, report: LoadReport | None = None) -> None:
        self.report = report
        super().__init__(message)


class BaseMismatchError(CheckpointError, ValueError):
    """The base that an adapter records and the loaded base differ. Carries both."""

    def __init__(self, message: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
        self.expected = dict(expected)
        self.found = dict(found)
        super().__init__(message)


class ConverterError(CheckpointError, ValueError):
    """A converter, or a combination of converters, cannot work."""


class KeyMapError(CheckpointError, ValueError):
    """Names are not in the model's table. Carries `unknown`."""

    def __init__(self, message: str, unknown: Sequence[str] = ()) -> None:
        self.unknown = tuple(unknown)
        super().__init__(message)


class StateEncodingError(CheckpointError, TypeError):
    """Typed JSON cannot encode a value of a state dict. Carries `path`."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class GradientError(CheckpointError, FloatingPointError):
    """A gradient is not finite. Carries `step`, the step that was not made; the message says which weights are left."""

    def __init__(self, message: str, step: int) -> None:
        self.step = step
        super().__init__(message)


class SaveError(CheckpointError, OSError):
    """A save did not commit; earlier checkpoints are untouched."""


class PreflightError(SaveError):
    """Saves cannot work in this folder; raised before the first step."""


class CommitConflictError(SaveError):
    """Another writer holds the folder, or the step is committed already."""


class ReplicaMismatchError(SaveError):
    """Ranks hold different values of a replicated tensor. Carries `tensors`."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        self.tensors = tuple(tensors)
        super().__init__(message)


class PeerError(SaveError):
    """Another rank failed or did not answer in time. Carries `ranks`."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class ExportError(CheckpointError, RuntimeError):
    """An export failed, or its check failed; nothing was published."""


class ExportSettingError(ExportError, ValueError):
    """An export that is asked for cannot be made by this run; raised before the first step."""


def says_setting_is_wrong(error: CheckpointError) -> bool:
    """Return whether the settings and the folders that they name do not fit: starting again gives the same error."""
    wrong = (ConfigError, CheckpointNotFoundError, NotACheckpointError, LoadMismatchError, BaseMismatchError)
    return isinstance(error, (*wrong, ConverterError, KeyMapError, ExportSettingError))
