"""Progress: the state of Lightning's Trainer beside weights, optimizers and schedules, as a Stateful.

Lightning gives the module's on_save_checkpoint the whole checkpoint that it is about to write. Here the hook gets one
with the same entries, and only the entries that it adds are saved: the weights are saved by themselves.
Source: lightning 2.6, pytorch/trainer/connectors/checkpoint_connector.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ckpt.errors import ConfigError

_HOOKS = ("on_save_checkpoint", "on_load_checkpoint")


def callbacks_with_hooks(callbacks: list[Any]) -> Iterator[str]:
    """Yield why a callback that changes Lightning's own checkpoint cannot be resumed."""
    for callback in callbacks:
        if _overrides(callback, "callbacks.callback"):
            yield (
                f"{type(callback).__name__}: it changes Lightning's own checkpoint (on_save_checkpoint), which is not "
                "written, so a resume would lose its state: leave it out, or give it state_dict and load_state_dict"
            )


class Progress:
    """The counters of Lightning's loops, and the states of callbacks, module and data module, as a Stateful."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

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
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
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
        for callback in trainer.callbacks:
            if callback.state_key in state_dict["callbacks"]:
                callback.load_state_dict(state_dict["callbacks"][callback.state_key])
        self._tell_module(state_dict)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state_dict["data"])
        # schedulers and callbacks monitor them
        trainer.callback_metrics.update({name: torch.tensor(v) for name, v in state_dict["metrics"].items()})

    def _tell_module(self, stored: dict[str, Any]) -> None:
        """Call on_load_checkpoint when the weights are loaded. Raises: ConfigError if it changes them in the dict."""
        checkpoint = self._checkpoint(stored) | stored["module"]
        weights = checkpoint.get("state_dict", {})
        before = dict(weights)
        self._trainer.lightning_module.on_load_checkpoint(checkpoint)
        after = checkpoint.get("state_dict", weights)
        names = before.keys() | after.keys()
        if changed := sorted(name for name in names if not _equal(before.get(name), after.get(name))):
            entries = f'on_load_checkpoint changes checkpoint["state_dict"] ({", ".join(changed[:5])})'
            raise ConfigError(
                [f"{entries}, but the weights are loaded already: change the parameters of the module instead"]
            )

    def _checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of Lightning's checkpoint, if the module looks at it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        if not _overrides(module, "core.hooks"):
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


def _go_on_afresh(loop: Any) -> None:
    """Clear the marks of a restart from a loop and those within it, as each clears its own after an iteration.

    FitLoop's setter of `restarting` cannot: with max_steps it sets True, whatever it is given.
    """
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False  # noqa: SLF001 - as its own on_iteration_done
    for inner in vars(loop).values():
        if hasattr(inner, "_resuming_from_checkpoint"):
            _go_on_afresh(inner)


def _overrides(value: Any, home: str) -> bool:
    """Return whether an object has hooks of its own, and not those of Lightning's base class in the module `home`."""
    hooks = [getattr(value, name, None) for name in _HOOKS]  # LambdaCallback has them from its arguments
    return any(hook is not None and not hook.__module__.endswith(home) for hook in hooks)


def _equal(one: Any, other: Any) -> bool:
    if one is other:  # also where it holds NaN
        return True
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one, other = one.to_local(), other.to_local()
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return False
