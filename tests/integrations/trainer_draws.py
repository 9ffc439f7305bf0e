"""Runs of transformers' Trainer whose arguments, data and model a seed has drawn."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.integrations.draws import Record, digest, random_state
from tests.integrations.loader_cases import Stream
from tests.integrations.trainer_runs import Tokens, model, tokenizer
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.integrations.transformers import attach

RECORDS: list[Record] = []


def note(step: int, **values: Any) -> None:
    RECORDS[0].add(step, **values)


class Recording(TrainerCallback):
    """Writes down each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        note(
            state.global_step,
            weights=digest(given["model"].state_dict()),
            optimizer=digest(given["optimizer"].state_dict()),
            rates=[group["lr"] for group in given["optimizer"].param_groups],
            drawn=random_state(),
            epoch=state.epoch,
        )


def table(samples: int) -> Dataset:
    """Return rows of several lengths."""
    draw = random.Random(samples)
    rows = [[draw.randint(2, 31) for _ in range(draw.randint(3, 9))] for _ in range(samples)]
    return Dataset.from_dict({"input_ids": rows, "length": [len(row) for row in rows]})


def masked(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [0 if random.random() < 0.2 else number for number in row["input_ids"]]}


DATA: dict[str, Callable[[int], Any]] = {
    "tokens": Tokens,
    "a table": table,
    "a table with a transform": lambda samples: table(samples).with_transform(
        lambda rows: {"input_ids": [masked({"input_ids": row})["input_ids"] for row in rows["input_ids"]]}
    ),
    "a stream of one's own": lambda samples: Stream(Tokens(samples)),
    "a stream": lambda samples: table(samples).to_iterable_dataset(1),
    "a stream of four shards": lambda samples: table(samples).to_iterable_dataset(4),
    "a mapped stream": lambda samples: table(samples).to_iterable_dataset(2).map(masked),
    "a shuffled stream": lambda samples: table(samples).to_iterable_dataset(2).shuffle(7, buffer_size=4),
}


