"""DueSave: a step to save. ModelContent: what of the model it holds. CompletedStep: the last one, which can be saved.
Failures: whether a run goes on without what a disk refused. What is decided of a step's exports before they are made.

Owns the decision whether it is the whole model, its adapter alone, the model without training state, or nothing of it,
and what follows where training changes a base that was to be left out.
"""

from __future__ import annotations

import errno
import logging
import math
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.components.gradients import Gradients
from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import Mark, Snapshot, as_marked, snapshot_of_mark, take_mark, take_snapshot
from titan_ckpt.config import CheckpointConfig, ExportConfig, SaveConfig
from titan_ckpt.directory.manifest import MAX_METRICS, Kind
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import is_unicode
from titan_ckpt.errors import CheckpointError, ConfigError, ExportSettingError, PeerError, counted, listed
from titan_ckpt.process import gc_paused
from titan_ckpt.saving.saver import Saver
from titan_ckpt.weights.identity import BaseIdentity, TrackedBase, identify_base
from titan_ckpt.weights.transforms import casts_to
from titan_ckpt.weights.wrapper import ModelState, ModelWrapper

logger = logging.getLogger(__name__)

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES})
"""Errors of a disk or a store that may pass. EACCES: credentials or a Kerberos ticket have expired; a right that
was always missing is found before the first step."""

_MOST_IN_ROW = 3
"""Failures in a row after which a run goes on; a disk that refuses more does not get better by itself."""

Outcome = Literal["done", "disk", "peer", "other"]
"""How a save or an export ended on one rank: well, or because of the disk, of another rank, or of anything else."""


@dataclass(frozen=True, slots=True)
class DueSave:
    """A save that is due, as `CheckpointManager.save` gives it to `save_step`."""

    step: int
    """The step that has just been completed, or with `mark` the one that the mark is of."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The values that retention compares and `titan-ckpt ls` shows, as the run has given them; rank 0's count."""
    skippable: bool = False
    """Whether it may be left out while another save is being written (if_busy)."""
    last: bool = False
    """Whether no later save can make up for it: the last step of the run, or of this process."""
    mark: Mark | None = None
    """Save the marked state instead of the live one: that of the last completed step."""
    model_only: bool | str = False
    """Save the model alone; a string is the dtype of its floating-point tensors."""

    def numbers(self, rank: int) -> dict[str, float]:
        """Return the metrics that are finite. Every rank calls it, because a value may ask the others.

        A metric that is no number is refused on rank 0; a save that no later one makes up for is made without it.
        Raises: CheckpointError naming all of it.
        """
        finite, wrong = _finite(self.metrics)
        if wrong and rank == 0:
            if self.skippable:
                raise CheckpointError(f"metrics: {listed(wrong)}: give one number for each name")
            logger.warning("step %d is saved without metrics that are no numbers: %s", self.step, listed(wrong))
        return finite


ExportWay = Literal["now", "background", "left out"]
"""At once, while training waits; from a staged copy, while it goes on; not at all, because training must not wait."""


