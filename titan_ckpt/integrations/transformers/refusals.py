"""Settings of a Trainer that cannot be checkpointed exactly, each with its reason and the next step."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState

from titan_ckpt.components import classes
from titan_ckpt.components.classes import defines, is_own_kind
from titan_ckpt.components.known import peft_adapters
from titan_ckpt.components.unsaved_state import fault_of, faults, function_faults
from titan_ckpt.components.watched import Watch
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import listed
from titan_ckpt.integrations.accelerate.known import accelerator_faults
from titan_ckpt.integrations.transformers.adapter import saves_adapter_alone
from titan_ckpt.integrations.transformers.known import ARGUMENTS, CALLBACKS, REFUSED_ARGUMENTS, TRAINERS

HOOKS = (
    "_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_save_checkpoint",
    "_evaluate", "_finalize_training",
)  # fmt: skip
"""Methods of Trainer that an attached one extends."""

GIVEN = frozenset(
    {
        "args", "callbacks", "compute_loss_func", "compute_metrics", "data_collator", "eval_dataset", "model",
        "model_init", "optimizer_cls_and_kwargs", "optimizers", "preprocess_logits_for_metrics", "processing_class",
        "train_dataset",
    }
)  # fmt: skip
"""Arguments of a Trainer itself."""
_NEVER_CALLED = (
    "_load_rng_state", "_push_from_checkpoint", "_save_checkpoint", "_save_optimizer_and_scheduler",
    "_save_rng_state", "_save_scaler",
)  # fmt: skip
"""Methods of Trainer that an attached one does not call."""
_UNKNOWN = "this version of titan_ckpt does not know the argument: leave it out"
_BUILDS = (
    "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "get_train_dataloader", "on_init_end",
    "on_train_end", "train",
)  # fmt: skip
_BEGINS = ("on_train_begin",)
"""Methods that every start calls: before its load or after its last step, and after its load."""


def problems(trainer: Trainer, config: CheckpointConfig, *, has_adapter: bool) -> Iterator[str]:
    """Yield one line for each setting of the trainer that does not work with titan_ckpt."""
    if lacking := [name for name in HOOKS if not hasattr(trainer, name)]:
        yield (
            f"transformers {transformers.__version__}: its Trainer has no {', '.join(lacking)}: install a version that "
            'pip install "titan-ckpt[transformers]" allows'
        )
    yield from accelerator_faults(trainer.accelerator)
    yield from _of_the_arguments(trainer.args, config.allow)
    for name in inspect.signature(Trainer.__init__).parameters.keys() - GIVEN - {"self"}:
        if getattr(trainer, name, None) is not None:
            yield f"{name}: {_UNKNOWN}"
    if has_adapter and config.export:
        yield (
            "checkpoint.export: PEFT itself writes the adapter of a PEFT model: leave the exports out, and call "
            "trainer.save_model() after trainer.train()"
        )


def _of_the_arguments(args: Any, allow: Collection[str]) -> Iterator[str]:
    for name, (works, reason) in REFUSED_ARGUMENTS.items():
        if (value := getattr(args, name, works)) != works:
            yield f"{name} is {getattr(value, 'value', value)!r}: {reason}"
    known = ARGUMENTS | REFUSED_ARGUMENTS.keys()
    for field in fields(TrainingArguments):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in known and getattr(args, field.name, default) != default:
            yield f"{field.name}: {_UNKNOWN}"
    if getattr(args, "use_vllm", False) and "vllm" not in allow:
        yield (
            "use_vllm: no step holds the random state of vLLM: leave it out, or allow that a resumed run samples other "
            'completions: checkpoint.allow = ["vllm"]'
        )
    if args.n_gpu > 1:
        yield f"nn.DataParallel over {args.n_gpu} GPUs: start one process for each, with torchrun or accelerate launch"
    if args.accelerator_config.dispatch_batches:
        yield "accelerator_config.dispatch_batches: rank 0 would read ahead for all: set it to False"


def unsaved(trainer: Any, config: CheckpointConfig, watch: Watch | None = None) -> Iterator[str]:
    """Yield one line for each object of the trainer whose state a resumed run would lose.

    `watch`: notes what the objects hold now, when the training has begun.
    """
    callbacks = [("callback", callback) for callback in trainer.callback_handler.callbacks]
    callbacks = [
        (role, callback) for role, callback in callbacks if not type(callback).__module__.startswith("titan_ckpt.")
    ]
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    live = [*models, trainer.optimizer, trainer.lr_scheduler]
    judged = partial(faults, live=live, builds=_BUILDS, begins=_BEGINS, watch=watch)
    held = [("trainer", trainer), *callbacks]
    yield from judged(held, TRAINERS | CALLBACKS, config.allow, gives_state=gives_state)
    own = [vars(kind) for kind in type(trainer).__mro__ if is_own_kind(kind)]
    if lost := [name for name in _NEVER_CALLED if any(name in methods for methods in own)]:
        reason = (
            f"titan_ckpt makes the steps, and never calls its {listed(lost, ', ', ' ')}: keep state in state_dict()"
        )
        yield from fault_of("trainer", trainer, reason, config.allow)
    yield from peft_adapters.faults(models, [], config.allow)
    names = ["compute_loss_func", "data_collator", "preprocess_logits_for_metrics"]
    if not trainer.args.batch_eval_metrics:  # with it, compute_metrics sums up one evaluation, and begins anew
        names.append("compute_metrics")
    functions = [(name, getattr(trainer, name, None)) for name in names]
    functions += [("reward function", function) for function in getattr(trainer, "reward_funcs", None) or []]
    functions += [("tool", tool) for tool in getattr(trainer, "tools", None) or []]
    functions.append(("rollout_func", getattr(trainer, "rollout_func", None)))
    yield from function_faults(functions, config.allow, live=live, others=[trainer], watch=watch or Watch())
    if getattr(trainer.data_collator, "seed", None) is not None:
        yield "data_collator: its seed gives it random numbers of its own, which no step holds: leave the seed out"
    if saves_adapter_alone(trainer.model, config):
        moves_base = any(getattr(callback, "update_ref_model", False) for _, callback in callbacks)
        changes = ["callback BEMACallback: update_ref_model"] if moves_base else []
        changes += ["use_vllm: each merge and unmerge"] if getattr(trainer.args, "use_vllm", False) else []
        for change in changes:
            yield f"{change} changes the base of the adapter, which no step holds: SaveConfig(include_base=True)"


def gives_state(value: Any) -> bool:
    """Return whether an object's own class, and not one of a library, returns its state and takes it back."""
    return defines(value, ["state"]) if isinstance(value, ExportableState) else classes.gives_state(value)
