"""Runs of transformers' Trainer and TRL's SFTTrainer for the tests: as their documentation writes them, and one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.integrations.transformers import attach

SHAPE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens that count how often one is read, and draw from the process's random state."""

    def __init__(self, number: int) -> None:
        self.ids = torch.randint(0, 32, (number, 8), generator=torch.Generator().manual_seed(1))
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_read += 1
        ids = torch.where(torch.rand(8) < 0.2, 0, self.ids[index])  # as a collator that masks tokens does
        return {"input_ids": ids, "labels": ids}


class KillAfter(TrainerCallback):
    """Ends the process by SIGKILL after a step, when the save of an earlier one is committed."""

    def __init__(self, step: int, saved: Path) -> None:
        self.step, self.saved = step, saved

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            while not self.saved.is_dir():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return TrainingArguments of a short run on a CPU."""
    return {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }


def model() -> LlamaForCausalLM:
    """Return a tiny model with dropout, so that its random numbers count."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.1))


def kill_after(step: int | None, folder: Path, interval: int) -> list[TrainerCallback]:
    """Return a callback that kills the run, after the newest save before the step; none without a step."""
    if step is None:
        return []
    return [KillAfter(step, folder / "checkpoints" / f"step-{(step - 1) // interval * interval}")]


def run(folder: str, killed_at: int | None) -> None:
    """Train with transformers' Trainer and write the result."""
    path, data = Path(folder), Tokens(18)
    args, callbacks = TrainingArguments(**arguments(path)), kill_after(killed_at, path, 3)
    trainer = Trainer(model(), args, train_dataset=data, eval_dataset=Tokens(4), callbacks=callbacks)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=3)))
    trainer.train()
    write(path, trainer, data.num_read)


def write(folder: Path, trainer: Trainer, num_read: int) -> None:
    """Write the weights, the log and the number of samples that were read, of this rank."""
    timings = ("runtime", "per_second", "train_loss")
    logs = [{k: v for k, v in e.items() if not any(t in k for t in timings)} for e in trainer.state.log_history]
    weights = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in trainer.model.state_dict().items()}
    result = {"weights": weights, "logs": logs, "epoch": trainer.state.epoch, "num_read": num_read}
    torch.save(result, folder / f"result-{os.environ.get('RANK', 0)}.pt")
