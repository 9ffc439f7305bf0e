"""CompletedStep: the last completed step of a run, which can still be saved while the next one is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from titan_ckpt.components.gradients import Gradients
from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import Mark, take_mark
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.saving.model_content import ModelContent
from titan_ckpt.saving.saver import DueSave, Saver


class SavesSteps(Protocol):
    """A CompletedStep calls these of the manager, whose subclasses may extend them."""

    def save_step(self, due: DueSave) -> bool: ...

    def wait(self) -> None: ...


@dataclass(slots=True)
class CompletedStep:
    """The last completed step of a run, for RunGuard, which saves it when the next one is interrupted."""

    manager: SavesSteps
    run: RunState
    content: ModelContent
    gradients: Gradients
    saver: Saver | None
    coordinator: Coordinator
    """Others that save the last step make lines of their own from it."""
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
        if self.saver is not None and not self.run.half_loaded:  # that is no step
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
        self.run.half_loaded.refuse("the last completed step is not saved")
        assert self.mark is not None and self.marked is not None
        if self.mark.step != self.saved:
            self.manager.save_step(DueSave(self.mark.step, last=True, mark=self.mark))
        self.manager.wait()

    @gc_paused()
    def expected_bytes(self) -> int:
        """Estimate this rank's bytes in a save.

        Does not call the dataloader or user states, which might advance generators: their state is small or counted
        with the model.
        """
        return self.content.num_bytes() + (self.run.trained.num_bytes() if self.run.trained is not None else 0)

    def save_seconds(self) -> float:
        """Estimate the seconds from copy to commit: the longest of the last saves, or 5 s plus 100 MB/s before any."""
        if self.saver is None:
            return 0.0
        return max(self.saver.seconds, default=0.0) or 5.0 + self.expected_bytes() / 1e8
