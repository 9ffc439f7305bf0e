"""attach: saves, exact resumes and stops by RunGuard in a Trainer that is already built.

A callback alone cannot resume a Trainer: it is not told its trainer, and it is called after the Trainer has decided in
which epoch and at which batch it begins. So `attach` gives the trainer a subclass of its own class, whose methods call
the manager at the right moments.
Source: transformers 5, trainer.py `_inner_training_loop` and the methods that it calls.
"""

from __future__ import annotations

import logging
import numbers
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.known.peft_adapters import adapter_states
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError, refuse
from titan_ckpt.integrations.loop import Groups, LoopCheckpoint, Restored, extend
from titan_ckpt.integrations.transformers import adapter
from titan_ckpt.integrations.transformers.known import gives_state, problems, unsaved
from titan_ckpt.integrations.transformers.loader import TrainerLoader, draw_alike
from titan_ckpt.integrations.transformers.progress import Later, RankProgress, RunProgress, followers_of
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models.hf_transforms import transforms_for
from titan_ckpt.types import Stateful
from titan_ckpt.weights.transforms import StateDictTransforms

_log = logging.getLogger(__name__)


def attach(trainer: Trainer, config: CheckpointConfig) -> TitanCheckpoint:
    """Let `trainer.train()` resume from, and save to, `args.output_dir`, by the settings of `config`.

    ```
    trainer = SFTTrainer(model, args, train_dataset=data)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=500)))
    trainer.train()
    ```

    Call it once, after the trainer is built, on every rank.
    Raises: ConfigError listing every setting of the trainer that does not work with it.
    """
    if isinstance(trainer, _Attached):
        raise ConfigError(["this trainer is attached already: give the first call all settings"])
    has_adapter = adapter.is_adapter_model(trainer.model)
    only_adapter = adapter.saves_adapter_alone(trainer.model, config)
    refuse(
        *problems(trainer, config, has_adapter=has_adapter),
        *(adapter.needs_base(trainer.model, trainer.optimizer) if only_adapter else ()),
        *unsaved(trainer, config),
    )
    checkpoint = TitanCheckpoint(trainer, config, only_adapter=only_adapter)
    extend(trainer, _Attached)
    trainer.titan_ckpt = checkpoint  # type: ignore[attr-defined]  # _Attached declares it
    return checkpoint