def step_number(step: Any) -> int:
    """Return a step as a plain integer, as JSON holds it: a loop may count by numpy. Raises: CheckpointError."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"{step!r:.50} is no step: give the number of the optimizer's steps, an integer")
    return number


def _finite(metrics: Any) -> tuple[dict[str, float], list[str]]:
    """Return the values that are finite, and what a manifest cannot hold: whatever is no number under a name."""
    if not isinstance(metrics, Mapping):
        return {}, [f"it is a {type(metrics).__name__}"]
    values: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in metrics.items():
        if not (isinstance(name, str) and is_unicode(name)):
            wrong.append(f"the name {name!r:.50} is no text")
            continue
        try:
            if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
                raise ValueError("a number would be this rank's part of it")
            if math.isfinite(value):
                values[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: tensors of many values
            wrong.append(f"{name!r:.50} is {value!r:.50}")
    if len(values) > MAX_METRICS:
        return {}, [f"there are {len(values)}, and a step holds {MAX_METRICS}"]
    return values, wrong


def may_be_there(step: int, last_step: bool, resumed_from: int | None) -> bool:
    """Return whether an earlier run of the same folder may have published the exports of this step.

    After a resume, steps are replayed with identical weights, so exports already on disk are still valid. A finished
    run makes only the exports that it had not completed.
    """
    return resumed_from is not None and (not last_step or resumed_from == step)


def way_to_export(last_step: bool, staged: bool, busy: bool, save: SaveConfig | None) -> ExportWay:
    """Return how exports that are due are made. `staged`: every rank has a copy of the weights. `busy`: a save or
    exports are in flight.
    """
    if last_step:
        return "now"
    if staged:
        return "background"
    return "left out" if busy and save is not None and save.if_busy == "skip" else "now"


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
            self.mark, self.is_changing = take_mark(self.run, step_number(step), self.gradients.unused()), False

    @property
    def saved(self) -> int | None:
        """Return the step that was saved or resumed last, or is being saved."""
        in_flight = self.saver.in_flight if self.saver is not None else None
        return self.settled if in_flight is None else in_flight.step

    @property
    def marked(self) -> int | None:
        """Return the step that `save` would save; None if none is, or an optimizer may have changed it."""
        return None if self.mark is None or self.is_changing or not self.is_watched else self.mark.step

    def snapshot(self, due: DueSave) -> Snapshot:
        """Return the run as a save takes it: now, or at a mark; the model alone if the save is of that.

        Raises: SaveError for what no step can hold, or is gone; StateEncodingError; ExportError.
        """
        run, model, mark = self.run, self.run.model, due.mark
        if due.model_only:
            casts = casts_to(None if due.model_only is True else getattr(torch, due.model_only))
            return take_snapshot(run, due.step, model.state("full"), [*filter(None, [run.extra])], casts)
        run.refuse_changed(due.step)
        unused = self.gradients.unused() if mark is None else mark.unused
        held = any(getattr(s, "holds_gradients", False) for s in run.states.values())
        if unused.parameters and (unused.unreduced or not held):
            self.gradients.refuse(unused, due.step, model.parameter_names())
        if mark is None:
            return take_snapshot(run, due.step, self.content.state())
        with as_marked(run, mark):
            return snapshot_of_mark(run, mark, self.content.state(room=True))

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


@dataclass(slots=True)
class ModelContent:
    """The model's part of the steps of one run."""

    config: CheckpointConfig
    model: ModelWrapper
    coordinator: Coordinator
    base: TrackedBase | None = None
    """None without adapters, before a load, and for a base that training changes: no other folder holds that."""
    is_changed: bool = False
    """Whether training has changed the base, in this run or in the one that was resumed."""
    is_settled: bool = False
    """Whether the first step since the load has shown if training changes the base; it must not change it later."""

    def loaded(self, identity: BaseIdentity | None) -> None:
        """Take over what a load has found: None for a base that was changed, and for a run without adapters."""
        self.base, self.is_changed = None, identity is None
        if identity is not None:
            self.base = TrackedBase(self.model, self.coordinator, identity)

    def record_current(self) -> None:
        """Identify the base of a run that loads nothing. Collective."""
        if self.coordinator.anywhere("owned", self.model.owned_state_dict):
            trained = self.coordinator.anywhere("trained base", self.model.trained_base)
            self.loaded(None if trained else identify_base(self.model, None, self.coordinator))

    def forget_changed_base(self) -> list[str]:
        """Forget the base if any rank has changed it, and return the changed tensors. Collective."""
        changed = [] if self.base is None else self.base.changes_of_ranks()
        if changed:
            self.base, self.is_changed = None, True
        return changed

    @property
    def identity(self) -> BaseIdentity | None:
        """Return what a step records of the base."""
        return None if self.base is None else self.base.identity

    @property
    def is_adapter_only(self) -> bool:
        """Whether a save leaves out the base, because it is on disk already."""
        is_stored = self.base is not None and self.base.identity["path"] is not None
        return is_stored and self.config.save is not None and not self.config.save.include_base

    def kind(self, model_only: bool | str) -> Kind:
        """Return the kind of the next step. `model_only`: whether it is the model alone, or in which dtype."""
        if self.config.external:
            return "external"
        return "model" if model_only else "adapter" if self.is_adapter_only else "full"

    def num_bytes(self) -> int:
        """Return this rank's bytes of the model in a step."""
        return 0 if self.config.external else self.model.num_bytes(owned=self.is_adapter_only)

    def state(self, *, room: bool = False) -> ModelState:
        """Return what a step holds. `room`: as memory to fill. Raises: ConfigError for a base that changes late."""
        if self.config.external:
            return ModelState({}, {}, ())
        state = self.model.state("full", room=room)
        if self.base is None or not self.is_adapter_only:
            return state
        if self.is_settled and (changed := self.base.changes()):
            problem = (
                f"save.include_base: training changes {counted(len(changed), 'tensor')} of the base, such as "
                f"{changed[0]}, and saves of the adapter alone lose them: set it to true, and start the "
                "run again from its newest step"
            )
            raise ConfigError([problem], "checkpoint")
        return replace(state, tensors={fqn: value for fqn, value in state.tensors.items() if self.model.owns(fqn)})

    def settle(self) -> None:
        """After the first step, let saves hold the base too if the step has changed it. Collective.

        Raises: ExportSettingError for an export of the adapter alone, which would lose the changes.
        """
        was_left_out = self.is_adapter_only
        changed = self.forget_changed_base()
        self.refuse_adapter_of_changed_base(self.config.export, changed)
        if changed and was_left_out:
            logger.warning("%s: every save holds the base, not the adapter alone", _changes(changed))
        self.is_settled = True

    def refuse_adapter_of_changed_base(self, exports: Sequence[ExportConfig], changed: Sequence[str] = ()) -> None:
        """Raises: ExportSettingError for an export of the adapter alone if training changes the base."""
        if self.is_changed and any(export.format == "peft" for export in exports):
            raise ExportSettingError(
                f"checkpoint.export: peft: {_changes(changed)}, which an adapter does not hold: export merged weights "
                '(format = "hf"), or start a run whose base is frozen, its buffers included'
            )


