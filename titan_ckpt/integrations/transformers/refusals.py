"""Settings of a Trainer that cannot be checkpointed exactly, each with its reason and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import Trainer

from titan_ckpt.config import CheckpointConfig

_HOOKS = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_save_checkpoint")
"""Methods of Trainer that an attached one extends."""


def problems(trainer: Trainer, config: CheckpointConfig, *, has_adapter: bool) -> Iterator[str]:
    """Yield one line for each setting of the trainer that does not work with titan_ckpt."""
    if lacking := [name for name in _HOOKS if not hasattr(trainer, name)]:
        yield (
            f"transformers {transformers.__version__}: its Trainer has no {', '.join(lacking)}: install a version that "
            'pip install "titan-ckpt[transformers]" allows'
        )
    yield from _of_the_strategy(trainer)
    yield from _of_the_arguments(trainer.args)
    if has_adapter and config.export:
        yield (
            "checkpoint.export: PEFT itself writes the adapter of a PEFT model: leave the exports out, and call "
            "trainer.save_model() after trainer.train()"
        )


def _of_the_strategy(trainer: Any) -> Iterator[str]:
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        yield (
            "DeepSpeed: its engine keeps weights and optimizer state in partitions of its own: use FSDP2 "
            '(fsdp=True, fsdp_config={"version": 2}), or DeepSpeed\'s own checkpoints'
        )
    elif trainer.is_fsdp_enabled and state.fsdp_plugin.fsdp_version == 1:
        yield (
            "FSDP1: it flattens parameters, so none of them has a shard with a name: use FSDP2, "
            'fsdp_config={"version": 2}, or fsdp_version: 2 in the file of accelerate'
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False) or state.distributed_type.value in {"XLA", "MEGATRON_LM"}:
        yield f"{state.distributed_type.value}: only DDP, FSDP2 and a single process are supported"


def _of_the_arguments(args: Any) -> Iterator[str]:
    if args.save_strategy != "no":
        yield (
            f'save_strategy is "{args.save_strategy.value}", so the Trainer would write checkpoints of its own too: '
            'set save_strategy="no"; checkpoint.save.interval says when titan_ckpt saves'
        )
    if args.load_best_model_at_end:
        yield "load_best_model_at_end: leave it out; checkpoint.save.keep.best keeps the best steps"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size: a resumed run would read different batches: set per_device_train_batch_size"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint: leave it out; checkpoint.stop saves when a signal comes"
    if args.n_gpu > 1:
        yield f"nn.DataParallel over {args.n_gpu} GPUs: start one process for each, with torchrun or accelerate launch"
    if args.accelerator_config.dispatch_batches:
        yield "accelerator_config.dispatch_batches: rank 0 would read ahead for all: leave it out"
