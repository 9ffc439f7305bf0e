"""LastStep: the last completed step of a run, which can still be saved while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_ckpt.components.gradients import Gradients
from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import Mark, take_mark
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.saving.saver import Saver


@dataclass(slots=True)
class LastStep:
    """The last completed step of a run, for RunGuard, which saves it when the next one is interrupted."""

    run: RunState
    gradients: Gradients
    saver: Saver | None
    coordinator: Coordinator
    save_mark: Callable[[Mark | None], None]
    """Saves a marked step, unless it is saved already, and waits for it."""
    expected_bytes: Callable[[], int]
    """Estimates this rank's bytes in a save."""
    is_half_loaded: Callable[[], bool]
    """Whether a load has overwritten a part of the run and failed; no step of such a run is marked."""
    is_watched: bool
    """Whether the optimizers say when they are about to step."""
    settled: int | None = None
    """The step that was saved or resumed last; a save in flight does not count."""
    mark: Mark | None = None
    is_changing: bool = False
    """Whether an optimizer may have changed the marked step."""

    def complete(self, step: int) -> None:
        """Mark the run's state as that of the completed `step`, so that it can still be saved during the next step.

        Call it after the optimizer, schedulers and counters of the step. Not collective, and cheap.
        """
        if self.saver is not None and not self.is_half_loaded():
            self.mark, self.is_changing = take_mark(self.run, step, self.gradients.unused()), False

    @property
    def saved(self) -> int | None:
        """Return the step that was saved or resumed last, or is being saved."""
        in_flight = self.saver.in_flight if self.saver is not None else None
        return self.settled if in_flight is None else in_flight.step

    @property
    def marked(self) -> int | None:
        """Return the step that `save` would save; None if none is, or an optimizer may have changed it."""
        return None if self.mark is None or self.is_changing or not self.is_watched else self.mark.step

    def save(self) -> None:
        """Save the marked step as it was at its end, and wait for it; no older step expires. Collective.

        Raises: SaveError; HalfLoadedError.
        """
        self.save_mark(self.mark)

    def line(self) -> Coordinator:
        """Return a Coordinator of its own for the caller. Collective."""
        return self.coordinator.background()

    def save_seconds(self) -> float:
        """Estimate the seconds from copy to commit: the longest of the last saves, or 5 s plus 100 MB/s before any."""
        if self.saver is None:
            return 0.0
        return max(self.saver.seconds, default=0.0) or 5.0 + self.expected_bytes() / 1e8
