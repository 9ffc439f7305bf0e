"""Averages of the weights that Lightning's callbacks keep beside the module, and put into it when fit() ends.

Owns what a step holds of WeightAveraging, which exchanges the weights of the average and the module for a validation,
and how a resumed StochasticWeightAveraging, whose own state has the average, gets its schedule back.
Source: lightning 2.6, pytorch/callbacks/weight_averaging.py and stochastic_weight_avg.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from titan_ckpt.components.classes import names_of

AVERAGING = "weight_averaging.WeightAveraging"
STOCHASTIC = "stochastic_weight_avg.StochasticWeightAveraging"
FINETUNING = "finetuning.BaseFinetuning"


def of_kinds(callbacks: Iterable[Any], *kinds: str) -> list[Any]:
    """Return the callbacks that are, or extend, any of these classes of Lightning's callbacks."""
    ends = tuple(f".callbacks.{kind}" for kind in kinds)
    return [each for each in callbacks if any(name.endswith(ends) for name in names_of(type(each)))]


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
