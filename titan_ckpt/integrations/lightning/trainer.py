"""attach: saves, exact resumes and stops by RunGuard in Lightning's Trainer.

A save is made when everything that belongs to a batch is done, its validation included; after the last batch of an
epoch, when everything that belongs to the epoch is done. Lightning has no hook there, so `attach` extends the two
methods of its loops that end a batch and an epoch.
Source: lightning 2.6, pytorch/loops/fit_loop.py and training_epoch_loop.py.
"""

from __future__ import annotations

import importlib
import logging
from functools import partial
from typing import Any

from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import ConfigError, refuse
from titan_ckpt.integrations.lightning import known
from titan_ckpt.integrations.lightning.known import AVERAGING, STOCHASTIC, of_kinds
from titan_ckpt.integrations.lightning.progress import Progress, go_on_from_last_epoch, load_average
from titan_ckpt.integrations.loader_position import PositionedLoader
from titan_ckpt.integrations.loop import Groups, LoopCheckpoint
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.types import Stateful

logger = logging.getLogger(__name__)


def attach(trainer: Any, config: CheckpointConfig) -> TitanCheckpoint:
    """Let `trainer.fit()` resume from, and save to, `trainer.default_root_dir`, by the settings of `config`.

    ```
    trainer = Trainer(max_epochs=2, enable_checkpointing=False)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=500)))
    trainer.fit(model, loader)
    ```

    Call it once, after the trainer is built, on every rank. A step ends with a batch in which an optimizer steps.
    Raises: ConfigError listing every setting of the trainer that does not work with it.
    """
    faults = [
        *known.plugin_faults(trainer.strategy, trainer.precision_plugin, config.allow),
        *known.callback_faults(trainer.callbacks, config.allow, trainer.strategy),
    ]
    if any(isinstance(callback, TitanCheckpoint) for callback in trainer.callbacks):
        faults.append("this trainer is attached already: give the first call all settings")
    if trainer.checkpoint_callbacks:
        faults.append(
            "enable_checkpointing: Lightning would write checkpoints of its own too: set it to False, and leave "
            "ModelCheckpoint out; checkpoint.save.interval says when titan_ckpt saves"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        faults.append(
            "reload_dataloaders_every_n_epochs: a reloaded dataloader has no position to return to: leave it out"
        )
    refuse(*faults)
    if trainer.fast_dev_run:
        logger.info("fast_dev_run: nothing is loaded or saved, as Lightning does with its own checkpoints")
        return TitanCheckpoint(config)
    package = type(trainer).__mro__[-2].__module__.partition(".trainer.")[0]
    base = importlib.import_module(f"{package}.callbacks").Callback
    callback: TitanCheckpoint = type("TitanCheckpoint", (TitanCheckpoint, base), {})(config)
    trainer.callbacks.append(callback)
    return callback


class TitanCheckpoint(LoopCheckpoint):
    """The callback that `attach` adds; Lightning calls its methods."""

    _is_last = False
    """Whether the last step of the run is completed."""
    _put_aside: frozenset[Any] = frozenset()
    """Callbacks that have put the weights of the training aside for a validation."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Look at the callbacks of the module's configure_callbacks(), before one of them trains by itself.

        Raises: ConfigError for a callback that `attach` would have refused.
        """
        if stage == "fit":
            refuse(*known.callback_faults(trainer.callbacks, self._config.allow, trainer.strategy))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load, when the strategy has set everything up.

        Raises: ConfigError for callbacks and metrics of the user's own whose state would be lost, and for a checkpoint
        that Lightning has loaded.
        """
        self._is_last, self._put_aside = False, frozenset()
        faults = [*known.own_faults(trainer, pl_module, self._config.allow)]
        faults += known.frozen_faults(trainer, pl_module)
        if trainer._checkpoint_connector._loaded_checkpoint:  # noqa: SLF001 - Lightning has no public name for it
            faults.append(
                f"ckpt_path: Lightning would put the state of {trainer.ckpt_path} over that of the step: leave it out, "
                "and load the weights of another run into the module before fit()"
            )
        refuse(*faults)
        self._trainer, fit = trainer, trainer.fit_loop
        fit.setup_data()
        loaders = fit._combined_loader  # noqa: SLF001 - Lightning has no public name for its loops' parts
        self._loader = _LightningLoader(_only(loaders), allow=self._config.allow)
        loaders.flattened = [self._loader]
        step = self._load(partial(self._new_manager, trainer, pl_module))
        self._counted = trainer.global_step
        iter(fit._data_fetcher)  # noqa: SLF001 - as above
        averaging = of_kinds(trainer.callbacks, AVERAGING)
        for value, name, then, unless in (
            (fit.epoch_loop, "on_advance_end", self._batch_ended, _skips_validation),
            (fit, "on_advance_end", self._epoch_ended, None),
            (fit, "on_run_start", self._run_started, None),
            (fit, "on_advance_start", None, self._may_change),
            (fit, "on_run_end", self._run_ended, self._may_change),
            (fit.epoch_loop.val_loop, "setup_data", self._progress.set_up_validation, None),
            *((callback, "_swap_models", partial(self._swapped, callback), self._may_change) for callback in averaging),
        ):
            _extend(value, name, then, unless)
            self.opened.callback(vars(value).pop, name, None)
        for callback in averaging if not step else ():
            load_average(callback, None, pl_module)
        if step:
            vars(fit)["run"] = partial(self._run, fit.run)
            self.opened.callback(vars(fit).pop, "run", None)
        self._groups = Groups(trainer.optimizers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch for signals, after Lightning has installed handlers of its own."""
        self._watch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the guard save the last completed step, with the weights that a validation had put aside."""
        for callback in [*self._put_aside]:
            callback._swap_models(pl_module)  # noqa: SLF001 - as above
        self.opened.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish the last save."""
        self.opened.close()

    def _run(self, run: Any) -> None:
        """Run the loop, or do what it does after the last step, if that is saved: the epoch and the run end."""
        loop = self._trainer.fit_loop
        if not loop.done:  # the module's on_fit_start may have decided to train on
            run()
            return
        self._is_last = True
        loop.reset()
        loop.on_run_start()
        self._loader.restore_random(is_done=True)
        for callback in of_kinds(self._trainer.callbacks, STOCHASTIC):
            go_on_from_last_epoch(callback, self._trainer)
        if self._loader.num_batches:  # within an epoch
            loop.on_advance_end()
            loop.on_iteration_done()
        loop.on_run_end()

    def _run_started(self) -> None:
        self._progress.begin()
        if self.is_resumed:
            self._groups.restore()
        self._loader.restore_random()
        if self._loader.num_batches:  # within an epoch
            self._progress.go_on()
        trainer = self._trainer
        refuse(*known.own_faults(trainer, trainer.lightning_module, self._config.allow, self.manager.watch))

    def _run_ended(self) -> None:
        if self._is_last:
            self._save(self._metrics(), is_last=True)

    def _may_change(self, value: Any) -> bool:
        """Wait until the save in flight has copied the weights, which callbacks change beside optimizers."""
        self.manager.maybe_wait_for_staging()
        return False

    def _swapped(self, callback: Any) -> None:
        self._put_aside ^= {callback}

    def _batch_ended(self) -> None:
        loop = self._trainer.fit_loop
        loop._restarting = False  # noqa: SLF001 - or no epoch's end would step a plateau scheduler
        if not loop.epoch_loop._num_ready_batches_reached():  # noqa: SLF001 - as above
            self._step_completed()

    def _epoch_ended(self) -> None:
        if self._trainer.fit_loop.epoch_loop._num_ready_batches_reached():  # noqa: SLF001 - as above
            if self._loader.num_batches:
                self._loader.check_leaving()
                self._loader.begin_next()
            self._step_completed()

    def _step_completed(self) -> None:
        trainer, counted = self._trainer, self._trainer.global_step
        if counted == self._counted:
            if trainer.fit_loop.done and self.is_resumed:  # no optimizer has stepped in the last batch
                self._is_last = True
                for optimizer in () if self._progress.holds_gradients else trainer.optimizers:
                    optimizer.zero_grad()  # of batches that a callback has stopped the run after: no step will use them
                self._save(self._metrics(), is_last=True, export=False)
            return
        self._counted = counted  # of several optimizers together, and each batch is one step here
        self._is_last = trainer.fit_loop.done
        if self._complete(self._completed + 1, self._metrics(), is_last=self._is_last, export=not self._is_last):
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None  # a signal waits for neither
            trainer.should_stop = True

    def _metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._trainer.callback_metrics.items()}

    def _new_manager(self, trainer: Any, pl_module: Any) -> CheckpointManager:
        self._progress = Progress(trainer, self._config.allow)
        states: dict[str, Stateful] = {"lightning": self._progress}
        if trainer.precision_plugin.state_dict():
            states["precision"] = trainer.precision_plugin
        return CheckpointManager(
            self._config,
            model_parts=[pl_module],
            optimizers=trainer.optimizers,
            lr_schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            dataloader=self._loader,
            states=states,
            rebuild=self._progress.rebuild,
            base_folder=trainer.default_root_dir,
        )


