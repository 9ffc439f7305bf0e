"""CheckpointManager: conducts loads, saves and exports of one run. No policy, no format, no tensor maths."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from titan_ckpt.components.gradients import Gradients
from titan_ckpt.components.items.exchange_order import exchange_faults, wrappers_of
from titan_ckpt.components.known import peft_adapters
from titan_ckpt.components.known.loaders import seed_evaluation_apart, unwrapped_faults
from titan_ckpt.components.known.streams import stream_faults
from titan_ckpt.components.optimizer_content import PROVED, steppers, switches
from titan_ckpt.components.run_state import RunState
from titan_ckpt.components.snapshot import large_tensors
from titan_ckpt.config import CheckpointConfig, ExportConfig
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import CheckpointError, CommitConflictError, listed, refuse
from titan_ckpt.exporting.checks import check_exports, check_folders
from titan_ckpt.exporting.exporter import Exporter
from titan_ckpt.loading.external import ExternalWeights, check_handler
from titan_ckpt.loading.restore import LoadResult, Restorer
from titan_ckpt.models.hf_transforms import transforms_for
from titan_ckpt.process import gc_paused, instances_of
from titan_ckpt.saving.saver import SaveHandle, Saver
from titan_ckpt.saving.step import (
    CompletedStep,
    DueSave,
    Failures,
    ModelContent,
    may_be_there,
    step_number,
    way_to_export,
)
from titan_ckpt.stores.store import Place, open_location
from titan_ckpt.telemetry.events import Event, Telemetry
from titan_ckpt.types import ModelConverter, Stateful
from titan_ckpt.weights.initialize import initialize_missing
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints of one training run. A context manager; every method is collective over all ranks.

    ```
    with CheckpointManager(config, model_parts=[model], optimizers=[optimizer], ...) as manager:
        start = manager.load().step
        for step in range(start + 1, steps + 1):
            loss(...).backward()
            manager.maybe_wait_for_staging()  # the last save may still be copying the weights
            optimizer.step()
            manager.save(step, last_step=step == steps)
    ```
    """

    @gc_paused()
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
        model_converters: ModelConverter | None = None,
        external_weights: ExternalWeights | None = None,
        own_settings: Callable[[Mapping[str, Any]], frozenset[str]] = lambda _: frozenset(),
        rebuild: Callable[[Mapping[str, Any]], None] = lambda _: None,
        base_folder: str | Path = ".",
    ) -> None:
        """Bind to a run's objects without touching a file. `config.folder` and export folders are under `base_folder`.

        `external_weights` fills the model at every load; it is required if `config.components` leaves the model out,
        and refused otherwise. `own_settings` is called with the stored `states`, and returns the settings of optimizer
        groups, such as "weight_decay", of which a resume leaves this run's values; of "lr" also the group's
        "initial_lr", and a schedule has its rates in its own state. `rebuild` is called with them too, before a load
        compares the run with the step: it adds what training had added since its start, such as groups of optimizers.
        Without `sd_transforms` and converters, a model of transformers has those of
        StateDictTransforms.from_transformers.
        Raises: ConfigError for a folder that is a URI, if `external_weights` and `config.components` do not agree, for
        streams that would lose examples, for hooks of DDP that may keep more than gradients, and for adapters and
        optimizers of PEFT that were not proved to continue exactly; StateEncodingError for tensors of the model and
        for `states` that no checkpoint can hold.
        """
        if not isinstance(config, CheckpointConfig):
            raise TypeError(f"config is one {type(config).__name__}: give a CheckpointConfig(folder=..., save=...)")
        lists = {"model_parts": model_parts, "optimizers": optimizers, "lr_schedulers": lr_schedulers}
        for argument, given in lists.items():
            if isinstance(given, nn.Module) or not isinstance(given, Iterable):
                raise TypeError(f"{argument} is one {type(given).__name__}: put it in a list, {argument}=[...]")
        # an iterator has its items once, and many ask for them
        model_parts, optimizers, lr_schedulers = [*model_parts], [*optimizers], [*lr_schedulers]
        if not isinstance(states or {}, Mapping):
            raise TypeError(f'states is a {type(states).__name__}: give each object a name, states={{"name": object}}')
        exports = any(export.container == "hf" for export in config.export)
        if sd_transforms is None and model_converters is None and (exports or config.initial_load):
            sd_transforms = transforms_for(model_parts, exports=exports)
        transforms = sd_transforms or StateDictTransforms()
        require_local({"base_folder": base_folder, "sd_transforms.assets": transforms.assets})
        check_handler(config, ["external_weights"] if external_weights is not None else [])
        data = getattr(dataloader, "dataset", dataloader)
        is_judged = hasattr(dataloader, "read_again")  # a PositionedLoader has looked at its stream
        faults = [] if is_judged else [*stream_faults(data, config.allow)]
        faults += unwrapped_faults(dataloader, config.allow)
        refuse(*faults, *exchange_faults(wrappers_of(model_parts), config.allow))
        self.config = config
        self.base_folder = Path(base_folder)
        self._model = ModelWrapper(model_parts, model_converters)
        if not config.external:
            self._model.check_tensors()
        hooked = steppers(optimizers) or []
        refuse(*peft_adapters.faults(model_parts, hooked, config.allow))
        coordinator = self._coordinator = Coordinator.current(config.save.timeout_seconds if config.save else 1800.0)
        self._run = RunState(
            self._model, optimizers, lr_schedulers, dataloader,
            {**peft_adapters.adapter_states(model_parts), **(states or {})},
            rank=coordinator.rank, world_size=coordinator.world_size, left_out=config.left_out(),
            own_settings=own_settings, rebuild=rebuild,
        )  # fmt: skip
        if config.save is not None:
            coordinator.together("states", self._run.check_states)  # also on a rank that has no state
        self.watch = self._run.watch
        """What no step holds and must not change; an integration adds to it."""
        telemetry = self.base_folder if config.save or config.export else None  # a run that only loads writes nothing
        self.telemetry = Telemetry(telemetry, coordinator.rank, coordinator.world_size, config)
        """Add a sink of your own, or the settings of the whole run, before the load."""
        storage_line = coordinator.background()
        self.folder = open_location(config.folder, self.base_folder, config.store)
        """The folder, or the place in a bucket, that holds the steps."""
        self._directory = CheckpointDirectory(self.folder, storage_line)
        self._restorer = Restorer(
            config, self._directory, self._run, transforms, external_weights, coordinator,
            lambda fqns: self.initialize_missing(fqns),
        )  # fmt: skip
        self._saver = Saver(self._directory, storage_line, config.save, self.telemetry) if config.save else None
        self._exporter = Exporter(
            self.base_folder, self._run, transforms, coordinator, storage_line, config.initial_load, config.store,
            self.telemetry,
        )  # fmt: skip
        check_exports(self._exporter, config.export)
        self._switches = switches(optimizers)
        if self._switches and any(export.interval for export in config.export):
            logger.warning(
                "exports before the last step hold the weights that %s trains on; that of the last step holds those "
                "of its eval()",
                type(self._switches[0]).__name__,
            )
        self._step_hooks = [  # so that a loop without maybe_wait_for_staging() saves no mixture of two steps
            # a function, because a copy of an optimizer may copy its hooks, and of a method the manager
            optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
            for optimizer in hooked
        ]
        modules = [module for part in model_parts for module in part.modules()]
        moves = any(getattr(m, "max_norm", None) is not None or peft_adapters.changes_weights(m) for m in modules)
        self._may_copy_later = bool(hooked) and not moves and all(type(o) in PROVED for o in hooked)
        """Whether the weights change in optimizer.step() alone, which waits for a copy that is under way.

        The forward pass of an embedding with `max_norm` changes its rows, and PEFT's layers merge unseen by versions.
        """
        self._content = ModelContent(config, self._model, coordinator)
        self.completed = CompletedStep(
            self, self._run, self._content, Gradients(self._run.optimizers, modules), self._saver, coordinator,
            is_watched=bool(self._step_hooks),
        )  # fmt: skip
        """The last completed step; RunGuard and the Trainer use it."""
        self._resumed_from: dict[str, Any] | None = None
        self._is_last_save = False
        """Whether no later save can make up for the one in flight."""
        self._failures = Failures(config.save, coordinator)
        self._failed_exports: BaseException | None = None
        """The error of exports that have ended, until it is raised."""
        self._exported_step: int | None = None
        self.exported: dict[ExportConfig, Place] = self._exporter.exported
        """The newest export of each kind that this process has made, or found there when it was due."""
        self._knows_folder = False
        self._closed = False
        _managers.add(self)

    # load

    def load(self, step: int = -1) -> LoadResult:
        """Resume; if there is no step to resume, load the initial sources; without these, start from step 0.

        `step` (or config.resume.step) names one step and never falls back; -1 takes the newest valid one, then older
        ones, and logs why each was skipped. Call it before the first step, and again to roll back. Tensors that
        `materialize` left without values and no source provides are initialized once everything is read.
        If it raises after it has begun to overwrite the run, saves and exports raise HalfLoadedError until a load
        succeeds.
        Raises: CheckpointNotFoundError; LoadMismatchError; CorruptCheckpointError when no candidate can be read;
        BaseMismatchError; ConverterError for a different set of converters; ExportError for weights that do not fit
        the config.json or the base of an export.
        """
        self._check_open()
        if step != -1:
            step = step_number(step)
        self.wait()
        self.telemetry.start()
        with self.telemetry.event("load") as event:
            result = self._load(step, event)
            resumed = result.plan.resume
            event.note(step=result.step, folder=resumed and str(self._directory.step_path(resumed.step)))
            event.note(sources=[str(source) for source in result.plan.sources])
        return result

    def _load(self, step: int, event: Event) -> LoadResult:
        self.completed.mark, self._is_last_save, self._exported_step = None, False, None
        if self._saver is not None:
            if not self._knows_folder:  # it walks all objects of the process, and a rollback finds no other loaders
                for loader in instances_of(DataLoader):
                    seed_evaluation_apart(loader)
            self._saver.forget_copy()
            self._coordinator.together("rehearse", lambda: self._run.rehearse(self.config.allow))
        with event.phase("restore"):
            named = step if step >= 0 else self.config.resume.step
            restored = self._restorer.restore(named)
        event.note(resumed_from=restored.resumed_from, num_tensors=len(restored.result.report.loaded))
        read, received = restored.traffic or (None, None)
        event.note(bytes_read=read, bytes_received=received)
        self.completed.settled = restored.result.step if restored.resumed_from else None
        self._content.loaded(restored.base)
        self._content.refuse_adapter_of_changed_base(self.config.export)
        self._resumed_from = restored.resumed_from
        back = self._exporter.went_back_to
        if named is not None or back is None or restored.result.step > back:  # or this load is of the same branch
            self._exporter.went_back_to = named
        is_unsaved = self.config.save is not None and restored.resumed_from is None
        self._exporter.unsaved_in = self.config.folder if is_unsaved else None
        self._content.is_settled = False
        if self._saver is not None:  # before step 1: lease, permissions and space for the saves to come
            self._run.watch_modules(self.config.allow)
            with event.phase("preflight"):
                self._directory.preflight(self.completed.expected_bytes())
        check_folders(self._exporter, self.config.export, fresh=restored.resumed_from is None)
        self._knows_folder = True
        return restored.result

    def initialize_missing(self, owned: Collection[str] = ()) -> None:
        """Give values to every tensor of the model that has none. Called by `load` when all is read; collective.

        A subclass may fill some of `empty_tensors` itself, tell it by `flag_loaded`, and call this for the others.
        `owned`: tensors of converters that no source provided. Raises: LoadMismatchError.
        """
        initialize_missing(self._model, owned)

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
        """Save the step if it is due, make the exports that are due, and return whether it saved.

        The exports of the last step are waited for; an optimizer that has `eval()`, as schedulefree's, is in that mode
        then. `export=False` leaves exports to a call of `export()`. `force`
        saves a step that is not due; with `last_step`, the process is about to be stopped before the run is done, and
        the step is a full one. `metrics`: numbers recorded with the step, by which retention may keep the best steps;
        those of rank 0 count, and values that are not finite are left out. Others are refused; a save with `force`, or
        of the last step, is made without them.
        With checkpoint.save.on_failure = "warn", a save that fails because of the disk is logged, and this function
        returns False if it has failed by then. `last_step` says that this save is the last: it always raises.
        Raises: the error of an earlier background save, once; SaveError; ExportError; HalfLoadedError.
        """
        step = step_number(step)
        self._check_keepable(f"step {step} is not saved")
        saved = False
        config = self.config.save
        due = force or (config is not None and config.is_due(step, last_step))
        if self._saver is not None and not self._content.is_settled:
            allow = self.config.allow
            self._coordinator.together("first step", lambda: self._run.check_stepped(step, allow, is_saved=due))
            if not self._knows_folder and not self.config.external:  # load() was never called
                self._content.record_current()
            self._content.settle()
            if not due:  # there is time to make the memory of the first save ready
                model = self._content.state
                self._saver.prepare(self._coordinator.together("prepare", lambda: large_tensors(self._run, model())))
        self._note_last(step, last_step)
        if self._saver is not None and due and step != self.completed.saved:
            done = last_step and not force  # with both, the run is stopped, and is to be resumed from this step
            model_only = done and config is not None and config.model_only_last
            if model_only:
                self._evaluate()  # nobody could compute these weights without the state that is left out
            skippable = not (force or last_step)
            given = metrics or {}
            saved = self.save_step(DueSave(step, given, skippable=skippable, last=last_step, model_only=model_only))
        if export:
            self.export(step, last_step)
        return saved

    def is_save_due(self, step: int, last_step: bool = False) -> bool:
        """Return whether `save` would save this step without `force`."""
        save = self.config.save
        return save is not None and save.is_due(step, last_step) and step != self.completed.saved

    def save_seed(self) -> None:
        """Save the model alone as step 0, and wait for it: runs of any layout start from the folder. Collective.

        Raises: CheckpointError for a run that saves nothing; SaveError; HalfLoadedError.
        """
        self._check_open()
        if self._saver is None or self.config.external:
            raise CheckpointError(
                f"{self._directory.root}: a seed is a save of the model: give the config checkpoint.save, and leave no "
                "model out of checkpoint.components"
            )
        self.save_step(DueSave(0, last=True, model_only=True))
        self.wait()

    def export(self, step: int, last_step: bool = False) -> bool:
        """Make the exports that are due after this step, on the last step all of them. Return whether any was due.

        A save of the last step is waited for first, so that a failed export costs no training. At earlier steps, if the
        step was saved asynchronously, its staged copy is exported in the background; the next `wait` raises its errors.
        Raises: ExportError; on the last step also the error of the save; HalfLoadedError.
        """
        step = step_number(step)
        self._check_keepable(f"step {step} is not exported")
        self._note_last(step, last_step)
        due = [export for export in self.config.export if export.is_due(step, last_step)]
        is_repeated = bool(due) and step == self._exported_step
        if last_step or is_repeated:
            self.wait()
        self._exported_step = step
        resumed_from = None if self._resumed_from is None else self._resumed_from["step"]
        todo = due
        try:
            if due and (back := self._exporter.went_back_to) is not None and step > back:
                self._leave_abandoned_branch()
            if is_repeated or may_be_there(step, last_step, resumed_from):
                todo = [export for export in due if not self._exporter.is_there(export, step)]
        except Exception as error:  # a bucket does not answer
            todo = []
            _raise(self._failures.verdict("exported", step, error, is_last=last_step))
        if todo:
            self.export_step(todo, step, last_step)
        if last_step and any(not export.training_state for export in due):
            self._evaluate()  # also if all exports are there, as in a run that is started again when it is done
        return bool(due)

    def export_step(self, exports: Sequence[ExportConfig], step: int, last_step: bool) -> None:
        """Make, or start, the exports of a step that are due and not there. Called by `export`; collective.

        A subclass may extend it, for steps of the interval and for the last one alike.
        Raises: as `export`.
        """
        self._check_keepable(f"step {step} is not exported")
        if any(export.container == "peft" for export in exports):
            self._content.refuse_adapter_of_changed_base(exports, self._content.forget_changed_base())
        saver = self._saver
        facts: list[Json] = [saver is not None and saver.has_staged(step), saver is not None and saver.busy]
        of_ranks: list[Any] = self._coordinator.gather("export-staged", facts)
        staged, busy = all(has_staged for has_staged, _ in of_ranks), of_ranks[0][1]
        way = way_to_export(last_step, staged, busy, self.config.save)
        if way == "background":
            assert saver is not None
            jobs, at_once = self._exporter.stage(exports, step, self._content.identity, *saver.staged())
            for export in at_once:
                logger.info("export of step %d as %s is made now: its values cannot be staged", step, export.format)
                self._export_now(export, step, last_step)
            saver.export(step, [partial(self._exporter.run, job) for job in jobs])
        elif way == "left out":
            logger.warning("step %d is due for export and left out: what came before it is still being written", step)
        else:
            weights = [export for export in exports if not export.training_state]
            for export in exports:
                if export.training_state:
                    self._export_now(export, step, last_step)
            if last_step and weights:
                self._evaluate()  # once; the step is saved by now, with the weights of training
            for export in weights:
                self._export_now(export, step, last_step)

    def _evaluate(self) -> None:
        """Let optimizers set the weights that they evaluate with. If one is interrupted, the weights are a mixture."""
        names = self._model.parameter_names()
        for optimizer in self._switches:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            changed = [names[p] for p in parameters if p in names]  # one that is left out may train others
            self._run.half_loaded.begin(f"the weights of {type(optimizer).__name__}.eval()", changed)
            optimizer.eval()
        if self._switches:
            self._run.half_loaded.end()

    def _note_last(self, step: int, last_step: bool) -> None:
        """Note that the save in flight is the last one, which was not known when it began."""
        if last_step and step == self.completed.saved:
            self._is_last_save = True

    def _export_now(self, export: ExportConfig, step: int, last_step: bool) -> None:
        error: Exception | None = None
        try:
            self._exporter.export(export, step, self._content.identity)
        except Exception as e:
            error = e
        _raise(self._failures.verdict("exported", step, error, is_last=last_step, of=export))

    def save_step(self, due: DueSave) -> bool:
        """Start the save of a step that is due, and return whether it is saved. Called by `save`, and by RunGuard.

        A subclass may extend it, for steps of the interval and for the last one alike: all ranks call it, with equal
        arguments, and `wait` ends what it has started.
        Raises: as `save`; CheckpointError for a run that saves nothing.
        """
        self._check_keepable(f"step {due.step} is not saved")
        if self._saver is None or self.config.save is None:
            raise CheckpointError(
                f"{self._directory.root}: step {due.step} is not saved: save_step needs a config with checkpoint.save, "
                "and this one has none. Add it, or call save, which saves only the steps that the config asks for"
            )
        is_busy, rank = self._saver.busy, self._coordinator.rank
        busy, finite = self._coordinator.gather_results("busy", lambda: (is_busy, due.numbers(rank)))[0]
        if busy and due.skippable and self.config.save.if_busy == "skip":
            logger.warning("step %d is due and not saved: the save before it is still being written", due.step)
            return False
        if busy and due.skippable:
            logger.warning("step %d is due and training waits: the save before it is still being written", due.step)
        kind = self._content.kind(due.model_only)
        event = Event("save", step=due.step, kind=kind, async_mode=self.config.save.async_mode)
        with event.phase("queued"):
            self._settle()
        self._start_save(replace(due, metrics=finite), event)
        self._raise_failed_exports()  # this step is saved all the same
        return self.completed.saved == due.step

    def _start_save(self, due: DueSave, event: Event) -> None:
        assert self._saver is not None and self.config.save is not None
        step = due.step
        self._look_before_saving(step)
        try:
            self._leave_abandoned_branch()
        except Exception as error:
            _raise(self._failures.verdict("exported", step, error, is_last=due.last))
        if not self._content.is_adapter_only:
            self._content.forget_changed_base()  # a resume would find another digest than the record's
        described = partial(
            Manifest,
            step,
            self._content.kind(due.model_only),
            converters=converter.describe() if (converter := self._model.converter) else [],
            base=None if self.config.external or due.model_only else self._content.identity,
            resumed_from=self._resumed_from,
            metrics=dict(due.metrics),
            allowed=self.config.allow,
        )

        self._is_last_save = due.last
        if due.mark is None:  # else an exchange may be under way, and the mark has the order
            self._run.settle()
        with self.telemetry.failing(event), event.phase("blocking"), gc_paused():
            snapshot = self._coordinator.together("snapshot", partial(self.completed.snapshot, due))
            self._saver.save(step, described, snapshot, event, expire=due.mark is None)
        if self.config.save.async_mode == "disabled":
            self.wait()
        elif not self._may_copy_later:
            self._saver.wait_staged()

    def _leave_abandoned_branch(self) -> None:
        """Set aside the exports and the steps of the branch that this run was told to go back from. Collective.

        Exports come first: a run that is killed between goes on from a newer step and meets no export of another one.
        """
        if (back := self._exporter.went_back_to) is not None:
            self._exporter.leave_abandoned_branch(self.config.export, back)
            if self._saver is not None:
                self._directory.leave_abandoned_branch()

    def _look_before_saving(self, step: int) -> None:
        """Refuse to save into a folder that holds an earlier run's steps, or torchtitan's, and was never loaded."""
        if not self._knows_folder and (steps := self._directory.candidates()):
            earlier = listed([*map(str, reversed(steps))], ", ", " ")
            raise CommitConflictError(
                f"{self._directory.root}: step {step} is to be saved, load() was never called, and step {earlier} of "
                "an earlier run is there: call load() before the first step to resume, or choose another folder"
            )
        self._knows_folder = True

    def _before_optimizer_step(self) -> None:
        self.maybe_wait_for_staging()
        self.completed.is_changing = True

    @property
    def in_flight(self) -> SaveHandle | None:
        """Return the save that `wait` would wait for."""
        return self._saver.in_flight if self._saver is not None else None

    def maybe_wait_for_staging(self) -> None:
        """Wait until the weights may change; call it right before the optimizer's step."""
        if self._saver is not None:
            self._saver.wait_staged()

    def wait(self) -> None:
        """Wait until the save in flight is committed and its exports are published. Raises: their errors, once.

        With checkpoint.save.on_failure = "warn", a failure of the disk is logged instead, unless the save is the last
        one of the run, or it is one failure too many.
        """
        self._settle()
        self._raise_failed_exports()

    def _settle(self) -> None:
        """Wait for the save in flight and its exports, and keep the exports' error if it must be raised.

        They are forgotten last: if an interrupt comes before, the next call finds them as they were.
        Raises: the save's error, unless the run goes on without the save.
        """
        self.telemetry.refuse_in_sink()
        if self._saver is None:
            return
        self._saver.wait()
        save, exports, is_last = self._saver.in_flight, self._saver.exports_in_flight, self._is_last_save
        failed: BaseException | None = None
        if save is not None:
            if save.error is None:
                self.completed.settled, self._exporter.unsaved_in = save.step, None
            failed = self._failures.verdict("saved", save.step, save.error, is_last=is_last)
        if exports is not None and failed is not None and exports.error is not None:
            logger.error("the exports of step %d have failed, too", exports.step, exc_info=exports.error)
        elif exports is not None and failed is None:
            of_exports = self._failures.verdict("exported", exports.step, exports.error, is_last=is_last)
            self._failed_exports = self._failed_exports or of_exports
        _raise(failed, then=self._saver.forget)

    def _raise_failed_exports(self) -> None:
        def forget() -> None:
            self._failed_exports = None

        _raise(self._failed_exports, then=forget)

    def close(self) -> None:
        """Finish the save in flight and release the folder; idempotent. Raises: the error of that save, once.

        After an interrupt, call it again: nothing is released while a save is in flight.
        """
        if self._closed:
            return
        self.telemetry.refuse_in_sink()
        self._is_last_save = True
        error: BaseException | None = None
        try:
            self.wait()
        except BaseException as e:
            if self._saver is not None and (self._saver.in_flight or self._saver.exports_in_flight):
                raise
            error = e
        for hook in [*self._step_hooks, *self.completed.gradients.hooks]:
            hook.remove()
        if self._saver is not None:
            self._saver.close()
        self._exporter.close()
        self._directory.close()
        self._coordinator.close()
        self.telemetry.finish()
        self._closed = True
        _raise(error)

    def leave_to_parent(self) -> None:
        """Be closed, and wait for nothing: called for the copy in a forked process, such as a dataloader's worker."""
        self._closed = True
        if self._saver is not None:
            self._saver.leave_to_parent()

    def _check_keepable(self, what: str) -> None:
        """Raises: CheckpointError once the manager is closed; HalfLoadedError, which begins with `what`."""
        self._check_open()
        self._run.half_loaded.refuse(what)

    def _check_open(self) -> None:
        self.telemetry.refuse_in_sink()
        if self._closed:
            raise CheckpointError(f"{self._directory.root}: this CheckpointManager is closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            if value is None:
                raise
            # the run's own error must reach the user
            logger.exception("the last save failed while the run was stopping because of another error")


def _raise(error: BaseException | None, then: Callable[[], None] = lambda: None) -> None:
    """Raise an error if there is one. `then` forgets it once it was raised, and not if an interrupt came before."""
    try:
        if error is not None:
            raise error
    except BaseException as raised:
        if raised is error:
            then()
        raise
    then()


_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for manager in tuple(_managers):
        manager.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
