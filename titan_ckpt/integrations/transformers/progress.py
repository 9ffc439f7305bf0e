"""The state of a Trainer beside weights, optimizer and schedule, as the manager's Stateful objects.

`RunProgress` is the same on all ranks, `RankProgress` is each rank's own. `followers_of` has the models that follow the
trained one, which callbacks of TRL and PEFT make when the training begins, after a load.
Source: trl 1.16, trainer/grpo_trainer.py `_prepare_inputs`, which rloo_trainer.py and distillation_trainer.py share;
trainer/callbacks.py, and experimental/ bema_for_ref_model, sdft/teacher_sync.py.
"""

from __future__ import annotations

import json
import logging
import sys
from copy import deepcopy
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from titan_ckpt.components.classes import class_name
from titan_ckpt.components.known.switches import Switches, switches_of
from titan_ckpt.encoding.typed_json import MAX_BYTES, MAX_INLINE_BYTES
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.geometry.nested import tensors_in
from titan_ckpt.integrations.transformers.known import KEPT
from titan_ckpt.integrations.transformers.loader import TrainerLoader
from titan_ckpt.types import Stateful

_log = logging.getLogger(__name__)

_SUMS = (
    "_metrics", "_stored_metrics", "stats", "_total_train_tokens", "_diagnostic_counters",
    "_on_policy_loss_total", "_on_policy_step_equiv", "_off_policy_loss_total", "_off_policy_step_equiv",
    "_matched_sum", "_matched_step_eq", "_unmatched_sum", "_unmatched_step_eq",
)  # fmt: skip
"""Attributes in which TRL's trainers sum up what the next log says."""
_FIELDS = ("epoch", "best_metric", "best_global_step", "num_input_tokens_seen", "total_flos")
_COUNTERS = ("_step", "_buffer_step")
_COEFFICIENTS = (
    "entropy_coef", "_last_world_entropy", "_optimal_values",
    "_buffered_on_policy", "_buffered_on_policy_flags", "_buffered_text_logs",
)  # fmt: skip


