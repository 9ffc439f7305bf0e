"""CheckpointManager: conducts loads, saves and exports of one run. No policy, no format, no tensor maths."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from titan_ckpt import policy
from titan_ckpt.components import Mark, RunState, Snapshot
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import CheckpointError, CommitConflictError, ConfigError, ExportError
from titan_ckpt.exporting import Exporter
from titan_ckpt.external_weights import ExternalWeights
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.restoring import LoadResult, Restorer
from titan_ckpt.saving import SaveHandle, Saver, SaveRequest
from titan_ckpt.transforms import StateDictTransforms
from titan_ckpt.types import ModelHooks, StateDict, Stateful

logger = logging.getLogger(__name__)

_HANDLER_MISSING = (
    'checkpoint.components: "model" is left out, so the weights come from outside, and nothing delivers them: give the '
    'manager external_weights=, or a subclass of Trainer a method external_weights, or add "model"'
)
_HANDLER_UNUSED = (
    "external_weights is given, and checkpoint.components holds the model: every weight has one source. Name the "
    'components without "model", or leave the handler out'
)


class CheckpointManager:
    """Checkpoints of one training run. A context manager; every method is collective over all ranks.

    with CheckpointManager(config, model_parts=[model], optimizers=[optimizer], ...) as manager:
        start = manager.load().step
        for step in range(start + 1, steps + 1):
            loss(...).backward()
            manager.maybe_wait_for_staging()  # a copy of the weights may still be under way
            optimizer.step()
            manager.save(step, last_step=step == steps)
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        model_parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        lr_schedulers: Sequence[Stateful] = (),
        dataloader: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        sd_transforms: StateDictTransforms | None = None,
        model_converters: ModelHooks | None = None,
        external_weights: ExternalWeights | None = None,
        base_folder: str | Path = ".",
    ) -> None:
        """Bind to a run's objects; touches no file. `config.folder` and export folders are under `base_folder`.

        `external_weights` fills the model at every load, where `config.components` leaves the model out.
        Raises: ConfigError where one of the two is there without the other.
        """
        if config.external is (external_weights is None):
            raise ConfigError([_HANDLER_MISSING if config.external else _HANDLER_UNUSED])
        left_out = config.left_out()
        timeout = config.save.timeout_seconds if config.save else 1800.0
        self.config = config
        self.base_folder = Path(base_folder)
        self._transforms = sd_transforms or StateDictTransforms()
        self._hooks = model_converters
        self._model = ModelWrapper(model_parts, model_converters)
        self._coordinator = Coordinator.current(timeout)
        self._run = RunState(
            self._model,
            () if "optimizer" in left_out else optimizers,
            () if "lr_scheduler" in left_out else lr_schedulers,
            None if "dataloader" in left_out else dataloader,
            {} if "states" in left_out else dict(states or {}),
            left_out=left_out,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
        )
        storage_line = self._coordinator.background()
        self._directory = CheckpointDirectory(Path(base_folder) / config.folder, storage_line)
        self._restorer = Restorer(
            config, self._directory, self._run, self._transforms, external_weights, self._coordinator
        )
        self._saver = Saver(self._directory, storage_line, config.save) if config.save else None
        self._exporter = Exporter(
            Path(base_folder), self._model, self._transforms, self._coordinator, config.initial_load
        )
        self._exporter.check(config.export)
        self._step_hooks = [  # so that a loop that forgets maybe_wait_for_staging() saves no mixture of two steps
            optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step()) for optimizer in optimizers
        ]
        self._base: dict[str, Any] | None = None
        self._resumed_from: dict[str, Any] | None = None
        self._saved_step: int | None = None
        self._exported_step: int | None = None
        self._mark: Mark | None = None
        self._stepping = False
        self._knows_folder = False
        self._closed = False

    # load

    def load(self, step: int = -1) -> LoadResult:
        """Resume, or load the initial sources, or start afresh, in this order of preference.

        `step` (or config.resume.step) asks for one step and never falls back; -1 takes the newest valid one, then older
        ones, logging why each was skipped. Call it before the first step, and again to roll back. Tensors that
        `materialise` left without values and no source provides are initialised once everything is read.
        Raises: CheckpointNotFoundError; LoadMismatchError; CorruptCheckpointError when no candidate can be read;
        BaseMismatchError; ConverterError for another set of converters.
        """
        self._check_open()
        self.wait()
        self._mark = None
        restored = self._restorer.restore(step if step >= 0 else self.config.resume.step)
        self._base, self._resumed_from = restored.base, restored.resumed_from
        self._saved_step = restored.result.step if restored.resumed_from else None
        self._preflight()
        self._knows_folder = True
        return restored.result

    def _preflight(self) -> None:
        """Find out before step 1 whether saves will work: lease, permissions, space for what they will take."""
        if self._saver is not None:
            self._directory.preflight(self._expected_bytes())

    # save

    def save(
        self,
        step: int,
        last_step: bool = False,
        *,
        force: bool = False,
        metrics: Mapping[str, float] | None = None,
        export: bool = True,
    ) -> bool:
        """Save if the step is due, and make the exports that are; the last step's are waited for. True if it saved.

        `export=False` leaves them to a call of `export()`. `force` saves a step that is not due: the process is about
        to be stopped. `metrics`: values that retention by the best may go by, recorded with the step; rank 0's count,
        and those that are not finite are left out.
        Raises: what an earlier save in the background raised, once; SaveError; ExportError.
        """
        self._check_open()
        saved = False
        due = force or policy.is_due(step, self.config.save, last_step)
        if self._saver is not None and due and step != self._saved_step:
            finite = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}
            saved = self._save(step, finite, skippable=not (force or last_step))
        if export:
            self.export(step, last_step)
        return saved

    def export(self, step: int, last_step: bool = False) -> bool:
        """Make the exports that are due after this step, all on the last one. Returns whether any was.

        A save of the last step is waited for first, so that a failed export costs no training. Of another step that
        was saved asynchronously the staged copy is exported in the background; the next `wait` raises what it raises.
        Raises: ExportError; on the last step also what the save raised.
        """
        self._check_open()
        due = policy.due_exports(step, self.config.export, last_step)
        if last_step:
            self.wait()
        # A step that a resumed run makes again has the weights it had; of a finished run only what it owed is missing.
        made_before = self._resumed_from is not None and (not last_step or self._resumed_from["step"] == step)
        if due and step == self._exported_step:
            self.wait()
            made_before = True
        self._exported_step = step
        todo = [export for export in due if not (made_before and self._exporter.is_there(export, step))]
        if todo and not last_step and self._has_staged(step):
            assert self._saver is not None
            self._saver.export(step, partial(self._exporter.stage, todo, step, self._base))
        elif todo and not last_step and self._is_skipping():
            logger.warning("step %d is due for export and left out: what came before it is still being written", step)
        else:
            for export in todo:
                self._exporter.export(export, step, self._base)
        return bool(due)

    def _has_staged(self, step: int) -> bool:
        """Say whether every rank has a copy of this step's weights. Collective."""
        return all(self._coordinator.gather("export-staged", self._saver is not None and self._saver.has_staged(step)))

    def _is_skipping(self) -> bool:
        """Say whether rather a save is left out than training held up, and one is under way. Collective."""
        skips = self.config.save is not None and self.config.save.if_busy == "skip"
        return skips and bool(self._coordinator.broadcast("busy", self._saver is not None and self._saver.busy))

    def _save(self, step: int, metrics: dict[str, float], *, skippable: bool, mark: Mark | None = None) -> bool:
        assert self._saver is not None and self.config.save is not None
        busy = self._coordinator.broadcast("busy", self._saver.busy)
        if busy and skippable and self.config.save.if_busy == "skip":
            logger.warning("step %d is due and not saved: the save before it is still being written", step)
            return False
        if busy and skippable:
            logger.warning("step %d is due and training waits: the save before it is still being written", step)
        failed: ExportError | None = None
        try:
            self.wait()
        except ExportError as error:  # no reason to go without this step as well
            failed = error
        self._look_before_saving(step)
        request = SaveRequest(
            step,
            "external" if self.config.external else "adapter" if self._adapter_only else "full",
            converters=self._hooks.describe() if self._hooks else [],
            base=None if self.config.external else self._base,
            resumed_from=self._resumed_from,
            metrics=metrics,
            expire=mark is None,
        )

        def take() -> Snapshot:
            model = self._model_to_save()
            return self._run.snapshot(step, model) if mark is None else self._run.snapshot_of(mark, model)

        self._saver.save(request, take)
        if self.config.save.async_mode == "disabled":
            self._saver.wait()
        elif not self._step_hooks:  # nothing here will tell when the weights are about to change
            self._saver.wait_staged()
        self._saved_step = step
        if failed is not None:
            raise failed
        return True

    def _look_before_saving(self, step: int) -> None:
        """Refuse to write a new run's steps among those of another one, which nobody looked at."""
        if not self._knows_folder and (steps := self._directory.steps()):
            raise CommitConflictError(
                f"{self._directory.root}: step {step} is to be saved, load() was never called, and step "
                f"{', '.join(map(str, steps[-8:]))} of an earlier run is there: call load() before the first step to "
                "resume, or choose another folder"
            )
        self._knows_folder = True

    @property
    def _adapter_only(self) -> bool:
        """Leave out a base that is on disk already."""
        base_is_stored = self._base is not None and self._base["path"] is not None
        return base_is_stored and self.config.save is not None and not self.config.save.include_base

    def _model_to_save(self) -> StateDict:
        if self.config.external:
            return {}
        return self._model.owned_state_dict() if self._adapter_only else self._model.state_dict("full")

    def _before_optimizer_step(self) -> None:
        self.maybe_wait_for_staging()
        self._stepping = True

    # the end of a step, to come back to

    def mark_step(self, step: int) -> None:
        """Note that the run's state is that of `step`, whole, so that it can still be saved while the next one runs.

        Call it when everything of the step is done: optimizer, schedulers, counters. Not collective, and cheap.
        """
        if self._saver is not None:
            self._mark = self._run.mark(step)
            self._stepping = False

    @property
    def marked_step(self) -> int | None:
        """Return the step whose state `save_marked` would save; None where an optimizer has begun to change it."""
        return None if self._mark is None or self._stepping or not self._step_hooks else self._mark.step

    @property
    def saved_step(self) -> int | None:
        """Return the step that was saved or resumed from last, or is being saved."""
        return self._saved_step

    def save_marked(self) -> None:
        """Save the marked step, as it was at its end, and wait for it; the steps before it stay. Collective.

        Raises: SaveError.
        """
        assert self._mark is not None and self.marked_step is not None
        if self._mark.step != self._saved_step:
            self._save(self._mark.step, {}, skippable=False, mark=self._mark)
        self.wait()

    def run_line(self) -> Coordinator:
        """Return a line to the other ranks that nothing else uses. Collective."""
        return self._coordinator.background()

    def save_seconds(self) -> float:
        """Estimate from begin to commit: the longest of the last saves; before there are any, 100 MB/s and 5 s more."""
        if self._saver is None:
            return 0.0
        return self._saver.longest_seconds or 5.0 + self._expected_bytes() / 1e8

    def _expected_bytes(self) -> int:
        """Estimate this rank's part of a save."""
        model = {} if self.config.external else self._model.memory()
        if self._adapter_only:
            model = {fqn: value for fqn, value in model.items() if self._model.owns(fqn)}
        return self._run.expected_bytes(model)

    @property
    def in_flight(self) -> SaveHandle | None:
        """Return the save that `wait` would wait for."""
        return self._saver.in_flight if self._saver is not None else None

    def maybe_wait_for_staging(self) -> None:
        """Return when the weights may change; call right before the optimizer's step."""
        if self._saver is not None:
            self._saver.wait_staged()

    def wait(self) -> None:
        """Wait until the save in flight is committed, and exports of it are there. Raises: what they raised, once."""
        if self._saver is not None:
            try:
                self._saver.wait()
            except ExportError:
                raise  # the step itself is committed
            except BaseException:
                self._saved_step = None  # it may be saved again
                raise

    def close(self) -> None:
        """Finish the save in flight and release the folder; idempotent. Raises: what that save raised, once."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            for hook in self._step_hooks:
                hook.remove()
            if self._saver is not None:
                self._saver.close()
            self._directory.close()
            self._coordinator.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self._directory.root}: this CheckpointManager is closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is None:
            self.close()
            return
        try:
            self.close()
        except Exception:  # the run's own error is the one to be seen
            logger.exception("the last save failed while the run was stopping because of another error")
