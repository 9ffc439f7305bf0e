"""The events of a run, their order, and the callbacks it may have, by name.

Owns no behaviour: each callback is in a module of its family. One of your own subclasses Callback and is handed to the
Trainer; it comes after the named ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from titan_ckpt.run_guard import StopRun

if TYPE_CHECKING:
    from titan_ckpt.restoring import LoadResult
    from titan_ckpt.training.trainer import Trainer

LogValue = float | list[float]
"""A number, or one for each of a few like things, such as a layer's experts."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step, as seen by all ranks together."""

    step: int
    loss: float
    """Mean over all predicted tokens of the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_tokens: int
    """Predicted tokens of the step, over all ranks."""
    seconds: float


class Callback:
    """Every event does nothing here. All ranks call all of them, in the order in which they are written here."""

    def on_init_end(self, trainer: Trainer) -> None:
        """Everything is built, nothing is loaded."""

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        """Weights, and when resuming the run's state, are in place."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """The first step of this process comes next."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """The next sequence is of this pass over the data, counted from 0; after a resume not always its first."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Nothing of the step is done."""

    def on_substep_begin(self, trainer: Trainer, index: int) -> None:
        """Micro-batch `index` of the step comes next; under pipeline parallelism all of a step come at once."""

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        """The gradients of micro-batch `index` are added up."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Gradients are complete and clipped, weights are those of the step before."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Weights, schedule and data position are those after the step."""

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        """Held-out text was measured with the weights after this step."""

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        """A step is reported: its StepMetrics by name, and `trainer.measurements`."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """A save of this step was started, or made."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """The step that just ended took the last sequence of this pass over the data."""

    def on_train_end(self, trainer: Trainer) -> None:
        """No further step follows; called after an exception too."""


@dataclass(slots=True)
class Callbacks(Callback):
    """The callbacks of a run, called in the order of the fields; None is one that this run does not have.

    Health comes first, so that a broken step is not reported as a step. What measures comes before what reports, and
    reports come before the save, so that a saved step has its line in metrics.jsonl.
    """

    gradient_health: Callback | None = None
    load_balance: Callback | None = None
    memory: Callback | None = None
    evaluation: Callback | None = None
    logging: Callback | None = None
    tensorboard: Callback | None = None
    wandb: Callback | None = None
    progress: Callback | None = None
    checkpoint: Callback | None = None
    export: Callback | None = None
    profiler: Callback | None = None
    garbage_collection: Callback | None = None
    user: tuple[Callback, ...] = ()

    def __iter__(self) -> Iterator[Callback]:
        named = (getattr(self, f.name) for f in fields(self) if f.name != "user")
        yield from (callback for callback in named if callback is not None)
        yield from self.user

    def on_init_end(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_init_end(trainer)

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        for callback in self:
            callback.on_load(trainer, result)

    def on_train_begin(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_train_begin(trainer)

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        for callback in self:
            callback.on_epoch_begin(trainer, epoch)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        for callback in self:
            callback.on_step_begin(trainer, step)

    def on_substep_begin(self, trainer: Trainer, index: int) -> None:
        for callback in self:
            callback.on_substep_begin(trainer, index)

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        for callback in self:
            callback.on_substep_end(trainer, index)

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        for callback in self:
            callback.on_pre_optimizer(trainer, step, grad_norm)

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        for callback in self:
            try:
                callback.on_step_end(trainer, metrics)
            except StopRun:
                if callback is self.evaluation and self.logging is not None:  # the step is whole, and will be saved
                    self.logging.on_step_end(trainer, metrics)
                raise

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        for callback in self:
            callback.on_evaluate(trainer, step, values)

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        for callback in self:
            callback.on_log(trainer, step, values)

    def on_save(self, trainer: Trainer, step: int) -> None:
        for callback in self:
            callback.on_save(trainer, step)

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        for callback in self:
            callback.on_epoch_end(trainer, epoch)

    def on_train_end(self, trainer: Trainer) -> None:
        for callback in self:
            callback.on_train_end(trainer)
