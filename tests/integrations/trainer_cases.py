"""A tiny run of every trainer, callback and argument of transformers, TRL and PEFT that is said to resume exactly."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    EarlyStoppingCallback,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SchedulerType
from trl import (
    BEMACallback,
    LogCompletionsCallback,
    RichProgressCallback,
)
from trl.experimental.bema_for_ref_model.callback import BEMACallback as ReferenceCallback

from tests.integrations.phases import Phase, play_together
from tests.integrations.trainer_runs import (
    SHAPE,
    LeaveBehind,
    Tokens,
    arguments,
    kill_after,
    model,
    number_of_words,
    tokenizer,
    write,
)
from tests.zoo.worlds import Row
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.transformers import attach

INTERVAL, KILLED_AT = 3, 5
"""The resumed run goes on from step 3, which is between two logs and within an epoch."""

Case = Callable[[Path], Trainer]
GIVEN = ("model_init", "compute_loss_func", "compute_metrics")
"""Arguments of a Trainer itself."""


def settings(folder: Path, **own: Any) -> dict[str, Any]:
    """Return arguments of a run of seven steps in two epochs."""
    return arguments(folder, max_steps=7, **{"eval_strategy": "no", **own})


def plain(
    folder: Path, *, callbacks: Any = (), kind: type[Any] = Trainer, data: Callable[[], Any] | None = None, **own: Any
) -> Trainer:
    """Return a Trainer."""
    made = [callback() if isinstance(callback, type | partial) else callback for callback in callbacks]
    given = {name: own.pop(name) for name in GIVEN if name in own}
    network = None if "model_init" in given else own.pop("network", model)()
    samples = Tokens(18) if data is None else data()
    arguments_of = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    args = arguments_of(**settings(folder, **{"metric_for_best_model": "loss", **own}))
    trainer: Trainer = kind(network, args, train_dataset=samples, eval_dataset=Tokens(4), callbacks=made, **given)
    return trainer


def texts() -> dict[str, list[dict[str, Any]]]:
    """Return the kinds of data that trainers of TRL take."""
    rows = [(f"w{n} w1 w2", f" w{n % 7} w3", f" w{n % 5} w4 w5") for n in range(18)]
    said = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b, _ in rows]
    return {
        "text": [{"text": a + b} for a, b, _ in rows],
        "messages": [{"messages": each} for each in said],
        "prompt": [{"prompt": a} for a, _, _ in rows],
        "pair": [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in rows],
        "triple": [{"prompt": a, "chosen": b, "rejected": c, "reference": b} for a, b, c in rows],
        "implicit": [{"chosen": a + b, "rejected": a + c} for a, b, c in rows],
        "labelled": [{"prompt": a, "completion": b, "label": n % 2 == 0} for n, (a, b, _) in enumerate(rows)],
        "demonstration": [{"prompt": a, "privileged_context": b} for a, b, _ in rows],
    }


def of_trl(
    folder: Path, name: str, data: str, given: Mapping[str, Callable[[], Any]] | None = None, callbacks: Any = (),
    adapter: bool = False, named: bool = False, **own: Any,
) -> Trainer:  # fmt: skip
    """Return a trainer of TRL, by its full name. `named`: its model comes from a folder, whose name it asks for."""
    module = import_module(name.rpartition(".")[0])
    kind = getattr(module, name.rpartition(".")[2])
    config = config_of(kind)
    fields = {field.name for field in dataclasses.fields(config)}
    usual = {"bf16": False, "gradient_checkpointing": False, "max_length": 16, "max_completion_length": 4}
    values = settings(folder, **{key: value for key, value in usual.items() if key in fields} | own)
    made = {key: make() for key, make in (given or {}).items()}
    network = made.pop("model", None) or (from_folder(folder) if named else model())
    rows = Dataset.from_list(texts()[data])
    if adapter:
        made["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    trainer: Trainer = kind(
        model=network, args=config(**values), train_dataset=rows, eval_dataset=rows.select(range(4)),
        processing_class=words, **made,
    )  # fmt: skip
    for callback in callbacks:
        trainer.add_callback(callback(trainer))
    return trainer


def from_folder(folder: Path) -> LlamaForCausalLM:
    """Return the model as it is read from a folder that has a tokenizer, too."""
    model().save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    return LlamaForCausalLM.from_pretrained(folder / "base")


def config_of(kind: type[Any]) -> Any:
    """Return the class of arguments of a trainer of TRL, which is beside it and named after it."""
    owner = next(
        k for k in kind.__mro__ if hasattr(import_module(k.__module__), f"{k.__name__.removesuffix('Trainer')}Config")
    )
    return getattr(import_module(owner.__module__), f"{owner.__name__.removesuffix('Trainer')}Config")


def translator() -> Any:
    """Return an encoder and a decoder with dropout, whose positions are in no folder."""
    torch.manual_seed(0)
    shape: Any = {
        "vocab_size": 32, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 0, "max_position_embeddings": 32,
    }  # fmt: skip
    return MarianMTModel(MarianConfig(**shape))


def reward_model() -> Any:
    """Return a model with one score."""
    torch.manual_seed(0)
    shape: Any = {**SHAPE, "attention_dropout": 0.1, "num_labels": 1, "pad_token_id": 0}
    kind: Any = LlamaForSequenceClassification
    return kind(LlamaConfig(**shape))


REWARD = {"reward_funcs": lambda: number_of_words}
REFERENCE = {"ref_model": model}
TEACHER = {"teacher_model": model}
TOP: dict[str, Any] = {"distillation_topk": 4}
GROUPS: dict[str, Any] = {"num_generations": 2, "steps_per_generation": 4, "num_iterations": 2}
_T, _E = "trl.trainer.", "trl.experimental."
TRAINERS: dict[str, Case] = {
    "transformers.trainer.Trainer": plain,
    "transformers.trainer_seq2seq.Seq2SeqTrainer": partial(plain, kind=Seq2SeqTrainer, network=translator),
    **{
        name: partial(of_trl, name=name, data=data, **more)
        for name, data, more in (
            (f"{_T}sft_trainer.SFTTrainer", "text", {}),
            (f"{_T}dpo_trainer.DPOTrainer", "pair", {"given": REFERENCE}),
            (f"{_T}kto_trainer.KTOTrainer", "labelled", {"given": REFERENCE}),
            (f"{_T}reward_trainer.RewardTrainer", "implicit", {"given": {"model": reward_model}}),
            (f"{_T}grpo_trainer.GRPOTrainer", "prompt", {"given": REWARD, **GROUPS}),
            (f"{_T}rloo_trainer.RLOOTrainer", "prompt", {"given": REWARD, "beta": 0.0, **GROUPS}),
            (f"{_T}distillation_trainer.DistillationTrainer", "prompt", {"given": TEACHER}),
            (f"{_E}a2po.a2po_trainer.A2POTrainer", "prompt", {"given": REWARD}),
            (f"{_E}bema_for_ref_model.dpo_trainer.DPOTrainer", "pair", {"given": REFERENCE}),
            (f"{_E}cpo.cpo_trainer.CPOTrainer", "pair", {}),
            (f"{_E}gkd.gkd_trainer.GKDTrainer", "messages", {"given": TEACHER, "max_new_tokens": 4}),
            (f"{_E}gmpo.gmpo_trainer.GMPOTrainer", "prompt", {"given": REWARD, **GROUPS}),
            (f"{_E}online_dpo.online_dpo_trainer.OnlineDPOTrainer", "prompt", {"given": REWARD | REFERENCE}),
            (f"{_E}orpo.orpo_trainer.ORPOTrainer", "pair", {}),
            (f"{_E}sdft.sdft_trainer.SDFTTrainer", "demonstration", {"named": True, "num_generations": 2, **TOP}),
            (f"{_E}sdpo.sdpo_trainer.SDPOTrainer", "demonstration", {"given": REWARD, "named": True, **GROUPS, **TOP}),
            (f"{_E}tpo.tpo_trainer.TPOTrainer", "triple", {}),
        )
    },
}
"""Full name of a trainer's class -> its run."""

