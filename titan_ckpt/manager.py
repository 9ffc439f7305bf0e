"""CheckpointManager: conducts loads, saves and exports of one run. No policy, no format, no tensor maths."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from titan_ckpt import plan, policy
from titan_ckpt.base_identity import check_base, identify_base
from titan_ckpt.components import Mark, RunState, Snapshot
from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.converter_record import check_converters
from titan_ckpt.directory import CheckpointDirectory
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitConflictError,
    ConfigError,
    CorruptCheckpointError,
    ExportError,
)
from titan_ckpt.exporting import Exporter
from titan_ckpt.external_weights import ExternalLoad, ExternalWeights
from titan_ckpt.initialize import initialise, mark_filled
from titan_ckpt.loading import PreparedLoad, prepare_load
from titan_ckpt.manifest import Manifest
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.plan import LoadPlan, ResumeStep
from titan_ckpt.resume import ResumeState
from titan_ckpt.saving import SaveHandle, Saver, SaveRequest
from titan_ckpt.storage import detect_format
from titan_ckpt.transforms import StateDictTransforms
from titan_ckpt.types import Format, LoadReport, ModelHooks, StateDict, Stateful

logger = logging.getLogger(__name__)

_HANDLER_MISSING = (
    'checkpoint.components: "model" is left out, so the weights come from outside, and nothing delivers them: give the '
    'manager external_weights=, or a subclass of Trainer a method external_weights, or add "model"'
)
_HANDLER_UNUSED = (
    "external_weights is given, and checkpoint.components holds the model: every weight has one source. Name the "
    'components without "model", or leave the handler out'
)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Where training goes on: `step` is 0 after an initial load or a fresh start."""

    step: int
    plan: LoadPlan
    report: LoadReport


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
        self._external_weights = external_weights
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
        requested = step if step >= 0 else self.config.resume.step
        result = self._resume_newest() if requested is None else self._resume(requested, by_number=True)
        if result is None:
            result = self._load_initial()
        self._preflight()
        self._knows_folder = True
        return result

    def _resume_newest(self) -> LoadResult | None:
        """Resume the newest step that is whole, else one before it; None where there is none to resume from."""
        failure: Exception | None = None
        for candidate in self._directory.steps()[::-1]:
            try:
                result = self._resume(candidate, by_number=False)
            except Exception as error:  # whatever it is on this rank, all ranks are here, and decide together
                if not any(self._coordinator.gather("ladder", isinstance(error, CorruptCheckpointError))):
                    raise
                logger.warning("step %d cannot be resumed from; going on to the one before it: %s", candidate, error)
                failure = error
                continue
            if result is not None:
                return result
        if failure is not None:
            raise failure
        return None

    def _load_initial(self) -> LoadResult:
        load_plan = self._resolve(None)
        with self._prepare(load_plan, resuming=False) as prepared:
            self._read(prepared)
            report = self._complete(load_plan, prepared)
            self._identify_base(load_plan, prepared, None)
        return LoadResult(0, load_plan, report)

    def _resume(self, step: int, *, by_number: bool) -> LoadResult | None:
        """1 Plan. 2 Open everything and check that it fits. 3 Read. 4 Initialise. 5 Hand over what is not a tensor.

        Returns None for a step that holds weights only, which is a source of weights but cannot be resumed from.
        """
        manifest = self._directory.manifest(step)
        if manifest.kind == "model":
            if by_number:
                raise CheckpointNotFoundError(
                    f"step {step} holds model weights only, so training cannot resume from it; name it in "
                    "[[checkpoint.initial_load]] of another run instead"
                )
            return None
        path = self._directory.step_path(step)
        load_plan = self._resolve(ResumeStep(step, manifest.kind, path))
        check_converters(manifest.converters, self._hooks.describe() if self._hooks else [], manifest.step)
        with self._prepare(load_plan, resuming=True) as prepared:
            state = ResumeState.open(path, manifest, self._run, load_plan.exclude, self._coordinator)
            with state:
                self._read(prepared, state)
            report = self._complete(load_plan, prepared)
            self._identify_base(load_plan, prepared, manifest)
        self._together("load-apply", lambda: state.apply(self._run, load_plan.exclude))
        self._resumed_from = {"step": step, "attempt": manifest.attempt}
        self._directory.resume_from(step)
        self._saved_step = step
        return LoadResult(step, load_plan, report)

    def _resolve(self, step: ResumeStep | None) -> LoadPlan:
        plans: list[LoadPlan] = []
        self._together("load-sources", lambda: plans.append(plan.resolve(self.config, step, self._describe)))
        logger.info("%s", plans[0])
        return plans[0]

    def _preflight(self) -> None:
        """Find out before step 1 whether saves will work: lease, permissions, space for what they will take."""
        if self._saver is not None:
            self._directory.preflight(self._run.expected_bytes(self._model_to_save()))

    def _prepare(self, load_plan: LoadPlan, *, resuming: bool) -> PreparedLoad:
        return prepare_load(load_plan.sources, self._model, self._transforms, self._coordinator, require_owned=resuming)

    def _read(self, prepared: PreparedLoad, state: ResumeState | None = None) -> None:
        """1 Every rank verifies what memory holds of its files. 2 When all have, live tensors are filled.

        3 Adapters that become part of the base are added to it, if it is the one they know.
        """
        parts: list[PreparedLoad | ResumeState] = [prepared] if state is None else [prepared, state]
        self._together("load-check", lambda: [part.check() for part in parts])
        self._together("load-read", lambda: [part.read() for part in parts])
        if prepared.merges:
            if bases := prepared.adapter_bases(merged=True):
                unmerged = identify_base(self._model, (), None, self._coordinator)
                for path, recorded in bases:
                    check_base(unmerged, recorded, str(path))
            self._together("load-merge", prepared.merge)

    def _complete(self, load_plan: LoadPlan, prepared: PreparedLoad) -> LoadReport:
        """Take weights from outside, where they come from there; then initialise what still has no values."""
        report = self._take_from_outside(load_plan) if load_plan.external else prepared.report
        mark_filled(self._model, report.loaded)
        self._together("load-initialise", lambda: initialise(self._model, report.initialised))
        return report

    def _take_from_outside(self, load_plan: LoadPlan) -> LoadReport:
        """Let the handler fill the model. Raises: LoadMismatchError unless it filled all of it; what it raises."""
        assert self._external_weights is not None, "the constructor refuses"
        handler = self._external_weights
        event = ExternalLoad(load_plan.resume.step if load_plan.resume else 0, self._model.state_dict("full"))
        # at the start converters may give their own tensors values, as after any initial load
        may_lack = frozenset() if load_plan.resume else frozenset(filter(self._model.owns, event.tensors))

        def fill() -> None:
            handler(event)
            event.verify(may_lack)

        self._together("load-external", fill)
        return LoadReport(tuple(event.filled), initialised=tuple(may_lack - event.filled))

    def _together(self, tag: str, act: Callable[[], object]) -> None:
        """Act on every rank; where one fails, all raise. Collective."""
        error: BaseException | None = None
        try:
            act()
        except Exception as e:
            error = e
        self._coordinator.barrier(tag, error)

    def _identify_base(self, load_plan: LoadPlan, prepared: PreparedLoad, manifest: Manifest | None) -> None:
        """Digest the base that converter-owned weights stand on, and hold it against what each adapter records."""
        if not any(self._coordinator.gather("owned", bool(self._model.owned_state_dict()))):
            return
        own_base = manifest.base if manifest is not None and manifest.kind == "full" else None
        self._base = identify_base(self._model, load_plan.sources, own_base, self._coordinator)
        if manifest is not None and manifest.base is not None:
            check_base(self._base, manifest.base, f"step {manifest.step}")
        for path, recorded in prepared.adapter_bases():
            check_base(self._base, recorded, str(path))

    def _describe(self, source: InitialLoadConfig) -> tuple[Format, bool]:
        path = Path(source.path)
        if not path.exists():
            raise CheckpointNotFoundError(
                f"checkpoint.initial_load: {path} is not there; name an existing folder or file"
            )
        found = source.format or detect_format(path)
        return found, found == "peft"

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
        return self._saver.longest_seconds or 5.0 + self._run.expected_bytes(self._model_to_save()) / 1e8

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
