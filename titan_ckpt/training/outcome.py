"""How a run ended: its exit code, and `stopped.json` in its folder if it is to be started again.

Owns that file. torchrun calls every exit code but 0 a failure of the worker, so under torchrun only the file says it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_ckpt.disk import posix

STOPPED = "stopped.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last step of a run, and why it ended there."""

    step: int
    """The last completed step."""
    steps: int
    """The last step that the run was to make."""
    saved_step: int | None
    """The newest step that a resume finds; None without any."""
    reason: str | None = None
    """Why it was stopped; None if it was not."""

    @property
    def lost(self) -> int:
        """Return how many completed steps no checkpoint holds."""
        return self.step - (self.saved_step or 0)

    @property
    def exit_code(self) -> int:
        """Return 0 for a run that is done, 75 for one that can go on from where it was, else 1.

        75 is EX_TEMPFAIL of BSD's sysexits.h. Under torchrun, which calls every code but 0 a failure, a run that was
        stopped and saved also returns 0.
        """
        if self.reason is None or self.step >= self.steps:
            return 0
        if self.lost:
            return 1
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 75


def unsaved(lost: int, step: int) -> str:
    """Return a sentence that says which of the steps up to `step` no checkpoint holds."""
    if lost == 1:
        return f"step {step}, the last one, is not saved"
    return f"the last {lost} steps, up to step {step}, are not saved"


def forget_stop(run: Path) -> None:
    """Remove the file of an earlier stop: the run has been started again. Raises: OSError."""
    with suppress(FileNotFoundError):
        posix.unlink(run / STOPPED)


def record_stop(run: Path, outcome: Outcome) -> None:
    """Write the file that asks for another start. Raises: OSError."""
    posix.replace_file(run / STOPPED, json.dumps(asdict(outcome)).encode() + b"\n")
