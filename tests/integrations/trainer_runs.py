"""Runs of transformers' Trainer and TRL's SFTTrainer for the tests, as their documentation writes them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.tensor import DTensor
from transformers import (
    DistributedConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from tests.integrations.phases import join, leave_behind
from titan_ckpt import CheckpointConfig, ExportConfig, SaveConfig
from titan_ckpt.errors import BaseMismatchError
from titan_ckpt.integrations.transformers import attach

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


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
            self.act()

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LeaveBehind(KillAfter):
    """Leaves behind what a kill would leave, and goes on."""

    def act(self) -> None:
        leave_behind(self.saved.parents[1])


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


def kill_after(
    step: int | None, folder: Path, interval: int, kind: type[KillAfter] = KillAfter
) -> list[TrainerCallback]:
    """Return a callback that kills the run, after the newest save before the step; none without a step."""
    if step is None:
        return []
    return [kind(step, folder / "checkpoints" / f"step-{(step - 1) // interval * interval}")]


def run(folder: str, interval: int) -> None:
    """Train with transformers' Trainer and write the result."""
    path, data = Path(folder), Tokens(18)
    trainer = Trainer(model(), TrainingArguments(**arguments(path)), train_dataset=data, eval_dataset=Tokens(4))
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=interval)))
    trainer.train()
    write(path, trainer, data.num_read)


def run_summed(folder: str, interval: int, killed_at: int | None) -> None:
    """Train on three ranks, which round sums by the order in which DDP exchanges them."""
    path, data, callbacks = Path(folder), Tokens(54), kill_after(killed_at, Path(folder), interval)
    args = TrainingArguments(**arguments(path, ddp_find_unused_parameters=False, eval_strategy="no"))
    trainer = Trainer(model(), args, train_dataset=data, callbacks=callbacks)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=interval)))
    trainer.train()
    write(path, trainer, data.num_read)


def run_export(folder: str) -> None:
    """Export with a tokenizer and generation settings that were changed after they were read from a folder."""
    path, network = Path(folder), model()
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=words, unk_token="<unk>").save_pretrained(path / "base")
    tokenizer = kind.from_pretrained(path / "base")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<unk>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    network.generation_config.max_new_tokens = 7
    args = TrainingArguments(**arguments(path, max_steps=1, eval_strategy="no"))
    trainer = Trainer(network, args, train_dataset=Tokens(4), processing_class=tokenizer)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=9), export=(ExportConfig("hf"),)))
    trainer.train()
    opened = kind.from_pretrained(path / "exports" / "step-1")
    assert opened.encode("a<|im_end|>") == [1, 3]
    assert (opened.eos_token, opened.chat_template) == ("<|im_end|>", tokenizer.chat_template)
    settings: Any = GenerationConfig.from_pretrained(path / "exports" / "step-1")
    assert (settings.max_new_tokens, settings.eos_token_id) == (7, network.generation_config.eos_token_id)


def run_signal(folder: str) -> None:
    """Stop a run by SIGTERM within its fourth step."""
    path = Path(folder)
    data, args = Tokens(18), TrainingArguments(**arguments(path))
    trainer = Trainer(model(), args, train_dataset=data, eval_dataset=Tokens(4), callbacks=[Signal()])
    checkpoint = attach(trainer, CheckpointConfig(save=SaveConfig(interval=100)))
    trainer.train()
    assert checkpoint.stopped == "SIGTERM to rank 0"
    assert checkpoint.manager.completed.saved == trainer.state.global_step < 10


class Signal(TrainerCallback):
    """Sends SIGTERM to this process, and lets steps take as long as it takes to be noticed."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step >= 3:
            time.sleep(0.5)


def run_other_base(folder: str) -> None:
    """Train an adapter for a step, and again over a base with one different number."""
    for changed in (False, True):
        base = model()
        if changed:
            base.model.norm.weight.data[0] += 1
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        args = TrainingArguments(**arguments(Path(folder), max_steps=1 + changed, eval_strategy="no"))
        trainer = Trainer(adapted, args, train_dataset=Tokens(8))
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=1)))
        with pytest.raises(BaseMismatchError, match="another base") if changed else nullcontext():
            trainer.train()


def write(folder: Path, trainer: Trainer, num_read: int) -> None:
    """Write the weights, the log and the number of samples that were read, of this rank."""
    timings = ("runtime", "per_second", "step_time", "train_loss")
    logs = [{k: v for k, v in e.items() if not any(t in k for t in timings)} for e in trainer.state.log_history]
    model: Any = trainer.model
    shards = model.state_dict()
    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in shards.items()}
    is_sharded = any(isinstance(v, DTensor) for v in shards.values())
    result = {"weights": weights, "logs": logs, "num_read": num_read, "is_sharded": is_sharded}
    torch.save(result, folder / f"result-{os.environ.get('RANK', 0)}.pt")


def run_lora(folder: str, interval: int, killed_at: int | None) -> None:
    """Train a LoRA adapter of PEFT on texts with TRL's SFTTrainer, sharded by accelerate's FSDP2."""
    path = Path(folder)
    texts = [" ".join(f"w{(number * step) % 29}" for step in range(1, 9)) for number in range(18)]
    data = Dataset.from_dict({"text": texts})
    with fsdp2_on_a_cpu():
        sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
        trainer = SFTTrainer(
            model(),
            SFTConfig(**arguments(path, max_length=16, bf16=False, gradient_checkpointing=False, **sharded)),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
            callbacks=kill_after(killed_at, path, interval),
        )
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=interval)))
        trainer.train()
        write(path, trainer, 0)


def number_of_words(completions: list[str], **_: Any) -> list[float | None]:
    """Return a reward for each completion."""
    return [float(len(set(text.split()))) for text in completions]


def run_parallel(folder: str, interval: int, killed_at: int | None) -> None:
    """Train on four ranks with FSDP2 over tensor parallelism, in which transformers loads a model."""
    path, data = Path(folder), Tokens(18)
    join()
    torch.manual_seed(0)
    one_layer = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 1}))
    one_layer.save_pretrained(base := path / "base")  # rank 0 alone writes
    torch.distributed.barrier()
    layout = DistributedConfig(tp_size=2, fsdp_size=2)
    network = LlamaForCausalLM.from_pretrained(base, distributed_config=layout, attention_dropout=0.1)
    settings = arguments(path, gradient_accumulation_steps=1, max_steps=3, eval_strategy="no")
    # accelerate knows tensor parallelism on accelerators alone, and does nothing for it that needs one
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        args, callbacks = TrainingArguments(**settings), kill_after(killed_at, path, interval)
        trainer = Trainer(network, args, train_dataset=data, callbacks=callbacks)
    attach(trainer, CheckpointConfig(save=SaveConfig(interval=interval)))
    trainer.train()
    write(path, trainer, data.num_read)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 32 words."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    bare = Tokenizer(WordLevel(words, unk_token="<pad>"))
    bare.pre_tokenizer = WhitespaceSplit()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>")  # type: ignore[no-any-return]


@contextmanager
def fsdp2_on_a_cpu() -> Iterator[None]:
    """Let accelerate shard on CPUs, which its state allows for accelerators alone; its sharding itself needs none."""
    build = AcceleratorState.__init__

    def built(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        first = "distributed_type" not in AcceleratorState._shared_state
        build(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if first and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", built):
        yield
