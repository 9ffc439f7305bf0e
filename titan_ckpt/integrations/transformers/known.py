"""The classes and arguments of transformers, TRL and PEFT, each with what a resumed run makes of it.

"" stands for what tests/integrations/test_trainer_classes.py has killed and resumed bit for bit; anything else is the
reason why it is refused and the next step. A test fails if the installed libraries have a name that is not here, and a
run that uses such a name is refused. Owns also what else of a Trainer cannot be checkpointed.
"""

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
from titan_ckpt.components.classes import defines, exact, is_own_kind
from titan_ckpt.components.known import peft_adapters
from titan_ckpt.components.unsaved_state import fault_of, faults, function_faults
from titan_ckpt.components.watched import Watch
from titan_ckpt.config import CheckpointConfig
from titan_ckpt.errors import listed
from titan_ckpt.integrations.accelerate.known import accelerator_faults
from titan_ckpt.integrations.transformers.adapter import saves_adapter_alone

_SERVER = "its completions or scores come from a server that no step holds: use {} instead"
_UNPROVED = "its own data loader was not proved to continue exactly after a resume: use GKDTrainer"
_REPORTERS = (
    "TensorBoardCallback WandbCallback TrackioCallback CometCallback AzureMLCallback MLflowCallback DagsHubCallback "
    "NeptuneCallback CodeCarbonCallback ClearMLCallback FlyteCallback DVCLiveCallback SwanLabCallback KubeflowCallback"
)

TRAINERS = exact(
    {
        "transformers": "trainer.Trainer trainer_seq2seq.Seq2SeqTrainer",
        "trl.trainer": "base_trainer._BaseTrainer sft_trainer.SFTTrainer dpo_trainer.DPOTrainer "
        "kto_trainer.KTOTrainer reward_trainer.RewardTrainer grpo_trainer.GRPOTrainer rloo_trainer.RLOOTrainer "
        "distillation_trainer.DistillationTrainer",
        "trl.experimental": "a2po.a2po_trainer.A2POTrainer bema_for_ref_model.dpo_trainer.DPOTrainer "
        "cpo.cpo_trainer.CPOTrainer gkd.gkd_trainer.GKDTrainer gmpo.gmpo_trainer.GMPOTrainer "
        "online_dpo.online_dpo_trainer.OnlineDPOTrainer orpo.orpo_trainer.ORPOTrainer "
        "sdft.sdft_trainer.SDFTTrainer sdpo.sdpo_trainer.SDPOTrainer tpo.tpo_trainer.TPOTrainer",
    }
) | {
    "trl.experimental.kto.KTOTrainer": "it is an old name: use trl.KTOTrainer",
    "trl.experimental.distillation.DistillationTrainer": "it is an old name: use trl.DistillationTrainer",
    "trl.experimental.gold.gold_trainer.GOLDTrainer": _UNPROVED,
    "trl.experimental.iw_opd.iw_opd_trainer.IWOPDTrainer": _UNPROVED,
    "trl.experimental.async_distillation.async_distillation_trainer.AsyncDistillationTrainer": _SERVER.format(
        "DistillationTrainer"
    ),
    "trl.experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer": _SERVER.format("GRPOTrainer"),
    "trl.experimental.server_distillation.server_distillation_trainer.ServerDistillationTrainer": _SERVER.format(
        "DistillationTrainer"
    ),
}
"""Full name of a trainer's class -> "" or the reason."""

