"""Models that follow the trained one: averages, references and teachers that callbacks of TRL and PEFT keep.

Owns which of them a step holds, and the moment when they are restored: a callback makes its own model when the training
begins, which is after a load.
Source: trl 1.16, trainer/callbacks.py, and experimental/ bema_for_ref_model, sdft/teacher_sync.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer

from titan_ckpt.types import Stateful


def followers_of(trainer: Trainer) -> dict[str, Stateful]:
    """Return the states of the following models of a trainer, by their names in a step."""
    states: dict[str, Stateful] = {}
    handler: Any = trainer.callback_handler
    for callback in handler.callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if "SyncRefModelCallback" in kinds and callback.ref_model is not None:
            states["ref_model"] = callback.ref_model
        if getattr(callback, "update_ref_model", False) and getattr(handler, "ref_model", None) is not None:
            states["ref_model"] = handler.ref_model
        if "BEMACallback" in kinds:
            states["average"] = _Average(callback)
        if "PEFTAdapterEMACallback" in kinds:
            states["teacher"] = _TeacherAdapter(callback)
    return states


class Later:
    """A state whose load waits for `begin`, when the callbacks have made their models."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._loaded: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def begin(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded:
            self.restore(self._callback, loaded)

    def restore(self, callback: Any, loaded: dict[str, Any]) -> None:
        raise NotImplementedError


class _Average(Later):
    """The average of BEMACallback, and the weights it began with."""

    def state_dict(self) -> dict[str, Any]:
        callback = self._callback
        if callback.running_model is None:  # the training has not begun
            return {}
        return {
            "first": dict(zip(callback.param_names, callback.theta0_params, strict=True)),
            "average": dict(zip(callback.param_names, callback.ema_params, strict=True)),
            "model": callback.running_model.state_dict(),
        }

    def restore(self, callback: Any, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, first, average in zip(
                callback.param_names, callback.theta0_params, callback.ema_params, strict=True
            ):
                first.copy_(loaded["first"][name])
                average.copy_(loaded["average"][name])
        callback.running_model.load_state_dict(loaded["model"])


class _TeacherAdapter(Later):
    """The second adapter of PEFTAdapterEMACallback, which TRL computes from weights beside the model."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._callback.shadow_weights or {})

    def restore(self, callback: Any, loaded: dict[str, Any]) -> None:
        peft: Any = sys.modules["peft"]  # it has wrapped the model
        with torch.no_grad():
            for name, weight in callback.shadow_weights.items():
                weight.copy_(loaded[name])
        model = callback.model if callback.accelerator is None else callback.accelerator.unwrap_model(callback.model)
        peft.set_peft_model_state_dict(model, callback.shadow_weights, adapter_name=callback.teacher_adapter_name)