def drawn(number: int) -> dict[str, Any]:
    """Return the case of a seed."""
    draw = random.Random(2000 + number)

    def rarely(chance: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < chance else otherwise

    data = draw.choice([*DATA])
    streamed = "stream" in data
    workers = rarely(0.2, 1, 2, otherwise=0)
    evaluates = draw.choice(["no", "steps", "epoch"])
    limit = (
        {"max_steps": draw.randint(5, 10)}
        if streamed or draw.random() < 0.5
        else {"num_train_epochs": draw.choice([2, 3, 2.5])}
    )
    accelerator = {
        "split_batches": rarely(0.2, True), "dispatch_batches": False if streamed else rarely(0.3, False, True),
        "use_seedable_sampler": rarely(0.4, False),
        "non_blocking": rarely(0.2, True),
    }  # fmt: skip
    arguments = {
        **limit,
        "per_device_train_batch_size": draw.randint(1, 3),
        "gradient_accumulation_steps": draw.choice([1, 1, 2, 3]),
        "dataloader_drop_last": rarely(0.3, True),
        "dataloader_num_workers": workers or None,
        "dataloader_persistent_workers": rarely(0.4, True) if workers else None,
        "dataloader_prefetch_factor": rarely(0.3, 1, 3) if workers else None,
        "dataloader_pin_memory": rarely(0.2, False),
        "train_sampling_strategy": None if streamed else rarely(0.6, "sequential", "group_by_length", "random"),
        "eval_strategy": evaluates,
        "eval_steps": draw.choice([1, 2, 3]) if evaluates == "steps" else None,
        "eval_on_start": rarely(0.2, True) if evaluates != "no" else None,
        "eval_delay": rarely(0.2, 2) if evaluates != "no" else None,
        "eval_accumulation_steps": rarely(0.2, 1),
        "batch_eval_metrics": rarely(0.1, True),
        "prediction_loss_only": rarely(0.2, True),
        "logging_steps": draw.choice([1, 2, 3]),
        "logging_strategy": None if streamed else rarely(0.2, "epoch"),
        "logging_first_step": rarely(0.3, True),
        "logging_nan_inf_filter": rarely(0.2, False),
        "include_num_input_tokens_seen": rarely(0.2, "all", "non_padding"),
        "average_tokens_across_devices": rarely(0.3, False),
        "lr_scheduler_type": rarely(
            0.6,
            "cosine",
            "polynomial",
            "constant_with_warmup",
            "inverse_sqrt",
            "cosine_with_restarts",
            "reduce_lr_on_plateau",
        ),
        "warmup_steps": rarely(0.4, 2, 0.3),
        "optim": rarely(
            0.5,
            "adafactor",
            "sgd",
            "adagrad",
            "rmsprop",
            "adamw_torch",
            "adamw_torch_fused",
            "schedule_free_adamw",
        ),
        "max_grad_norm": rarely(0.3, 0.1, 0.0),
        "weight_decay": rarely(0.3, 0.1),
        "label_smoothing_factor": rarely(0.2, 0.1),
        "neftune_noise_alpha": rarely(0.2, 5.0),
        "bf16": rarely(0.2, True),
        "gradient_checkpointing": rarely(0.2, True),
        "seed": draw.randint(0, 99),
        "data_seed": rarely(0.3, 5),
        "full_determinism": rarely(0.05, True),
        "torch_empty_cache_steps": rarely(0.1, 2),
        "disable_tqdm": rarely(0.1, False, otherwise=True),
        "remove_unused_columns": rarely(0.2, False) if data == "tokens" else None,
        "ddp_find_unused_parameters": rarely(0.2, False, True),
        "ddp_broadcast_buffers": rarely(0.2, True),
        "ddp_bucket_cap_mb": rarely(0.2, 1),
        "accelerator_config": {name: value for name, value in accelerator.items() if value is not None},
        "auto_find_batch_size": rarely(0.03, True),
        "restore_callback_states_from_checkpoint": rarely(0.1, True),
    }
    return {
        "data": data,
        "samples": draw.randint(9, 22),
        "collator": "words" if data not in ("tokens", "a stream of one's own") else rarely(0.2, "words"),
        "mlm": draw.random() < 0.5,
        "adapter": draw.random() < 0.2,
        "stops early": evaluates != "no" and draw.random() < 0.2,
        "interval": draw.choice([1, 1, 2, 3]),
        "arguments": {name: value for name, value in arguments.items() if value is not None},
        "kills": [(draw.randint(1, 5), draw.choice([0, draw.random() * 80])) for _ in range(draw.choice([1, 2]))],
    }


def metrics(predicted: Any, compute_result: bool = True) -> dict[str, float]:
    return {"sum": float(predicted.predictions.mean())}


def run(folder: str, case: dict[str, Any], kill: tuple[int, float] | None) -> None:
    """Train; write each step, or the error that ends the run."""
    rank, path = int(os.environ.get("RANK", "0")), Path(folder)
    RECORDS[:] = [Record(path, rank, kill)]
    try:
        train(path, case, rank)
    except Exception as error:
        (path / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    (path / f"done-{rank}").touch()


def train(path: Path, case: dict[str, Any], rank: int) -> None:
    given = case["arguments"]
    network: Any = model()
    if case["adapter"]:
        network = get_peft_model(network, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    args = TrainingArguments(
        output_dir=str(path), use_cpu=True, save_strategy="no", report_to="none", learning_rate=1e-2, **given
    )
    collator = None
    if case["collator"]:
        words = tokenizer()
        words.mask_token = "w1"
        collator = DataCollatorForLanguageModeling(words, mlm=case["mlm"])
    callbacks: list[Any] = [Recording()]
    if case["stops early"]:
        args.metric_for_best_model, args.greater_is_better = "loss", False
        callbacks.append(EarlyStoppingCallback(2))
    data = DATA[case["data"]](case["samples"])
    more: dict[str, Any] = {"compute_metrics": metrics} if given.get("batch_eval_metrics") else {}
    trainer = Trainer(
        network,
        args,
        train_dataset=data,
        eval_dataset=Tokens(4) if collator is None else table(5),
        data_collator=collator,
        callbacks=callbacks,
        **more,
    )
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=case["interval"])))
    trainer.train()
    timings = ("runtime", "per_second", "step_time", "train_loss")
    logs = [{k: v for k, v in e.items() if not any(t in k for t in timings)} for e in trainer.state.log_history]
    RECORDS[0].add(
        1 << 20, logs=logs, state=[trainer.state.best_metric, trainer.state.num_input_tokens_seen], drawn=random_state()
    )
