"""A tiny run of every kind of adapter that PEFT offers, in a loop of one's own and in transformers' Trainer.

A resumed run draws other initial values than the run that was killed, as a program without a seed does.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer, create_riemannian_optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations.trainer_cases import INTERVAL, KILLED_AT, of_trl, settings, verdicts_of
from tests.integrations.trainer_runs import LeaveBehind, Tokens, kill_after, model, write
from tests.zoo.worlds import Row
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.transformers import attach
from titan_ckpt.integrations.transformers.adapter import frozen_base

STEPS = 7
CONFIG = CheckpointConfig(save=SaveConfig(interval=INTERVAL))
WITH_BASE = CheckpointConfig(save=SaveConfig(interval=INTERVAL, include_base=True))
TARGETS = ["q_proj", "v_proj"]
TASKS: Any = {"task_type": "CAUSAL_LM"}
_ADALORA = {"init_r": 4, "target_r": 2, "total_step": 6, "tinit": 0, "tfinal": 2, "deltaT": 1}
_GIVEN: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2, "num_ranks": 2},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "ADALORA": {"target_modules": TARGETS, **_ADALORA},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "IA3": {"target_modules": [*TARGETS, "down_proj"], "feedforward_modules": ["down_proj"]},
    "BOFT": {"target_modules": TARGETS, "boft_block_size": 4},
    "OFT": {"target_modules": TARGETS, "oft_block_size": 4},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "FOURIERFT": {"target_modules": TARGETS, "n_frequency": 10},
    "WAVEFT": {"target_modules": TARGETS, "n_frequency": 10},
    "VBLORA": {"target_modules": TARGETS, "r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
    "C3A": {"target_modules": TARGETS, "block_size": 4},
    "ROAD": {"target_modules": TARGETS, "group_size": 4},
    "GRALORA": {"target_modules": TARGETS, "r": 4, "gralora_k": 2},
    "TINYLORA": {"target_modules": TARGETS},
    "SHADOW": {"r": 2},
    "POLY": {"target_modules": TARGETS, "r": 2, "n_tasks": 2},
}
"""Settings of the kinds that need more than a rank and the modules."""
_OF_LORA: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "use_dora, embeddings": {"use_dora": True, "target_modules": ["embed_tokens"]},
    "mica, embeddings": {"init_lora_weights": "mica", "target_modules": ["embed_tokens"]},
    "use_rslora, lora_bias": {"use_rslora": True, "lora_bias": True},
    "use_bdlora": {"use_bdlora": peft.tuners.lora.BdLoraConfig(nblocks=2, target_modules_bd_a=TARGETS), "r": 4},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "kasa_config": {"kasa_config": peft.tuners.lora.KasaConfig()},
    "velora_config": {"velora_config": peft.tuners.lora.VeloraConfig(num_groups=4)},
    "monteclora_config": {"monteclora_config": peft.tuners.lora.MontecloraConfig()},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "target_parameters": {
        "target_parameters": ["gate_proj.weight"],
        "target_modules": ["up_proj"],
        "lora_dropout": 0.0,
    },
    "bias": {"bias": "lora_only"},
    **{
        f"init_lora_weights={kind}": {"init_lora_weights": kind, "lora_dropout": 0.0}
        for kind in (False, "gaussian", "orthogonal", "mica", "pissa", "pissa_niter_4", "olora")
    },
}
"""Settings of LoRA that bring other parameters, other classes of layers or another base."""


def adapted(base: Any, kind: str, own: Mapping[str, Any]) -> Any:
    """Return the base with an adapter of a kind."""
    config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    usual = {"r": 2, "target_modules": TARGETS} if kind not in _GIVEN else {}
    usual = {name: value for name, value in usual.items() if name in config.__dataclass_fields__}
    return peft.get_peft_model(base, config(**TASKS | usual | _GIVEN.get(kind, {}) | own))


def with_reference(base: Any) -> Any:
    """Return a model with a second adapter, which is frozen and takes part in the loss."""
    network = adapted(base, "LORA", {})
    network.add_adapter("ref", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, **TASKS))
    network.base_model.set_adapter(["default", "ref"])
    for name, value in network.named_parameters():
        if ".ref." in name:
            value.requires_grad_(False)
    return network


def lorafa(network: Any) -> Any:
    return create_lorafa_optimizer(network, r=2, lora_alpha=4, lr=1e-2)


def loraplus(network: Any) -> Any:
    return create_loraplus_optimizer(network, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4)


def riemannian(network: Any) -> Any:
    return create_riemannian_optimizer(network, torch.optim.AdamW, lr=1e-2)


def adamw(network: Any) -> Any:
    return torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-2)


Build = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_UNBUILT = {"ADAMSS": "it needs scikit-learn", "XLORA": "it needs trained adapters"}
CASES: dict[str, Build] = {
    **{
        kind.value: (partial(adapted, kind=kind.value, own={}), adamw)
        for kind in PEFT_TYPE_TO_CONFIG_MAPPING
        if kind.value not in _UNBUILT
    },
    **{f"LORA, {name}": (partial(adapted, kind="LORA", own=own), adamw) for name, own in _OF_LORA.items()},
    "LORA, a frozen reference": (with_reference, adamw),
    **{
        f"LORA, {make.__name__}": (partial(adapted, kind="LORA", own={}), make)
        for make in (lorafa, loraplus, riemannian)
    },
}
"""Name of a kind, a setting or an optimizer of LoRA -> (function that adapts a base, that makes the optimizer)."""
ALL = [*CASES, "LORA, DPOTrainer"]
_WITH_BASE = ("LORA, init_lora_weights=pissa_niter_4", "LORA, lorafa")
"""Those that the Trainer takes only if steps hold the base."""
_WITH_TASKS = ("MULTITASK_PROMPT_TUNING", "POLY")


class WithTasks(Tokens):
    """Also has the task of each sequence, which the kinds for several tasks ask for."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"task_ids": torch.tensor(index % 2)}