_DPO = partial(of_trl, name=f"{_T}dpo_trainer.DPOTrainer", data="pair", given=REFERENCE)
_EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def greedy(trainer: Trainer) -> LogCompletionsCallback:
    """Return a callback that generates from the prompts of the evaluation, and keeps what it has generated."""
    settings: Any = GenerationConfig
    return LogCompletionsCallback(trainer, settings(max_new_tokens=2, do_sample=True), freq=1)


CALLBACKS: dict[str, Case] = {
    "transformers.trainer_callback.EarlyStoppingCallback": partial(
        plain, callbacks=[partial(EarlyStoppingCallback, 3)], eval_on_start=True, **_EVALUATED
    ),
    "transformers.trainer_callback.ProgressCallback": partial(plain, callbacks=[ProgressCallback]),
    "transformers.trainer_callback.PrinterCallback": partial(plain, callbacks=[PrinterCallback]),
    "trl.trainer.callbacks.SyncRefModelCallback": partial(_DPO, sync_ref_model=True, ref_model_sync_steps=2),
    "trl.trainer.callbacks.RichProgressCallback": partial(plain, callbacks=[RichProgressCallback], **_EVALUATED),
    "trl.trainer.callbacks.LogCompletionsCallback": partial(_DPO, callbacks=[greedy]),
    "trl.trainer.callbacks.BEMACallback": partial(plain, callbacks=[partial(BEMACallback, update_freq=2)]),
    f"{_E}bema_for_ref_model.callback.BEMACallback": partial(
        of_trl,
        name=f"{_E}bema_for_ref_model.dpo_trainer.DPOTrainer",
        data="pair",
        given=REFERENCE,
        callbacks=[lambda _: ReferenceCallback(1, update_ref_model=True, ref_model_update_freq=2)],
    ),
    **{
        f"{_E}{name}.teacher_sync.{kind}": partial(
            of_trl, name=f"{_E}{name}.{name}_trainer.{name.upper()}Trainer", data="demonstration", given=given,
            adapter=adapter, named=True, teacher_sync_steps=2, **more, **TOP,
        )
        for name, given, more in (("sdft", {}, {"num_generations": 2}), ("sdpo", REWARD, GROUPS))
        for kind, adapter in (("SyncTeacherModelCallback", False), ("PEFTAdapterEMACallback", True))
    },
}  # fmt: skip
"""Full name of a callback's class -> a run with it."""