class TitanCheckpoint(LoopCheckpoint, TrainerCallback):
    """The parts that `attach` has added to a trainer. The last callback of a run: it sees what the others have done."""

    prepared: tuple[Any, Any]
    """What the Trainer's own _prepare_for_training() has returned."""

    def __init__(self, trainer: Trainer, config: CheckpointConfig, *, only_adapter: bool) -> None:
        super().__init__(config)
        self._trainer: Any = trainer
        self._only_adapter = only_adapter
        self.is_asked = False
        """Whether the current step is to be saved, because a callback has set control.should_save."""
        self._callbacks = [*trainer.callback_handler.callbacks]
        """Those that were there, and were judged, when the trainer was attached."""

    # called by _Attached, in this order

    def wrap(self, loader: Any) -> TrainerLoader:
        """Give the loader a position."""
        self.loader = TrainerLoader(loader, self._config.allow)
        return self.loader

    def resume(self, max_steps: int, num_epochs: int) -> tuple[int, int]:
        """Load when model, optimizer and scheduler are built. Return the epoch and the batch at which to begin."""
        trainer = self._trainer
        is_changed = trainer.callback_handler.callbacks != self._callbacks
        refuse(*(unsaved(trainer, self._config) if is_changed else ()))
        if self._only_adapter and (lacking := [*adapter.needs_base(trainer.model, trainer.optimizer.optimizer)]):
            raise ConfigError([f"{line}, in the attach() of a trainer that is built anew" for line in lacking])
        self._run = RunProgress(self._trainer)
        self._rank = RankProgress(self._trainer, self.loader)
        self._followers = followers_of(self._trainer)
        trainer.state.global_step = step = self._load(self._new_manager)
        self._watch()
        trainer.add_callback(self)
        self.opened.callback(trainer.remove_callback, self)
        if self._run.ended and step < max_steps:
            _log.warning(
                f"nothing is left to train: a callback ended the run at step {step}. To train on, change the callback "
                "and resume from a step before (checkpoint.resume.step)"
            )
        self._is_done = step >= max_steps or self._run.ended
        if self._is_done:
            self._save(None, is_last=True)  # its exports may be missing, and set an optimizer's mode
        self._groups = Groups([trainer.optimizer.optimizer])
        if self._is_done:
            return num_epochs, 0
        accumulated = trainer.args.gradient_accumulation_steps
        if self.loader.num_batches % accumulated:
            raise LoadMismatchError(
                f"step {step} ended after {self.loader.num_batches} batches of its epoch, and steps of {accumulated} "
                "batches do not begin there: resume with gradient_accumulation_steps that divide "
                f"{self.loader.num_batches}, or with the number of ranks and the batches per step of the run that saved"
            )
        return self.loader.epoch, self.loader.num_batches

    def restore(self) -> None:
        """Set again what callbacks have set anew since the load."""
        if self.is_resumed:
            self._run.restore()
            self._groups.restore()
            for state in self._own:
                state.restore()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore what `on_train_begin` of a callback has set anew, and watch the rest.

        Raises: ConfigError for what it has set anew and no step holds.
        """
        self.restore()
        self.loader.restore_random()
        refuse(*unsaved(self._trainer, self._config, self.manager.watch))

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Restore what `on_epoch_begin` has set anew, within an epoch that had begun before the resume."""
        if self.loader.is_resumed_within:
            self.restore()

    def begin(self) -> None:
        """Set what the Trainer and its callbacks have made when the training began; again, it does nothing."""
        self._rank.begin()
        for state in self._followers.values():
            if isinstance(state, Later):
                state.begin()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Let the loader skip batches, instead of transformers, and complete the last step of the epoch."""
        self.begin()
        trainer_module: Any = sys.modules[Trainer.__module__]
        skip = trainer_module.skip_first_batches
        trainer_module.skip_first_batches = lambda loader, _: loader
        try:
            yield
        finally:
            trainer_module.skip_first_batches = skip
        control = self._trainer.control
        is_last = control.should_training_stop
        if not is_last:
            self.loader.check_leaving()
            if not self.loader.at_end and control.should_epoch_stop:
                self.loader.begin_next()
        self._step_completed(is_last=is_last)

    def step_ended(self) -> None:
        """Complete a step, after its evaluation. An epoch may be evaluated after its last step, which so waits."""
        control = self._trainer.control
        if not (self.loader.at_end or control.should_training_stop or control.should_epoch_stop):
            self._step_completed(is_last=False)

    def ended(self) -> None:
        """Make the last save of a run that has ended before its last step, because its epochs had fewer batches."""
        assert self._guard is not None
        if self._completed and not self._is_done and self._guard.stopped is None:
            self._run.ended = self._trainer.control.should_training_stop
            self._save(self._metrics(self._completed), is_last=True)

    def _step_completed(self, *, is_last: bool) -> None:
        step = self._trainer.state.global_step
        if step == self._completed:
            return
        self._run.ended = is_last and step < self._trainer.state.max_steps
        is_last = self._is_done = is_last or step >= self._trainer.state.max_steps
        is_asked, self.is_asked = self.is_asked and not is_last, False
        if self._complete(step, self._metrics(step), is_last=is_last, force=is_asked):
            self._trainer.control.should_training_stop = True

    def _metrics(self, step: int) -> dict[str, float]:
        """Return the numbers that were logged at this step, with an entry for each evaluation set."""
        logged: dict[str, Any] = {}
        for entry in reversed(self._trainer.state.log_history):
            if entry.get("step") != step:
                break
            logged = entry | logged
        return {name: float(value) for name, value in logged.items() if isinstance(value, numbers.Real)}

    def _new_manager(self) -> CheckpointManager:
        trainer = self._trainer
        states: dict[str, Stateful] = {"trainer": self._run, **self._followers}
        own = [trainer, *trainer.callback_handler.callbacks]
        own = [value for value in own if gives_state(value) and not isinstance(value, ExportableState)]
        self._own = [Restored(value) for value in own]
        names = [class_name(value) for value in own]
        states |= {f"{name} {names[:i].count(name)}": self._own[i] for i, name in enumerate(names)}
        if trainer.accelerator.scaler is not None:
            states["scaler"] = trainer.accelerator.scaler
        if self._only_adapter:
            states |= {"base": adapter.BaseWeights(trainer.model), **adapter_states([trainer.model])}
        return CheckpointManager(
            self._config,
            model_parts=[adapter.adapter_part(trainer.model) if self._only_adapter else trainer.model],
            optimizers=[trainer.optimizer.optimizer],
            lr_schedulers=[trainer.lr_scheduler],
            dataloader=self._rank,
            states=states,
            sd_transforms=self._transforms(),
            base_folder=trainer.args.output_dir,
        )

    def _transforms(self) -> StateDictTransforms | None:
        """Return the model's names in Hugging Face folders, if a setting needs them."""
        model = self._trainer.model
        if not (self._config.export or self._config.initial_load) or not isinstance(model, PreTrainedModel):
            return None
        exports = self._config.export
        transforms = transforms_for([model], exports=any(export.container == "hf" for export in exports))
        return replace(transforms, assets=self._assets() if exports else None)

    def _assets(self) -> Path | None:
        """Return a folder of the files beside the weights that trainer.save_model() would write; None without any.

        The trainer's own objects count, not the folders they came from: tokens, templates and generation settings may
        have been added to them.
        """
        model, processing = self._trainer.model, self._trainer.processing_class
        settings = model.generation_config if model.can_generate() else None
        if processing is None and settings is None:
            return None
        folder = Path(self.opened.enter_context(tempfile.TemporaryDirectory(prefix="titan_ckpt-")))
        for owner in (processing, settings):
            if owner is not None:
                owner.save_pretrained(folder)
        came_from = Path(getattr(processing, "name_or_path", ""))
        for path in [*came_from.glob("*.py"), *came_from.glob("LICENSE*")] if str(came_from) != "." else []:
            if path.is_file():
                shutil.copy(path, folder)
        return folder