class Allocate(TrainerCallback):
    """Lets AdaLoRA choose its ranks, as PEFT's documentation says."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        allocate(model, state.global_step)


def allocate(network: Any, step: int) -> None:
    if hasattr(network.base_model, "rankallocator"):
        network.base_model.update_and_allocate(step)


def loop(folder: Path, name: str, seed: int, killed_at: int | None) -> dict[str, Any]:
    """Train in a loop of one's own, over a base that the manager loads. Return the weights."""
    adapt, optimizer_of = CASES[name]
    base = model()
    with torch.no_grad():
        for value in base.parameters() if seed else ():
            value.add_(1)
    seed_all(seed)
    network = adapt(base)
    optimizer = optimizer_of(network)
    torch.manual_seed(0)
    rows = [data_of(name)[index] for index in range(2)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    network.train()
    manager = CheckpointManager(CONFIG, model_parts=[network], optimizers=[optimizer], base_folder=folder / "loop")
    start = manager.load().step
    for step in range(start + 1, STEPS + 1):
        network(**batch).loss.backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        allocate(network, step)
        optimizer.zero_grad()
        manager.save(step, last_step=step == STEPS)
        if step == killed_at:
            manager.wait()
            shutil.copytree(folder / "loop", folder.with_name("resumed") / "loop")
    manager.close()
    return network.state_dict()  # type: ignore[no-any-return]


def trainer_of(folder: Path, name: str, seed: int) -> Trainer:
    """Return a Trainer of the kind."""
    if name == "LORA, DPOTrainer":

        def seeded() -> Any:
            base = model()
            seed_all(seed)
            return adapted(base, "LORA", {"init_lora_weights": False})

        return of_trl(folder, "trl.trainer.dpo_trainer.DPOTrainer", "pair", {"model": seeded})  # it adds a reference
    adapt, optimizer_of = CASES[name]
    base = model()
    owned = {id(p) for p in base.parameters()}
    seed_all(seed)
    network = adapt(base)
    frozen = {id(p) for p in network.parameters() if not p.requires_grad}
    assert {id(p) for p in frozen_base(network).values()} == owned & frozen
    made: Any = (optimizer_of(network), None)
    args = TrainingArguments(**settings(folder, remove_unused_columns=name not in _WITH_TASKS))
    kind: Any = Trainer
    callbacks = [Allocate()] if name == "ADALORA" else []
    trainer: Trainer = kind(network, args, train_dataset=data_of(name), optimizers=made, callbacks=callbacks)
    return trainer


def data_of(name: str) -> Tokens:
    """Return the data that a kind takes."""
    return WithTasks(18) if name in _WITH_TASKS else Tokens(18)


def seed_all(seed: int) -> None:
    """Seed every generator from which an adapter may draw its initial values."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - PEFT draws from it


def run_case(folder: str, name: str, killed_at: int | None) -> None:
    """Train in a loop, then in a Trainer, and write the results; or write why one of them is refused."""
    path = Path(folder)
    seed = int((path / "checkpoints").exists())
    try:
        weights = loop(path, name, seed, killed_at) if name in CASES else {}
        trainer = trainer_of(path, name, seed)
        for callback in kill_after(killed_at, path, INTERVAL, LeaveBehind):
            trainer.add_callback(callback)
        attach(trainer, WITH_BASE if name in _WITH_BASE else CONFIG)
        trainer.train()
    except ConfigError as error:
        (path / "refused.txt").write_text(str(error))
        return
    write(path, trainer, 0)
    torch.save(weights, path / "beside-0.pt")


def judge(names: Iterable[str], folder: Path) -> list[Row]:
    """Return whether runs with an adapter that are resumed from what a kill leaves equal those that are not."""
    return verdicts_of(__name__, "run_case", dict.fromkeys(names, KILLED_AT), 1, folder)
