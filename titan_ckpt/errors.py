"""The exceptions this package raises. Each carries data; its message says what, where, expected, found, next step.

CheckpointError
├── ConfigError (ValueError)             a setting that cannot mean anything; nothing was started
├── CheckpointNotFoundError (FileNotFoundError)  the named folder or step is not there
├── NotACheckpointError (ValueError)     the folder is there and holds no checkpoint of a known format
├── CorruptCheckpointError (ValueError)  bytes, sizes, digests or structure are not what was committed
├── LoadMismatchError (ValueError)       names, shapes or dtypes do not fit the model; carries the LoadReport
├── BaseMismatchError (ValueError)       an adapter was trained on another base
├── ConverterError (ValueError)          a converter, or a set of converters, that cannot work
├── KeyMapError (ValueError)             a name that the model's table does not know
├── StateEncodingError (TypeError)       a value that typed JSON cannot hold; carries its path
├── GradientError (FloatingPointError)   a gradient that is not finite; it reached no weight
├── SaveError (OSError)                  a save that did not commit; the previous checkpoints are untouched
│   ├── PreflightError                   found before step 1: no space, no permission, a failing test save
│   ├── CommitConflictError              another writer holds the folder, or the step is already committed
│   ├── ReplicaMismatchError             ranks hold different values as copies of one tensor; names both
│   └── PeerError                        another rank failed or did not answer in time; names the ranks
└── ExportError (RuntimeError)           an export that could not be made or not be proved; nothing was published
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_ckpt.types import LoadReport


class CheckpointError(Exception):
    """Everything this package raises on purpose."""


class ConfigError(CheckpointError, ValueError):
    """Carries `problems`: one line each, `path.to.key: cause`."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        lines = "\n".join(f"  {line}" for line in self.problems)
        super().__init__(f"{source}: {len(self.problems)} problem(s)\n{lines}")


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A folder or step that was asked for by name is not there."""


class NotACheckpointError(CheckpointError, ValueError):
    """A folder that holds none of the known formats."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """A file is not what was committed. Carries `path`, and the names of all tensors `overwritten` in memory before."""

    def __init__(self, message: str, path: str = "", overwritten: Sequence[str] = ()) -> None:
        self.path = path
        self.overwritten = tuple(overwritten)
        super().__init__(message)


class LoadMismatchError(CheckpointError, ValueError):
    """The source does not fit the model. Carries `report`, which lists every key."""

    def __init__(self, message: str, report: LoadReport | None = None) -> None:
        self.report = report
        super().__init__(message)


class BaseMismatchError(CheckpointError, ValueError):
    """An adapter's recorded base and the base at hand differ. Carries both."""

    def __init__(self, message: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
        self.expected = dict(expected)
        self.found = dict(found)
        super().__init__(message)


class ConverterError(CheckpointError, ValueError):
    """A converter, or a combination of converters, that cannot work."""


class KeyMapError(CheckpointError, ValueError):
    """Names that the table does not know. Carries `unknown`."""

    def __init__(self, message: str, unknown: Sequence[str] = ()) -> None:
        self.unknown = tuple(unknown)
        super().__init__(message)


class StateEncodingError(CheckpointError, TypeError):
    """A value in a state dict that typed JSON cannot hold. Carries `path`."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class GradientError(CheckpointError, FloatingPointError):
    """A gradient that is not finite, stopped before it reached a weight. Carries `step`, which was not made."""

    def __init__(self, message: str, step: int) -> None:
        self.step = step
        super().__init__(message)


class SaveError(CheckpointError, OSError):
    """A save that did not commit; what was committed before is untouched."""


class PreflightError(SaveError):
    """A save could not work here, found before the first step."""


class CommitConflictError(SaveError):
    """Another writer owns the folder, or the step is committed already."""


class ReplicaMismatchError(SaveError):
    """Copies of one tensor that are not the same. Carries `tensors`."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        self.tensors = tuple(tensors)
        super().__init__(message)


class PeerError(SaveError):
    """Another rank failed or stayed silent. Carries `ranks`."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class ExportError(CheckpointError, RuntimeError):
    """An export that could not be made, or not be proved; nothing was published."""