class Averaging(Trainer):
    """A user's trainer, which sums up losses and gives them to a step."""

    mean: Any = 0.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        value = loss[0] if isinstance(loss, tuple) else loss
        self.mean = 0.9 * self.mean + 0.1 * value.detach()
        self.log({"mean": self.mean.item()})
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = state_dict["mean"]


class Weighted(Trainer):
    """A user's trainer that overrides methods and stores nothing but the loss function that it is built with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighted = torch.nn.CrossEntropyLoss(torch.ones(2))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()

    def create_optimizer(self, *args: Any) -> Any:
        return super().create_optimizer(*args)


class Balanced(Trainer):
    """A user's trainer that weighs the words of its loss by tensors and lists that it is built with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights, self.words, self.factors = torch.linspace(0.5, 1.5, 32), [*range(32)], {"all": 0.5}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), self.weights[self.words])
        return loss * self.factors["all"]


class Timed(TrainerCallback):
    """A user's callback, which notes when the training has begun, and shows it."""

    def __init__(self) -> None:
        self.shown = ["loss"]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.time()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        print({name: logs.get(name) for name in self.shown}, time.time() - self.start)


class Counting(TrainerCallback):
    """A user's callback, which multiplies the learning rate by what it has counted."""

    def __init__(self) -> None:
        self.counted = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.counted += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * self.counted