class _LightningLoader(PositionedLoader):
    """The position in a loader whose sampler Lightning tells the epoch."""

    reads_to_end = is_told_draws = False

    def begin_epoch(self) -> None:
        """Leave the sampler as Lightning has set it."""


def _only(loaders: Any) -> Any:
    """Return the only train dataloader. Raises: ConfigError."""
    found = [] if loaders is None else loaders.flattened
    if len(found) != 1:
        raise ConfigError([f"train_dataloaders: there are {len(found)}, and the position in one is saved: give one"])
    try:
        len(found[0])
    except TypeError:
        ahead = "Lightning reads ahead in a loader without a length, so its position is not that of the training"
        raise ConfigError([f"train_dataloaders: {ahead}: give its dataset __len__"]) from None
    return found[0]


def _skips_validation(loop: Any) -> bool:
    """Return whether the loop has only gone over the end of the batch that was completed before the save."""
    skips, loop._skip_next_val = loop._skip_next_val, False  # noqa: SLF001 - set by TrainingEpochLoop.advance
    return bool(skips)


def _extend(value: Any, name: str, then: Any, unless: Any) -> None:
    """Call `then`, if given, after each call of a loop's or callback's method; leave both out if `unless` is true."""
    own = getattr(value, name)

    def extended(*args: Any) -> None:
        if unless is None or not unless(value):
            own(*args)
            if then is not None:
                then()

    setattr(value, name, extended)
