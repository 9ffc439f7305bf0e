"""The classes and arguments of transformers, TRL and PEFT, each with what a resumed run makes of it.

"" stands for what tests/integrations/test_trainer_classes.py has killed and resumed bit for bit; anything else is the
reason why it is refused and the next step. A test fails if the installed libraries have a name that is not here, and a
run that uses such a name is refused.
"""

from __future__ import annotations

from typing import Any

from titan_ckpt.components.classes import exact

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
    "auto_find_batch_size": (
        False,
        "a resumed run would read different batches: set per_device_train_batch_size",
    ),
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