class Exporting(Counting, ExportableState):
    """Gives its state as transformers asks for it."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"counted": self.counted}}


class Giving(Counting):
    """Gives its state as PyTorch does."""

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counted = state_dict["counted"]


class Beginning(Giving):
    """Sets its state anew when the training begins; counts, draws and changes the optimizer when an epoch begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.counted = 0
        optimizer.param_groups[0]["weight_decay"] = 0.1
        torch.rand(1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.counted += 10
        optimizer.param_groups[0]["weight_decay"] *= 2
        torch.rand(3)


class BeginningExported(Beginning, Exporting):
    """Does the same, and gives its state as transformers asks for it."""


class Unfreezing(TrainerCallback):
    """Freezes a layer when the training begins, and trains it from the third step on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.model.layers[0].requires_grad_(False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            model.model.layers[0].requires_grad_(True)


class Drawing(Tokens):
    """Changes tokens by generators of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.place, self.token = random.Random(1), np.random.default_rng(2)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = super().__getitem__(index)["input_ids"]
        ids[self.place.randrange(8)] = int(self.token.integers(32))
        return {"input_ids": ids, "labels": ids}


class Turning(torch.utils.data.Sampler[int]):
    """A user's sampler, which begins elsewhere in each epoch and gives its state."""

    turns = 0

    def __len__(self) -> int:
        return 18

    def __iter__(self) -> Iterator[int]:
        self.turns += 5
        return iter([(number + self.turns) % 18 for number in range(18)])

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turns = state_dict["turns"]


class Sampled(Trainer):
    """A user's trainer with that sampler."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return Turning()


def stream(number: int, shards: int = 3, *, shuffled: bool = False) -> Any:
    """Return sequences that datasets reads one after another, in three pieces, and changes by the batch."""
    rows = Dataset.from_dict({"input_ids": Tokens(number).ids.tolist()}).to_iterable_dataset(num_shards=shards)
    rows = rows.shuffle(7, buffer_size=4) if shuffled else rows
    return rows.map(labelled, batched=True, batch_size=5)


def labelled(some: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its labels: a function that worker processes can be sent, however they are started."""
    return {**some, "labels": some["input_ids"]}


class Looking(TrainerCallback):
    """Looks at the data when the training begins, and within it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        next(iter(train_dataloader))

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self.on_train_begin(args, state, control, train_dataloader)


class Still(Tokens):
    """Sequences that are read without drawing, as the workers of an evaluation may read them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Uneven(Tokens):
    """Sequences each of which draws another number of times, so that ranks draw other numbers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        torch.rand(index)
        return super().__getitem__(index)


class Estimated(torch.utils.data.BatchSampler):
    """Says that there are fewer batches than there are."""

    def __len__(self) -> int:
        return 5


class Batched(Trainer):
    """A user's trainer with that sampler."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        sampler = Estimated(torch.utils.data.RandomSampler(data), 2, drop_last=False)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


KEPT: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def evaluated(folder: Path) -> Trainer:
    """Return a Trainer that evaluates after each step, by workers that it keeps."""
    trainer = plain(folder, data=partial(Tokens, 18), **KEPT, **_EVALUATED)
    trainer.eval_dataset = Still(4)
    return trainer


UNDIVIDED = partial(plain, accelerator_config={"dispatch_batches": False})
OWN: dict[str, Case] = {
    "a sampler with state_dict": partial(plain, kind=Sampled, gradient_accumulation_steps=1),
    "a sampler with state_dict, accumulation": partial(plain, kind=Sampled),
    "a sampler with state_dict, two ranks": partial(plain, kind=Sampled),
    "a stream": partial(UNDIVIDED, data=partial(stream, 18), gradient_accumulation_steps=1),
    "a stream, accumulation": partial(UNDIVIDED, data=partial(stream, 14)),
    "a stream that ends at the save": partial(UNDIVIDED, data=partial(stream, 6), gradient_accumulation_steps=1),
    **{
        f"{kind}{ranks}": partial(UNDIVIDED, data=partial(stream, 18, shards, shuffled=shuffled), **more)
        for ranks in ("", ", two ranks")
        for kind, shards, shuffled, more in (
            ("a stream of two shards", 2, False, {}),
            ("a stream of one shard", 1, False, {}),
            ("a shuffled stream", 2, True, {}),
            ("a shuffled stream of one shard", 1, True, {}),
            ("a stream, workers", 2, False, {"dataloader_num_workers": 1}),
            ("a shuffled stream, workers", 2, True, {"dataloader_num_workers": 2}),
        )
    },
    "a callback that looks at a shuffled stream": partial(
        UNDIVIDED, data=partial(stream, 18, shuffled=True), callbacks=[Looking]
    ),
    "a callback that looks at the data": partial(plain, callbacks=[Looking], data=partial(Still, 18)),
    "a look at the data of kept workers": partial(plain, callbacks=[Looking], data=partial(Tokens, 18), **KEPT),
    "evaluations by workers that are kept": evaluated,
    "batch_rebalance, two ranks": partial(
        plain, data=partial(Uneven, 18), train_sampling_strategy="batch_rebalance", logging_steps=5
    ),
    "a length that is an estimate": partial(plain, kind=Batched, data=partial(Tokens, 12)),
    "a trainer that stores nothing": partial(plain, kind=Weighted),
    "a trainer with weights of words": partial(plain, kind=Balanced),
    "a callback with a time": partial(plain, callbacks=[Timed]),
    "a trainer with state_dict": partial(plain, kind=Averaging),
    "a callback that is an ExportableState": partial(plain, callbacks=[Exporting]),
    "a callback with state_dict": partial(plain, callbacks=[Giving]),
    "a callback that begins anew, within an epoch": partial(plain, callbacks=[Beginning]),
    "a callback that begins anew, at an epoch's end": partial(
        plain, callbacks=[Beginning], gradient_accumulation_steps=3
    ),
    "an ExportableState that begins anew": partial(plain, callbacks=[BeginningExported]),
    "a callback that unfreezes a layer": partial(plain, callbacks=[Unfreezing]),
    "a dataset with generators": partial(plain, data=partial(Drawing, 18)),
}
"""Classes of a user that give their state, or have none that a step does not hold."""

_OF_SCHEDULES = {
    SchedulerType.WARMUP_STABLE_DECAY: {"num_decay_steps": 2},
    SchedulerType.COSINE_WITH_MIN_LR: {"min_lr": 1e-4},
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: {"min_lr": 1e-4},
}
_VALUES: list[dict[str, Any]] = [
    *(
        {"lr_scheduler_type": name, "lr_scheduler_kwargs": _OF_SCHEDULES.get(name, {}), **_EVALUATED}
        for name in SchedulerType
    ),
    *({"optim": name} for name in ("adafactor", "sgd", "adagrad", "rmsprop", "adamw_torch", "adamw_torch_fused")),
    *({"optim": f"schedule_free_{name}", "lr_scheduler_type": "constant"} for name in ("adamw", "sgd", "radam")),
    {"max_grad_norm": 0.1}, {"weight_decay": 0.1, "adam_beta1": 0.8}, {"label_smoothing_factor": 0.1}, {"bf16": True},
    {"bf16_full_eval": True, **_EVALUATED}, {"gradient_checkpointing": True}, {"activation_checkpointing": True},
    {"neftune_noise_alpha": 5.0}, {"include_num_input_tokens_seen": "all"}, {"logging_first_step": True},
    {"logging_strategy": "epoch"}, {"logging_nan_inf_filter": False}, {"eval_on_start": True, **_EVALUATED},
    {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3}, {"batch_eval_metrics": True},
    {"full_determinism": True}, {"seed": 7, "data_seed": 8}, {"dataloader_drop_last": True},
    {"train_sampling_strategy": "sequential"}, {"train_sampling_strategy": "group_by_length"},
    {"average_tokens_across_devices": False}, {"warmup_steps": 3}, {"remove_unused_columns": False},
    {"torch_empty_cache_steps": 1}, {"restore_callback_states_from_checkpoint": True}, {"use_cache": True},
    {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 4, "logging_steps": 1},
    {"per_device_eval_batch_size": 1, "eval_accumulation_steps": 1, **_EVALUATED},
    {"accelerator_config": {"split_batches": True}}, {"accelerator_config": {"use_seedable_sampler": False}},
]  # fmt: skip
ARGUMENTS: dict[str, Case] = {
    **{", ".join(f"{k}={v}" for k, v in value.items()): partial(plain, **value) for value in _VALUES},
    "model_init": partial(plain, model_init=model),
    "compute_loss_func": partial(
        plain, compute_loss_func=lambda out, labels, num_items_in_batch=None: out.logits.sum()
    ),
}
"""Arguments of a Trainer -> a run with them."""
CASES = {
    f"{role} {name}": case
    for role, cases in (("trainer", TRAINERS), ("callback", CALLBACKS), ("own", OWN), ("argument", ARGUMENTS))
    for name, case in cases.items()
}


def run_case(folder: str, name: str, killed_at: int | None) -> None:
    """Train, and write the result; or write why the trainer is refused."""
    torch.manual_seed(0)
    random.seed(0)
    path, case = Path(folder), CASES[name]
    trainer = case(path)
    for callback in kill_after(killed_at, path, INTERVAL, LeaveBehind):
        trainer.add_callback(callback)
    try:
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=INTERVAL)))
        trainer.train()
    except ConfigError as error:
        (path / "refused.txt").write_text(str(error))
        return
    write(path, trainer, 0)
    torch.save(followers(trainer), path / f"beside-{os.environ.get('RANK', 0)}.pt")


