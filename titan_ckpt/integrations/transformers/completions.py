"""The completions that TRL's trainers generate once and use for several steps, as part of a rank's progress.

Owns what a save holds of them between two generations: the completions, how often they were used, and what trainers
adapt or estimate from them, such as GRPOTrainer's coefficient. A save where the next step
generates anew holds no completion.
Source: trl 1.16, trainer/grpo_trainer.py `_prepare_inputs`, which rloo_trainer.py and distillation_trainer.py share.
"""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import send_to_device

from titan_ckpt.encoding.typed_json import MAX_BYTES, MAX_INLINE_BYTES
from titan_ckpt.geometry.nested import tensors_in

_log = logging.getLogger(__name__)

_COUNTERS = ("_step", "_buffer_step")
_COEFFICIENTS = (
    "entropy_coef", "_last_world_entropy", "_optimal_values",
    "_buffered_on_policy", "_buffered_on_policy_flags", "_buffered_text_logs",
)  # fmt: skip


def state_of(trainer: Any) -> dict[str, Any] | None:
    """Return what a rank holds between two generations; None for a trainer that generates nothing."""
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


def restore(trainer: Any, stored: dict[str, Any]) -> None:
    """Give the trainer what `state_of` has returned."""
    for counter in (name for name in _COUNTERS if hasattr(trainer, name)):
        setattr(trainer, counter, stored["number"])
        trainer._buffered_inputs = send_to_device(stored["held"], trainer.accelerator.device)  # noqa: SLF001 - as above
    for name, value in stored["coefficients"].items():
        setattr(trainer, name, value)
