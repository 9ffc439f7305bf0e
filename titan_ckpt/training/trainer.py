"""The trainer: thirteen build steps in order, and one loop over optimizer steps.

Owns the order of the steps. build_steps.py builds the parts; the checkpoint manager saves and loads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from titan_ckpt.components.optimizer_content import switches
from titan_ckpt.encoding.named import is_import_name
from titan_ckpt.errors import ConfigError, DataError, GradientError
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.guard.run_guard import RunGuard
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.process import RandomState
from titan_ckpt.training import schedule
from titan_ckpt.training.build_steps import BuildSteps
from titan_ckpt.training.callbacks import Callback, StepMetrics
from titan_ckpt.training.config import DEFAULT_STEPS
from titan_ckpt.training.data.batch import Batch, checked, filled, to_device
from titan_ckpt.training.header import count_parameters, ending, header, position
from titan_ckpt.training.loss import Predicted, num_predicted, summed_cross_entropy
from titan_ckpt.training.model_folder import other_choices
from titan_ckpt.training.outcome import STOPPED, Outcome, forget_stop, record_stop, unsaved
from titan_ckpt.training.parallel.context_parallel import share_of
from titan_ckpt.training.parallel.data_parallel import complete_gradients, prepare_backward, sum_and_clip
from titan_ckpt.training.precision import numerics
from titan_ckpt.training.train_state import TrainState

logger = logging.getLogger(__name__)

_AFRESH = 'restore them, or start the schedule afresh: checkpoint.resume.exclude = ["lr_scheduler"]'


class Trainer(BuildSteps):
    """Trains one model on this process's share of the data.

    `run()` does everything: build, resume, train, save. To change a part, override its build step in a subclass. Each
    step returns what it builds and may use the results of earlier steps (the attributes, in the order of the steps). An
    optional part is left out if its step returns None.
    """

    _unreported_seconds = 0.0
    """Time in steps since the newest exchange began, which the next exchange tells to all ranks."""
    _since_measured: tuple[int, float] = (0, 0.0)
    """Number of steps, and their time, since the newest one that was measured."""
    is_measured = True
    """Whether the ranks exchange the loss and the norm of the gradients in the step under way, or newest."""
    _before: tuple[dict[str, Any], dict[str, Any]] | None = None
    """The position in the data and the generators before the step under way, if `step_back` may be called."""
    outcome: Outcome
    """The end of the run; set when `run` returns."""

    def add_callback(self, callback: Callback) -> None:
        """Add a callback after the others, before `run` or from inside it; it gets the events from then on.

        Raises: TypeError for anything else than a Callback.
        """
        if not isinstance(callback, Callback):
            raise TypeError(f"add_callback: expected an object of a subclass of Callback, found {callback!r}")
        self.user_callbacks += (callback,)
        if hasattr(self, "callbacks"):
            self.callbacks.user += (callback,)

    def run(self) -> TrainState:
        """Build, load, train to the last step and save. Return the progress of the run."""
        with self.setup() as self.ranks:
            self.build()
            check = self._broken_weights if self.config.training.check_gradients == "log" else None
            try:
                with self.build_manager() as self.manager, RunGuard(self.manager, fault=check) as self.guard:
                    self.load()
                    self.train()
            except Exception:
                self._say_what_is_lost()
                raise
        self.outcome = self._find_outcome()
        return self.state

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that called `run`; docs/resume.md has the list."""
        return self.outcome.exit_code

    def _say_what_is_lost(self) -> None:
        """Log how many completed steps no checkpoint holds; the exit code of an error does not say it."""
        if self.ranks.rank or not self.state.step or self.manager.completed.run.half_loaded:
            return
        if (lost := self.state.step - (self.manager.completed.saved or 0)) > 0:
            logger.error("%s", unsaved(lost, self.state.step))

    def _find_outcome(self) -> Outcome:
        """Return how the run ended; rank 0 logs it, and writes stopped.json if the run is to be started again."""
        step, steps = self.state.step, self.num_steps
        stopped = self.guard.stopped if step < steps else None
        outcome = Outcome(step, steps, self.manager.completed.saved, stopped)
        if self.ranks.rank:
            return outcome
        for line in ending(self):
            logger.info("%s", line)
        if stopped is None:
            return outcome
        if outcome.lost:
            logger.error("stopped at step %d of %d; %s", step, steps, unsaved(outcome.lost, step))
        else:
            logger.warning("stopped at step %d of %d, all saved: the same command goes on from there", step, steps)
        try:
            record_stop(Path(self.config.output_folder), outcome)
        except OSError as error:
            logger.warning("%s is not written: %s", STOPPED, error)
        return outcome

    def build(self) -> None:
        """Call the other twelve steps (`setup` is the first)."""
        self.model = self.build_model()
        self.built_on = next(self.model.parameters()).device.type
        self.freeze_model()
        self.num_parameters = count_parameters(self.model.parameters())
        self.tokenizer = self.build_assets()
        self.encode = self.build_data_transform()
        self.dataset = self.build_dataset()
        self.collate = self.build_collate()
        self.dataloader = self.build_dataloader()
        self.num_steps = self.find_num_steps()
        self.model_parts = self.parallelize_model()
        self.pipeline = self.build_pipeline()
        self.optimizer = self.build_optimizer()
        self.lr_scheduler = self.build_lr_scheduler()
        self.training_context = self.build_training_context()
        self.state.schedule = schedule.schedule_record(self.config, self.num_steps)
        self.state.optimizer = schedule.optimizer_record(self.config.optimizer)
        way = self.config.optimizer.implementation or "as torch does"
        self.state.numerics = self.ranks.of_first(numerics(self.ranks.device, optimizer=way))
        self.callbacks = self.build_callbacks()
        if self.ranks.rank == 0:
            for line in header(self):
                logger.info("%s", line)
        self.callbacks.on_init_end(self)

    def find_num_steps(self) -> int:
        """Return the last step, as the position in the data says it: training.steps, or the end of training.epochs.

        Raises: ConfigError for epochs of data whose length is not known.
        """
        training = self.config.training
        if training.epochs is None:
            return DEFAULT_STEPS if training.steps is None else training.steps
        if not hasattr(self.dataloader, "end_after"):
            kind = type(self.dataloader).__name__
            raise ConfigError([f"training.epochs: {kind} does not say how long the data is; set training.steps"])
        left: int = self.dataloader.end_after(training.epochs)
        of_epochs = self.state.step + -(-left // self.global_batch_size)
        return of_epochs if training.steps is None else min(of_epochs, training.steps)

    def load(self) -> None:
        """Resume, load initial weights, or start from step 0."""
        result = self.manager.load()
        self.state.step = result.step
        if result.step and not self.num_steps:
            problem = f"0 saves the initial model, and step {result.step} is in {self.manager.folder}"
            raise ConfigError([f"training.steps: {problem}; leave it out to go on, or take another checkpoint.folder"])
        self.num_steps = self.find_num_steps()
        self.state.schedule = schedule.schedule_record(self.config, self.num_steps)
        if result.step:
            self._check_own_schedule()
        self.decay = schedule.find_decay(self.config, self.num_steps, self.tokens_per_step, self.state)
        scheduler = self.lr_scheduler
        if type(scheduler) is LambdaLR:
            if "lr" in self._taken_settings(self.state.saved_optimizer):
                scheduler.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
            # the checkpoint has the rate that its own run would have given to the next step
            peaks = zip(self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, peak, factor in peaks:
                group["lr"] = peak * factor(scheduler.last_epoch)
        if self.ranks.rank == 0:
            forget_stop(Path(self.config.output_folder))
            self._log_choices(resumed=result.step > 0)
        self.callbacks.on_load(self, result)

    def _check_own_schedule(self) -> None:
        """Raises: ConfigError if a schedule of one's own would go on with other settings than this run's."""
        if self.lr_scheduler is None or "lr_scheduler" in self.config.checkpoint.resume.exclude:
            return
        state = self.lr_scheduler.state_dict()
        faults = schedule.own_schedule_faults(self.state.saved_schedule, self.state.schedule, state)
        before, now = self.state.saved_optimizer, self.state.optimizer
        if is_import_name(self.config.schedule.kind) and "lr" in schedule.changed_settings(before, now):
            faults.append(f"optimizer.lr is {now['lr']}, and the checkpoint's schedule started from {before['lr']}")
        if faults:
            raise ConfigError([*faults, _AFRESH])

    def _log_choices(self, *, resumed: bool) -> None:
        """Log where the run begins, and settings that differ from the pretrained model's and the resumed run's."""
        logger.info("%s", position(self))
        tokenizer = self.tokenizer.folder if self.tokenizer is not None else None
        for line in other_choices(self.config, tokenizer, resumed=resumed):
            logger.warning("%s", line)
        if not resumed:
            return
        before, now = self.state.saved_optimizer, self.state.optimizer
        for name in sorted(self._taken_settings(before)):
            logger.warning(
                "optimizer: %s = %s from step %d on, and %s before", name, now.get(name, "its default"),
                self.state.step + 1, before.get(name, "its default")
            )  # fmt: skip
        changed = schedule.rescaled(self.state.saved_schedule, self.state.schedule, self.state.step)
        if changed and self.lr_scheduler is not None and not is_import_name(self.config.schedule.kind):
            logger.warning("the learning rate schedule is rescaled after step %d: %s", self.state.step, changed)
        if otherwise := schedule.changes(self.state.saved_numerics, self.state.numerics):
            logger.warning(
                "later steps may differ in their last bits from those of an uninterrupted run: %s", otherwise
            )

    def train(self) -> None:
        """Run the remaining optimizer steps, or fewer if the guard stops the run; the guard then saves.

        If the last step is already done, take no step and only make the exports that are still missing. With
        `training.steps = 0`, save the initial model.
        """
        if self.num_steps == 0:
            if self.manager.completed.saved is None:  # else it is there
                self.manager.save_seed()
            return
        if self.state.step >= self.num_steps:
            logger.info("step %d of %d is done: nothing to train", self.state.step, self.num_steps)
            self.manager.save(self.state.step, last_step=True)
            return
        for _ in self.take_steps():
            pass

    def take_steps(self) -> Iterator[StepMetrics]:
        """Take the remaining steps one after the other, each with all that belongs to it, and yield its metrics."""
        batches = iter(self.dataloader)
        if isinstance(self.model, LanguageModel):  # any other model's own step says what a batch is
            batches = checked(batches, self.model.vocab_size)
        for part in self.model_parts:
            part.train()
        for optimizer in switches([self.optimizer]):
            optimizer.train()
        self.callbacks.on_train_begin(self)
        epoch = self.epoch
        self.callbacks.on_epoch_begin(self, epoch)
        metrics: StepMetrics | None = None
        try:
            while self.state.step < self.num_steps:
                newest, metrics = metrics, self.train_step(batches)
                if metrics is None:
                    self._end_with_data(newest)
                    break
                self.callbacks.on_step_end(self, metrics)
                while epoch < self.epoch:
                    self.callbacks.on_epoch_end(self, epoch)
                    epoch += 1
                    if epoch != self.config.training.epochs:
                        self.callbacks.on_epoch_begin(self, epoch)
                is_last = self.guard.step_ended(self.state.step)
                yield metrics
                if is_last:
                    break
        finally:
            self.callbacks.on_train_end(self)

    def _end_with_data(self, newest: StepMetrics | None) -> None:
        """Make the newest step the last one of the run, with all that a last step has: the data has ended. Collective.

        `newest`: its metrics; None if this process has taken no step.
        Raises: DataError if there is no step; GradientError for weights that the last step has broken.
        """
        step = self.state.step
        if not step:
            raise DataError(["data: it has no batch for the first step on every rank; give more, or fewer ranks"])
        if self.ranks.rank == 0:
            logger.warning("the data has ended: step %d is the last of the run, and not %d", step, self.num_steps)
        self.num_steps = step
        self.step_back()
        if newest is None:
            self.manager.save(step, last_step=True)
            return
        if not self.is_measured:
            broken = self._broken_weights()
            if self.ranks.sum(torch.tensor(float(broken is not None), device=self.ranks.device)):
                raise GradientError(f"nothing is saved: {broken or 'another rank names what is not finite'}", step)
        of_last = (getattr(self.callbacks, name) for name in ("evaluation", "logging", "checkpoint", "export"))
        for callback in filter(None, of_last):
            callback.on_step_end(self, newest)

    def step_back(self) -> bool:
        """Put the position in the data and the generators back to where the step under way found them.

        Return False if nothing is known of them, because this run saves nothing.
        """
        if self._before is None:
            return False
        position, random_state = self._before
        self.dataloader.load_state_dict(position)
        RandomState().load_state_dict(random_state)
        return True

    def train_step(self, batches: Iterator[Any]) -> StepMetrics | None:
        """Take one optimizer step over `accumulation` micro-batches and return its metrics; None if the data has ended.

        The last step before an end has fewer micro-batches if all ranks have equally many.

        The loss is the mean over the predicted tokens of all ranks and micro-batches, however they are distributed, or
        with training.loss_average = "rank" the mean of the ranks' means.
        Collective: 1 Count tokens, unless every label counts. 2 Backward; the last micro-batch exchanges gradients.
        3 In a step that `is_measured`, sum the loss and the squared norm of the gradients, and copy both to the host:
        the one wait for the device. In the others both are nan.
        """
        started = time.perf_counter()
        step = self.state.step + 1
        before = self.is_measured, dict(self.measurements)
        self.measurements.clear()
        self.is_measured = self._needs_measures(step)
        may_end = getattr(self.dataloader, "may_end", True)
        if self.config.checkpoint.save is not None and (self.is_measured or may_end):
            self._before = deepcopy(self.dataloader.state_dict()), RandomState().state_dict()
        self.callbacks.on_step_begin(self, step)
        micro_batches = self._next_batches(batches)
        is_whole = getattr(self.dataloader, "every_label_counts", False)
        predicted = Predicted.of(micro_batches, self.num_counted, self.ranks, is_whole=is_whole, may_end=may_end)
        if predicted.data_ends:
            self.is_measured, self.measurements = before
            return None
        divisor = predicted.divisor(self.config.training.loss_average)
        share = self.accumulate_gradients(micro_batches, divisor) / divisor
        num_tokens, told = predicted.num_tokens, time.perf_counter()
        self._unreported_seconds += told - started
        loss = grad_norm = math.nan
        if (scale := self._loss_scale) != 1:
            torch._foreach_mul_([local_tensor(p.grad) for p in self.trainable() if p.grad is not None], 1 / scale)
        if self.is_measured:
            spent = torch.full_like(share, self._unreported_seconds)
            grad_norm, (loss, of_ranks) = self.clip_gradients(torch.stack([share, spent]))
            self.state.seconds += of_ranks / self.ranks.size
            self._unreported_seconds = 0.0
        else:
            complete_gradients(self.trainable())
        num_tokens = int(predicted.everywhere if num_tokens is None else num_tokens)
        if not num_tokens and self.ranks.rank == 0:
            logger.warning("step %d learns nothing: no label of its %d sequences counts", step, self.global_batch_size)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if self._compute_dtype is torch.float16 and self.state.has_overflowed(grad_norm):
            self.is_measured, loss, grad_norm = False, math.nan, math.nan
            if self.ranks.rank == 0:
                what = "gradients overflow in float16, so no weight changes"
                scale = self.state.loss_scale
                logger.warning("step %d: %s; the loss is scaled by %g from now on", step, what, scale)
        else:
            self.callbacks.on_pre_optimizer(self, step, grad_norm)
            self.optimizer.step()
            if self.converters is not None:
                self.converters.post_optimizer_hook(self.model_parts)
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.optimizer.zero_grad()
        if self.balance_loss is not None and self.is_log_due(step):
            self.measurements["moe/balance_loss"] = self.balance_loss.take_mean()
        self.state.step = step
        self.state.num_tokens += num_tokens
        steps, seconds = self._since_measured[0] + 1, self._since_measured[1] + time.perf_counter() - started
        self._since_measured = (0, 0.0) if self.is_measured else (steps, seconds)
        self._unreported_seconds += time.perf_counter() - told
        self.manager.completed.complete(step)
        return StepMetrics(step, loss, grad_norm, lr, num_tokens, seconds / steps)

    def _next_batches(self, batches: Iterator[Any]) -> list[Any]:
        """Return the micro-batches of a step; fewer at the end of the data.

        Raises: DataError for an end that the ranks do not ask each other about.
        """
        found = [*islice(batches, self.accumulation)]
        if len(found) < self.accumulation and getattr(self.dataloader, "every_label_counts", False):
            what = "every_label_counts is true, by which no rank is asked whether its share has ended, as this one has"
            raise DataError([f"data: {what}: set it to False in the class of the loader"])
        return found

    @property
    def _loss_scale(self) -> float:
        return self.state.loss_scale if self._compute_dtype is torch.float16 else 1.0

    def _needs_measures(self, step: int) -> bool:
        """Return whether the loss and the gradients' norm of a step are exchanged: training.check_gradients.

        They are if the step is to be logged, evaluated, saved or exported. A clip function of one's own is called in
        every step.
        """
        if self.config.training.check_gradients == "step" or type(self).clip_gradients is not Trainer.clip_gradients:
            return True
        evaluation = self.config.evaluation
        return (
            self.own_function("clip_gradients") is not None
            or self.is_log_due(step)
            or (evaluation is not None and step % evaluation.interval == 0)
            or self.manager.is_save_due(step, step == self.num_steps)
            or any(export.is_due(step, step == self.num_steps) for export in self.manager.config.export)
        )

    def _broken_weights(self) -> str | None:
        """Return why this rank's weights must not be saved; a step between two logs is not measured. Not collective."""
        for part in self.model_parts:
            for fqn, parameter in part.named_parameters():
                if parameter.requires_grad and not local_tensor(parameter).detach().isfinite().all():
                    return f"{fqn} is not finite after step {self.state.step}; resume from an earlier checkpoint"
        return None

    def clip_gradients(self, values: torch.Tensor) -> tuple[float, list[float]]:
        """Clip the gradients; return their global norm and the sums of `values` over all ranks. Collective: one sum.

        `values`: 1-D, float64.
        """
        max_norm = self.config.training.max_grad_norm
        if (clip := self.own_function("clip_gradients")) is not None:
            return float(clip(self.trainable(), max_norm, self.ranks)), self.ranks.sum(values).tolist()
        return sum_and_clip(self.trainable(), max_norm, self.ranks, values)

    def accumulate_gradients(self, micro_batches: Sequence[Batch], divisor: torch.Tensor | int) -> torch.Tensor:
        """Run forward and backward of every micro-batch; ranks exchange gradients only after the last one.

        `divisor`: what the summed loss is divided by. Returns: this rank's share of the summed loss, float64.
        """
        batches = [share_of(to_device(batch, self.ranks.device), self.ranks) for batch in micro_batches]
        if self.pipeline is not None:
            whole = filled(batches, self.accumulation * self.config.training.batch_size)
            for index in range(len(batches)):
                self.callbacks.on_substep_begin(self, index)
            with self.training_context():
                total = self.pipeline.forward_backward(whole, self._loss_scale / divisor)
            for index in range(len(batches)):
                self.callbacks.on_substep_end(self, index)
            return total / self.ranks.degrees.tp
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        keep_gathered = self.config.parallel.reshard_after_forward == "never"
        for index, batch in enumerate(batches):
            self.callbacks.on_substep_begin(self, index)
            prepare_backward(self.model_parts, last=index == len(batches) - 1, keep_gathered=keep_gathered)
            with self.training_context(), self.balance_loss.watching() if self.balance_loss else nullcontext():
                loss = self.compute_loss(batch)
            objective = loss / divisor
            if self.balance_loss is not None:
                objective = objective + self.balance_loss.share() / len(batches)
            (objective if self._loss_scale == 1 else objective * self._loss_scale).backward()
            total += loss.detach()
            self.callbacks.on_substep_end(self, index)
            self.guard.check()
        return total / self.ranks.degrees.tp

    @torch.no_grad()
    def measure_loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's share of the summed loss of a batch, float64, without gradients. Collective."""
        batch = share_of(to_device(batch, self.ranks.device), self.ranks)
        with self.training_context():
            loss = self.pipeline.evaluate(batch) if self.pipeline is not None else self.compute_loss(batch).double()
        return loss / self.ranks.degrees.tp

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a batch; the step of a model that is no LanguageModel computes its own."""
        if isinstance(self.model, LanguageModel):
            return summed_cross_entropy(self.model(batch["tokens"]), batch)
        return self.model.summed_loss(batch)

    def num_counted(self, batch: Batch) -> int:
        """Return how many losses `compute_loss` sums: the predicted tokens, or what the model's own step counts."""
        return num_predicted(batch) if isinstance(self.model, LanguageModel) else self.model.num_counted(batch)