class _Attached(Trainer):
    """The methods of an attached trainer; `attach` puts this class before the trainer's own."""

    titan_ckpt: TitanCheckpoint

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            newest = f"an attached trainer resumes from the newest step in {self.args.output_dir} by itself"
            raise ConfigError(
                [f"resume_from_checkpoint: {newest}: leave it out; checkpoint.resume.step names an older step"]
            )
        if (args and args[0] is not None) or kwargs.get("trial") is not None:
            raise ConfigError(["trial: each trial would resume from the one before: search without titan_ckpt"])
        return super().train(None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.titan_ckpt.wrap(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Let each evaluation draw the same from generators of its own: workers that are kept draw a seed only once."""
        loader = super().get_eval_dataloader(*args, **kwargs)
        if self.args.dataloader_persistent_workers:
            draw_alike(loader)
        return loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.titan_ckpt.opened:  # the guard sees the exception that ends the training
            return super()._inner_training_loop(*args, **kwargs)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Prepare everything now, because only a load can tell where the training begins."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        self.titan_ckpt.prepared = super()._prepare_for_training(  # type: ignore[no-untyped-call]  # as it is
            max_steps, self.titan_ckpt.loader, None
        )
        return self.titan_ckpt.resume(max_steps, num_train_epochs)

    def _prepare_for_training(self, *_: Any) -> Any:
        return self.titan_ckpt.prepared

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Leave out the evaluation of `eval_on_start` in a resumed run, which has made it."""
        if skip_scheduler and self.titan_ckpt.is_resumed:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Set what was loaded, if there was nothing left to train, and save what is the last step."""
        self.titan_ckpt.begin()
        self.titan_ckpt.ended()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]  # as it is

    def _run_epoch(self, **arguments: Any) -> None:  # type: ignore[override]  # the Trainer names every argument
        with self.titan_ckpt.epoch():
            super()._run_epoch(  # type: ignore[no-untyped-call]  # as it is
                **arguments | {"resume_from_checkpoint": self.args.output_dir}
            )

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Leave it to the loader, which knows the state before the first batch."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.titan_ckpt.step_ended()

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self.titan_ckpt.is_asked = True
