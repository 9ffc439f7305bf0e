"""Progress: the state of Lightning's Trainer beside weights, optimizers and schedules, as a Stateful.

Lightning gives the module's on_save_checkpoint the whole checkpoint that it is about to write. Here the hook gets one
with the same entries, and only the entries that it adds are saved: the weights are saved by themselves.
Source: lightning 2.6, pytorch/trainer/connectors/checkpoint_connector.py; of averages, pytorch/callbacks/
weight_averaging.py and stochastic_weight_avg.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_ckpt.components.classes import gives_state
from titan_ckpt.components.gradients import is_used
from titan_ckpt.components.known.loaders import seed_workers_apart
from titan_ckpt.components.known.switches import Switches, switches_of
from titan_ckpt.components.unsaved_state import unless_allowed
from titan_ckpt.errors import ConfigError, refuse
from titan_ckpt.integrations.lightning.known import AVERAGING, FINETUNING, STOCHASTIC, of_kinds, overrides
from titan_ckpt.integrations.lightning.metrics import hold_metrics, load_metrics, state_of_metrics
from titan_ckpt.integrations.loader_random import order_of, set_order
from titan_ckpt.weights.live_memory import is_same

logger = logging.getLogger(__name__)


class Progress:
    """The counters of Lightning's loops, and the states of callbacks, module and data module, as a Stateful."""

    def __init__(self, trainer: Any, allow: Collection[str] = ()) -> None:
        self._trainer, self._allow = trainer, allow
        self._accumulated: dict[str, torch.Tensor] = {}
        self.holds_gradients = not trainer.lightning_module.automatic_optimization
        """The manager refuses to save gradients that no step has used, unless a state has them."""
        self._loaded: dict[str, Any] | None = None
        self._drawn: list[Any] = []
        """The states of the generators of loaders that validate, until these are built."""
        modes = ((name, part, "training") for name, part in trainer.lightning_module.named_modules())
        self._switches = Switches([*switches_of(trainer.lightning_module), *modes])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning's own checkpoint has, without weights and optimizers."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {
            k: v for k, v in loops["state_dict"].items() if k != "combined_loader"
        }  # each rank's own
        state = {
            "loops": loops,
            "callbacks": {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())},
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "averages": {c.state_key: state_of_average(c) for c in of_kinds(trainer.callbacks, AVERAGING)},
            "present": sorted(callback.state_key for callback in trainer.callbacks),
            "metrics": state_of_metrics(trainer),
            "gradients": self._gradients(),
            "should_stop": trainer.should_stop,
            "switches": self._switches.changed(),
            "validated": self._drawn or [*map(order_of, self._validated())],
        }
        offered = self._checkpoint(state)
        checkpoint = dict(offered)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        return state | {"module": {name: value for name, value in checkpoint.items() if name not in offered}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all of it; the loops go on within an epoch, or begin the next one."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        fit.load_state_dict(state_dict["loops"])
        epochs = fit.epoch_progress.total
        if epochs.completed == epochs.ready:  # nothing is to be done again
            _go_on_afresh(fit)
            # without it, the sanity check would run, and take the metrics that schedulers and callbacks monitor
            fit.epoch_loop.val_loop._restarting = True  # noqa: SLF001 - the first batch sets it to False
        load_metrics(trainer, state_dict["metrics"])
        self._accumulated = state_dict["gradients"]
        self._loaded = state_dict | {"callbacks": deepcopy(state_dict["callbacks"])}
        trainer.should_stop = state_dict["should_stop"]
        self._drawn = state_dict.get("validated", [])
        self._load_callbacks(state_dict)
        self._tell_module(state_dict)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state_dict["data"])
        if trainer.should_stop:
            logger.warning(
                "a callback had stopped the run early, and it stays stopped. To train on, set "
                "self.trainer.should_stop = False in on_fit_start of the module"
            )

    def rebuild(self, states: Mapping[str, Any]) -> None:
        """Give optimizers the groups that a BaseFinetuning had added to them, by what its state says of them."""
        trainer, stored = self._trainer, states.get("lightning", {}).get("callbacks", {})
        parameters = dict(trainer.lightning_module.named_parameters())
        for callback in of_kinds(trainer.callbacks, FINETUNING):
            of_optimizers = stored.get(callback.state_key, {}).get("internal_optimizer_metadata", {})
            for index, groups in of_optimizers.items():
                if index >= len(trainer.optimizers):  # the load refuses what no optimizer takes
                    continue
                trainer.optimizers[index].param_groups = [
                    group | {"params": [parameters[name] for name in group["params"] if name in parameters]}
                    for group in deepcopy(groups)
                ]

    def _load_callbacks(self, stored: dict[str, Any]) -> None:
        """Give callbacks their states. Raises: ConfigError for a state that no callback takes."""
        trainer, states = self._trainer, stored["callbacks"]
        present = {callback.state_key: callback for callback in trainer.callbacks}
        reason = "the step holds its state, and the run has no such callback: give it to the Trainer"
        lost = sorted(states.keys() - present.keys())
        refuse(*(line for key in lost for line in unless_allowed(f"callback {key}", key, reason, self._allow)))
        before = {*stored["present"]}
        if before != present.keys():
            added, removed = sorted(present.keys() - before), sorted(before - present.keys())
            logger.warning("callbacks differ from those of the step: added %s, removed %s", added, removed)
        for key in states.keys() & present.keys():
            present[key].load_state_dict(states[key])
        for callback in of_kinds(trainer.callbacks, AVERAGING):
            load_average(callback, stored["averages"].get(callback.state_key), trainer.lightning_module)
        for callback in of_kinds(trainer.callbacks, FINETUNING):
            callback._restarting = False  # noqa: SLF001 - `rebuild` has done what it would do
        for callback in trainer.callbacks:
            if getattr(callback, "_duration", None) is not None and hasattr(callback, "_check_time_remaining"):
                callback._check_time_remaining(trainer)  # noqa: SLF001 - Timer's on_fit_start came before its state

    def begin(self) -> None:
        """Set again what hooks have set anew since the load, and the gradients, which Lightning clears in fit()."""
        if self._loaded is not None:
            self._switches.restore(self._loaded["switches"])
            hold_metrics(self._trainer.lightning_module, self._loaded["metrics"])
            for callback in self._trainer.callbacks:
                if gives_state(callback) and callback.state_key in self._loaded["callbacks"]:
                    callback.load_state_dict(self._loaded["callbacks"][callback.state_key])
            for callback in of_kinds(self._trainer.callbacks, STOCHASTIC):
                exchange_schedule(callback, self._trainer)
        self._loaded = None
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for name, grad in self._accumulated.items():
            parameters[name].grad = _like(parameters[name], grad)
        self._accumulated = {}

    def set_up_validation(self) -> None:
        """Let the loaders that validate go on in their order."""
        if loaders := self._validated():
            for loader in loaders:
                seed_workers_apart(loader)
            for loader, states in zip(loaders, self._drawn, strict=False):
                set_order(loader, states)
            self._drawn = []

    def _validated(self) -> list[Any]:
        loaders = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader  # noqa: SLF001 - Lightning has no public name for it
        return [] if loaders is None else loaders.flattened

    def go_on(self) -> None:
        """Set what callbacks set at the start of the epoch."""
        for callback in self._trainer.callbacks:
            if hasattr(callback, "get_accumulate_grad_batches"):  # GradientAccumulationScheduler
                callback.on_train_epoch_start(self._trainer)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients that a manual optimization has accumulated since its optimizers stepped."""
        module = self._trainer.lightning_module
        if not self.holds_gradients:  # Lightning clears them first
            return {}
        of_parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
        return {name: grad for name, grad in of_parameters.items() if grad is not None and not is_used(grad)}

    def _tell_module(self, stored: dict[str, Any]) -> None:
        """Call on_load_checkpoint when the weights are loaded. Raises: ConfigError if it changes them in the dict."""
        checkpoint = self._checkpoint(stored) | stored["module"]
        weights = checkpoint.get("state_dict", {})
        before = dict(weights)
        self._trainer.lightning_module.on_load_checkpoint(checkpoint)
        after = checkpoint.get("state_dict", weights)
        others = {name for name in before.keys() & after.keys() if before[name] is not after[name]}
        others = {name for name in others if not is_same(before[name], after[name])}
        if changed := sorted(others | before.keys() ^ after.keys()):
            entries = f'on_load_checkpoint changes checkpoint["state_dict"] ({", ".join(changed[:5])})'
            raise ConfigError(
                [f"{entries}, but the weights are loaded already: change the parameters of the module instead"]
            )

    def _checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of Lightning's checkpoint, if the module looks at it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        if not overrides(module, "core.hooks"):
            return {}
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": module.state_dict(),
            "loops": {"fit_loop": state["loops"]},
            "callbacks": state["callbacks"],
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "hyper_parameters": dict(module.hparams),
        }


def exchange_schedule(callback: Any, trainer: Any) -> None:
    """Let a StochasticWeightAveraging exchange the schedule, if it had in the step, and change no weights."""
    kept = callback._max_epochs, callback._latest_update_epoch  # noqa: SLF001 - Lightning has no public name for them
    if callback._scheduler_state is not None:  # noqa: SLF001 - as above
        callback._max_epochs, callback._latest_update_epoch = -1, trainer.current_epoch  # noqa: SLF001 - as above
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
        callback._max_epochs, callback._latest_update_epoch = kept  # noqa: SLF001 - as above


def go_on_from_last_epoch(callback: Any, trainer: Any) -> None:
    """Set what the epoch in which a StochasticWeightAveraging normalizes has set, and the end of the run sets back."""
    is_last = trainer.current_epoch - 1 == callback.swa_end + 1
    if callback._model_contains_batch_norm and callback._max_epochs != -1 and is_last:  # noqa: SLF001 - as above
        callback._accumulate_grad_batches = trainer.accumulate_grad_batches  # noqa: SLF001 - as above
        trainer.fit_loop.max_batches += 1


def state_of_average(callback: Any) -> dict[str, Any]:
    """Return all tensors of the average, also buffers that are not persistent, which it averages too."""
    average: nn.Module = callback._average_model  # noqa: SLF001 - Lightning has no public name for it
    epoch = callback._latest_update_epoch  # noqa: SLF001 - as above
    return {"epoch": epoch, "tensors": {name: value.detach() for name, value in _named(average)}}


def load_average(callback: Any, state: dict[str, Any] | None, module: nn.Module) -> None:
    """Set it, or let an average of which no step is known begin with the module's weights."""
    average: nn.Module = callback._average_model  # noqa: SLF001 - as above
    values = {f"module.{name}": value for name, value in _named(module)}
    if state is not None:
        values = state["tensors"]
        callback._latest_update_epoch = state["epoch"]  # noqa: SLF001 - as above
    with torch.no_grad():
        for name, value in _named(average):
            if state is not None or name in values:
                value.copy_(values[name])


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _like(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a stored gradient as its parameter holds it."""
    grad = grad.to(parameter.device)
    if isinstance(parameter, DTensor) and not isinstance(grad, DTensor):
        return distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    return grad


def _go_on_afresh(loop: Any) -> None:
    """Clear the marks of a restart from a loop and those within it, as each clears its own after an iteration.

    FitLoop's setter of `restarting` cannot: with max_steps it sets True, whatever it is given.
    """
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False  # noqa: SLF001 - as its own on_iteration_done
    for inner in vars(loop).values():
        if hasattr(inner, "_resuming_from_checkpoint"):
            _go_on_afresh(inner)