class RunProgress:
    """The TrainerState, and the state of callbacks that have one."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._history: list[str] = []
        model: Any = trainer.model
        self._trained = Switches(switches_of(model))
        self._loaded: dict[str, Any] | None = None
        self.ended = False
        """Whether a callback has ended the training before its last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the log as lines of JSON, because it is copied at every step, and callbacks' attributes."""
        state = self._trainer.state
        if len(self._history) > len(state.log_history):
            self._history = []
        self._history += [json.dumps(entry, default=float) for entry in state.log_history[len(self._history) :]]
        return {
            **{name: _plain(getattr(state, name)) for name in _FIELDS},
            "log_history": [*self._history],
            "callbacks": [[name, _attributes(callback)] for name, callback in self._callbacks()],
            "ended": self.ended,
            "trained": self._trained.changed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the TrainerState and the callbacks. Raises: ConfigError if other callbacks have state."""
        stored, own = state_dict["callbacks"], self._callbacks()
        if [name for name, _ in stored] != [name for name, _ in own]:
            before, now = ([name for name, _ in found] for found in (stored, own))
            raise ConfigError(
                [f"callbacks: those with state were {before}, and are {now}: give the trainer the same ones"]
            )
        self._loaded = state_dict
        self.restore()
        for name in _FIELDS:
            setattr(self._trainer.state, name, state_dict[name])
        self.ended = state_dict["ended"]
        self._trainer.state.log_history = [json.loads(line) for line in state_dict["log_history"]]

    def restore(self) -> None:
        """Set again what a hook may have changed since the load: callbacks' attributes, and which parameters train."""
        if self._loaded is None:
            return
        for (_, callback), (_, attributes) in zip(self._callbacks(), self._loaded["callbacks"], strict=True):
            vars(callback).update(deepcopy(attributes))
        self._trained.restore(self._loaded["trained"])

    def _callbacks(self) -> list[tuple[str, Any]]:
        found = [(class_name(callback), callback) for callback in self._trainer.callback_handler.callbacks]
        return [(n, c) for n, c in found if isinstance(c, ExportableState) or n in KEPT]


def _attributes(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that training changes."""
    if isinstance(callback, ExportableState):
        return dict(callback.state()["attributes"])
    return {name: getattr(callback, name) for name in KEPT[class_name(callback)]}


class RankProgress:
    """The position in the data, the completions in use, and what a rank has summed up since the last log."""

    def __init__(self, trainer: Trainer, loader: TrainerLoader) -> None:
        self._trainer = trainer
        self.loader = loader
        self.dp_rank, self.dp_world_size = loader.dp_rank, loader.dp_world_size
        self._since_log: dict[str, Any] | None = None
        self._completions: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the sums."""
        trainer: Any = self._trainer
        return {
            "loader": self.loader.state_dict(),
            "since_log": {
                "loss": trainer._tr_loss.item(),  # noqa: SLF001 - Trainer logs from it
                "step": trainer._globalstep_last_logged,  # noqa: SLF001 - as above
                "flos": trainer.current_flos,
                "sums": {name: _plain(getattr(trainer, name)) for name in _SUMS if hasattr(trainer, name)},
            },
            "completions": completions_of(trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position; the rest waits for `begin`."""
        self.loader.load_state_dict(state_dict["loader"])
        self._since_log, self._completions = state_dict["since_log"], state_dict["completions"]

    def load_state_dicts(self, state_dicts: list[dict[str, Any]]) -> None:
        """Set the position of a different number of ranks; what was not logged yet is in no later log.

        Raises: LoadMismatchError between two generations.
        """
        if any(state["completions"] and state["completions"]["held"] is not None for state in state_dicts):
            raise LoadMismatchError(
                f"the checkpoint holds completions that {len(state_dicts)} data-parallel ranks use for more steps, and "
                f"{self.dp_world_size} ranks cannot divide them: resume with {len(state_dicts)}, or from a step where "
                "the trainer generates anew (checkpoint.resume.step), which is each multiple of steps_per_generation * "
                "num_iterations / gradient_accumulation_steps"
            )
        self.loader.load_state_dicts([state["loader"] for state in state_dicts])
        self._completions = state_dicts[0]["completions"]  # a number and coefficients, which all ranks have

    def begin(self) -> None:
        """Set completions and sums, after the Trainer has set the sums to zero."""
        trainer: Any = self._trainer
        if self._completions is not None:
            _restore_completions(trainer, self._completions)
        since_log, self._since_log, self._completions = self._since_log, None, None
        if since_log is None:
            return
        trainer._tr_loss += since_log["loss"]  # noqa: SLF001 - Trainer logs from it
        trainer._total_loss_scalar -= since_log["loss"]  # noqa: SLF001 - train_loss is that of the steps of this process
        trainer._globalstep_last_logged = since_log["step"]  # noqa: SLF001 - as above
        trainer.current_flos = since_log["flos"]
        _fill(vars(trainer), since_log["sums"])


def completions_of(trainer: Any) -> dict[str, Any] | None:
    """Return the completions that a trainer of TRL uses for several steps, how often they were, and what it adapts.

    None for a trainer that generates nothing; no completions if the next step generates anew.
    """
    counter = next((name for name in _COUNTERS if hasattr(trainer, name)), None)
    coefficients = {name: getattr(trainer, name) for name in _COEFFICIENTS if hasattr(trainer, name)}
    if counter is None:
        return {"number": None, "held": None, "coefficients": coefficients} if coefficients else None
    args, number = trainer.args, getattr(trainer, counter)
    uses = getattr(args, "steps_per_generation", args.gradient_accumulation_steps) * getattr(args, "num_iterations", 1)
    held = trainer._buffered_inputs if number % uses else None  # noqa: SLF001 - where TRL keeps the completions
    sizes = [tensor.nbytes for tensor in tensors_in(held)]
    if max(sizes, default=0) > MAX_INLINE_BYTES or sum(sizes) > MAX_BYTES // 2:  # typed JSON cannot hold them
        _log.warning(
            f"step {trainer.state.global_step}: the completions of this generation are too large for a checkpoint: "
            "a resume from this step generates them anew, and is not exact"
        )
        held = None
    return {"number": number, "held": held, "coefficients": coefficients}


def _restore_completions(trainer: Any, stored: dict[str, Any]) -> None:
    """Give the trainer what `completions_of` has returned."""
    for counter in (name for name in _COUNTERS if hasattr(trainer, name)):
        setattr(trainer, counter, stored["number"])
        trainer._buffered_inputs = send_to_device(stored["held"], trainer.accelerator.device)  # noqa: SLF001 - as above
    for name, value in stored["coefficients"].items():
        setattr(trainer, name, value)


def _fill(live: Any, stored: dict[str, Any]) -> None:
    """Set the values of nested dicts, which stay the objects that they are, such as a defaultdict."""
    for key, value in stored.items():
        if isinstance(value, dict):
            _fill(live[key], value)
        else:
            live[key] = value


def _plain(value: Any) -> Any:
    """Return numbers instead of tensors and NumPy's scalars, also within dicts and lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor) or (hasattr(value, "item") and hasattr(value, "dtype")):
        return value.item()
    return value


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