def followers(trainer: Any) -> dict[str, Any]:
    """Return what callbacks keep beside the model, by its name."""
    found: dict[str, Any] = {}
    for holder in (trainer, *trainer.callback_handler.callbacks):
        for name in ("ref_model", "teacher_model", "running_model"):
            if isinstance(module := getattr(holder, name, None), torch.nn.Module):
                found |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
        for name in ("shadow_weights", "table", "counted", "mean"):
            if (value := getattr(holder, name, None)) is not None:
                found[name] = value
    return found


def judge(names: Sequence[str], folder: Path) -> list[Row]:
    """Return whether runs on equally many ranks that are resumed from what a kill leaves equal those that are not."""
    return verdicts_of(__name__, "run_case", dict.fromkeys(names, KILLED_AT), ranks_of(names[0]), folder)


def ranks_of(name: str) -> int:
    return 1 + ("two ranks" in name)


def verdicts_of(module: str, function: str, stops: Mapping[str, int], ranks: int, folder: Path) -> list[Row]:
    """Play runs whole, and resumed from what a kill at their step leaves, all of each in the same processes."""
    codes = {}
    for place in ("whole", "resumed"):
        phases = [
            Phase(function, str(folder / str(number) / place), ranks, (name, stop if place == "whole" else None))
            for number, (name, stop) in enumerate(stops.items())
        ]
        codes[place] = play_together(module, phases)
    ended = enumerate(zip(codes["whole"], codes["resumed"], strict=True))
    verdicts = [_verdict(folder / str(number), ranks, [*both]) for number, both in ended]
    return [(name, *verdict) for name, verdict in zip(stops, verdicts, strict=True)]


def _verdict(folder: Path, ranks: int, codes: list[list[int]]) -> tuple[str, str]:
    if (refused := folder / "whole" / "refused.txt").exists():
        return "refused", " ".join(refused.read_text().split())
    if codes != [[0] * ranks] * 2:
        return "different", f"the runs ended with {codes}"
    faults: list[str] = []
    for rank in range(ranks):
        found, expected = (torch.load(folder / place / f"result-{rank}.pt") for place in ("resumed", "whole"))
        beside = [torch.load(folder / place / f"beside-{rank}.pt") for place in ("resumed", "whole")]
        faults += [*differences(found["weights"], expected["weights"]), *differences(*beside)]
        faults += [f"{a} in place of {b}" for a, b in zip_longest(found["logs"], expected["logs"]) if a != b]
    return "different" if faults else "exact", "; ".join(faults)[:300]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Yield the names whose values differ."""
    for key in sorted(found.keys() | expected.keys()):
        one: Any = found.get(key)
        other: Any = expected.get(key)
        pairs = ((one, other),) if not isinstance(one, dict) else zip(one.values(), other.values(), strict=True)
        if not all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs):
            yield key