CALLBACKS = exact(
    {
        "transformers.trainer_callback": "TrainerCallback DefaultFlowCallback ProgressCallback PrinterCallback "
        "EarlyStoppingCallback",
        "transformers": "utils.notebook.NotebookProgressCallback",
        "transformers.integrations.integration_utils": _REPORTERS,
        "trl.trainer.callbacks": "SyncRefModelCallback RichProgressCallback BEMACallback LogCompletionsCallback "
        "WeaveCallback",
        "trl.experimental": "bema_for_ref_model.callback.BEMACallback sdft.teacher_sync.SyncTeacherModelCallback "
        "sdft.teacher_sync.PEFTAdapterEMACallback sdpo.teacher_sync.SyncTeacherModelCallback "
        "sdpo.teacher_sync.PEFTAdapterEMACallback",
    }
) | {
    "transformers.trainer_jit_checkpoint.JITCheckpointCallback": "it writes checkpoints of its own: leave it out; "
    "checkpoint.stop saves when a signal comes",
    "trl.experimental.merge_model_callback.MergeModelCallback": "it reads the folders that the Trainer would save: "
    "leave it out, and merge the folders of checkpoint.export",
    **{
        f"trl.experimental.{trainer}.{trainer}_trainer.{name}Callback": "it is a part of a trainer that is refused"
        for trainer in ("async_distillation", "async_grpo")
        for name in ("StepInterval", "_OptimizerTime", "_TrainBegin", "_EpochStop")
    },
    "peft.tuners.adamss.asa_callback.AdamssAsaCallback": "it keeps scores in the adapter that no step holds: train "
    "without use_asa",
}
"""Full name of a callback's class -> "" or the reason. Those that only report to a service count as exact."""

KEPT = {"trl.trainer.callbacks.LogCompletionsCallback": ("table", "_last_logged_step")}
"""Full name of a callback's class -> its attributes that training changes, if it does not say them itself."""

_LEAVE_OUT = "leave it out"
REFUSED_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "save_strategy": (
        "no",
        'the Trainer would save too: set save_strategy="no"; checkpoint.save.interval says when titan_ckpt saves',
    ),
    "load_best_model_at_end": (False, f"{_LEAVE_OUT}; checkpoint.save.keep.best keeps the best steps"),
    "auto_find_batch_size": (False, "a resumed run would read different batches: set per_device_train_batch_size"),
    "enable_jit_checkpoint": (False, f"{_LEAVE_OUT}; checkpoint.stop saves when a signal comes"),
    "ignore_data_skip": (False, f"a resumed run would read batches again: {_LEAVE_OUT}"),
}
"""Field of TrainingArguments -> the only value that works, and why another does not, with the next step."""

ARGUMENTS = frozenset(
    {
        "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1",
        "adam_beta2", "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps",
        "average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval",
        "fp16_full_eval", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache", "neftune_noise_alpha",
        "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
        "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
        "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
        "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
        "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
        "include_for_metrics", "batch_eval_metrics", "save_only_model", "save_steps", "save_on_each_node",
        "save_total_limit", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
        "hub_always_push", "hub_revision", "metric_for_best_model", "greater_is_better",
        "restore_callback_states_from_checkpoint", "full_determinism", "seed", "data_seed", "use_cpu",
        "accelerator_config", "parallelism_config", "dataloader_drop_last", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "label_names",
        "train_sampling_strategy", "length_column_name", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "deepspeed",
        "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank",
    }
)  # fmt: skip
"""Fields of TrainingArguments with which a resumed run is exact, or which have no influence on what is trained.

deepspeed, fsdp, accelerator_config and parallelism_config are judged by what accelerate makes of them.
"""

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
    own = (c for c in trainer.callback_handler.callbacks if not type(c).__module__.startswith("titan_ckpt."))
    callbacks = [("callback", callback) for callback in own]
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    live = [*models, trainer.optimizer, trainer.lr_scheduler]
    judged = partial(faults, live=live, builds=_BUILDS, begins=_BEGINS, watch=watch)
    held = [("trainer", trainer), *callbacks]
    yield from judged(held, TRAINERS | CALLBACKS, config.allow, gives_state=gives_state)
    kinds = [*filter(is_own_kind, type(trainer).__mro__)]
    if lost := [name for name in _NEVER_CALLED if any(name in vars(kind) for kind in kinds)]:
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