def _changes(changed: Sequence[str]) -> str:
    what = f"{counted(len(changed), 'tensor')} of the base, such as {changed[0]}" if changed else "the base"
    return f"training changes {what}"


@dataclass(slots=True)
class Failures:
    """The failures of one run, counted alike on every rank."""

    config: SaveConfig | None
    """It has on_failure; without it, every failure ends the run."""
    coordinator: Coordinator
    in_row: Counter[tuple[str, ExportConfig | None]] = field(default_factory=Counter)

    def verdict(
        self,
        what: Literal["saved", "exported"],
        step: int,
        error: BaseException | None,
        *,
        is_last: bool,
        of: ExportConfig | None = None,
    ) -> BaseException | None:
        """Count how the save or the exports of a step ended; log a failure after which the run goes on. Collective.

        `error`: what was raised on this rank. `is_last`: nothing later makes up for a failure. `of`: the export that
        was made alone; others that succeed at the same step do not end its failures.
        Return what the caller must raise, on all ranks, so that none waits for another: `error`, or PeerError on a rank
        that has no error of its own; None if the run goes on.
        """
        if self.config is None or self.config.on_failure == "raise" or is_last:
            return error
        try:
            of_ranks: list[Any] = self.coordinator.gather(f"is step {step} {what}", outcome_of(error))
        except PeerError as lost:
            return error or lost
        failed = [rank for rank, outcome in enumerate(of_ranks) if outcome != "done"]
        of_peers = PeerError(f"step {step} was not {what} on rank {listed([*map(str, failed)], ', ', ' ')}", failed)
        if not is_disk_failure(of_ranks):
            self.in_row[what, of] = 0
            return (error or of_peers) if failed else None
        assert error is not None, "all ranks failed"
        self.in_row[what, of] += 1
        count = self.in_row[what, of]
        logger.warning("step %d is not %s (%d in a row, %d are accepted): %s", step, what, count, _MOST_IN_ROW, error)
        return error if count > _MOST_IN_ROW else None


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how a save or an export ended that raised this error on this rank; its causes count too."""
    if error is None:
        return "done"
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(e, OSError) and e.errno in DISK_ERRORS for e in chain):
        return "disk"
    return "peer" if any(isinstance(e, PeerError) for e in chain) else "other"


def is_disk_failure(of_ranks: Collection[Outcome]) -> bool:
    """Return whether something failed on all ranks, because of the disk alone."""
    return "disk" in of_ranks and set(of_ranks) <= {"disk", "peer"}
