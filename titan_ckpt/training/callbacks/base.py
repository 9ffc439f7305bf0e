"""The events of a run, their order, and its built-in callbacks by name.

Owns no behaviour: the callbacks are in the other modules. Your own callback subclasses Callback and is passed to the
Trainer; it is called after the built-in ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from titan_ckpt.encoding.named import make_named
from titan_ckpt.errors import collected, refuse
from titan_ckpt.guard.run_guard import StopRun
from titan_ckpt.loading.external import ExternalLoad
from titan_ckpt.loading.restore import LoadResult

if TYPE_CHECKING:
    from titan_ckpt.training.trainer import Trainer as Trainer
else:
    Trainer = Any  # the trainer is made of callbacks, and they name it in annotations alone

LogValue = float | list[float]
"""A number, or a list with one number for each item of a kind, such as a layer's experts."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step over all ranks."""

    step: int
    loss: float
    """Mean loss of the step over all predicted tokens, or with training.loss_average = "rank" of the ranks' means; nan
    in a step that is not measured (training.check_gradients)."""
    grad_norm: float
    """Global norm of the gradients before clipping; nan in a step that is not measured."""
    lr: float
    num_tokens: int
    """Number of predicted tokens of the step, over all ranks."""
    seconds: float
    """Time of the step. With training.check_gradients = "log" it is the mean of the steps since the last one that was
    measured, because a step in between does not wait until the device has done its work."""


class Callback:
    """Base of all callbacks; its events do nothing. Every rank calls all events, in the order of these methods."""

    def on_init_end(self, trainer: Trainer) -> None:
        """Everything is built; nothing is loaded yet."""

    def on_external_load(self, trainer: Trainer, event: ExternalLoad) -> None:
        """Fill the model (docs/external-weights.md). A run whose checkpoint.components hold it has no such event."""

    def on_load(self, trainer: Trainer, result: LoadResult) -> None:
        """Weights are loaded, and after a resume also the run's state."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """The first step of this process is next."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """The next sequence is in this pass over the data, counted from 0; after a resume it may not be the first."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Nothing of the step is done yet."""

    def on_substep_begin(self, trainer: Trainer, index: int) -> None:
        """Micro-batch `index` of the step is next; with a pipeline, all micro-batches have this event first."""

    def on_substep_end(self, trainer: Trainer, index: int) -> None:
        """The gradients of micro-batch `index` are accumulated."""

    def on_pre_optimizer(self, trainer: Trainer, step: int, grad_norm: float) -> None:
        """Gradients are complete and clipped; weights are those of the previous step. `grad_norm`: see StepMetrics."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Weights, schedule and data position are those after the step."""

    def on_evaluate(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        """Held-out text was measured with the weights after this step."""

    def on_log(self, trainer: Trainer, step: int, values: Mapping[str, LogValue]) -> None:
        """A step is reported; `values` has its StepMetrics by name and `trainer.measurements`.

        A second call for a step has the step, and what callbacks measured in their `on_step_end` after the first one.
        """

    def on_save_begin(self, trainer: Trainer, step: int) -> None:
        """A save of this step is due, and nothing of it is written."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """A save of this step was started or completed."""

    def on_committed(self, trainer: Trainer, step: int, folder: str, digest: str) -> None:
        """The step is committed in this folder, and a power failure does not take it away.

        `digest` is the XXH3-128 of its MANIFEST.json, which has the digests of all its files. Unlike the other events,
        this and the next one are called on rank 0 alone, in the thread that wrote, at any time until the run has ended.
        An error in them, StopRun too, is logged and does not end the run; they cannot save, load or export.
        """

    def on_exported(self, trainer: Trainer, step: int, folder: str) -> None:
        """The export of this step is proved and published in this folder."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """The step that just ended took the last sequence of this pass over the data."""

    def on_train_end(self, trainer: Trainer) -> None:
        """No further step follows; also called after an exception."""


@dataclass(slots=True)
class Callbacks(Callback):
    """The callbacks of a run, called in the order of the fields; None is a callback that this run does not have.

    Health comes first, so that a broken step is not reported. Measurements come before reports, and reports come before
    the save, so that a saved step has its line in metrics.jsonl.
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

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Call every callback, and the log once more for what was measured after it, also if that stops the run."""
        logging = self.logging or Callback()
        try:
            for callback in self:
                callback.on_step_end(trainer, metrics)
        except StopRun:  # the step is complete and will be saved
            logging.on_step_end(trainer, metrics)
            raise
        logging.on_step_end(trainer, metrics)


def _call_each(callbacks: Callbacks, name: str, /, *args: Any, **kwargs: Any) -> None:
    for callback in callbacks:
        getattr(callback, name)(*args, **kwargs)


for _name in vars(Callback):
    if _name.startswith("on_") and _name not in vars(Callbacks):
        setattr(Callbacks, _name, partialmethod(_call_each, _name))


def import_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import and create each "package.module:Class". Raises: ConfigError listing names that are no callback."""
    made: list[Callback] = []
    problems: list[str] = []
    for i, name in enumerate(names):
        with collected(problems):
            made.append(make_named(Callback, f"callbacks.{i}", name))
    refuse(*problems)
    return made
