"""A resumed run goes on bit for bit with adapters that were switched, scaled or merged in training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM, TrainerCallback

from tests import world
from tests.integrations.peft_runs import CONFIG, TARGETS, WITH_BASE, adamw, adapted, seed_all, trainer_of
from tests.integrations.phases import Phase, play
from tests.integrations.trainer_runs import SHAPE, model
from tests.test_changed_weights import before_each_copy
from titan_ckpt import CheckpointConfig, SaveConfig
from titan_ckpt.errors import ConfigError, SaveError
from titan_ckpt.integrations.transformers import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of layers without bias and of its own settings

STEPS, RESUMED_AT = 5, 3


def switch(network: Any) -> None:
    network.set_adapter("other")


def activate_both(network: Any) -> None:
    network.base_model.set_adapter(["default", "other"])


def scale(network: Any) -> None:
    for module in network.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 7.0)


def merge(network: Any) -> None:
    network.merge_adapter()


def merge_and_unmerge(network: Any) -> None:
    network.merge_adapter()
    network.unmerge_adapter()


def disable(network: Any) -> None:
    network.base_model.disable_adapter_layers()


def two_adapters(**own: Any) -> Any:
    """Return a model with two adapters, of which the first takes part."""
    base = model()
    seed_all(0)
    network = adapted(base, "LORA", {"init_lora_weights": False, **own})
    network.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, **own))
    return network


def losses(folder: Path, act: Callable[[Any], None], until: int, **own: Any) -> list[float]:
    """Train to a step, and let `act` work on the adapters before the second is saved."""
    network = two_adapters(**own)
    every = [value for name, value in network.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(every, lr=1e-2)
    batch = torch.arange(16).view(2, 8)
    found = []
    with world.manager(folder, network, optimizer) as manager:
        for step in range(manager.load().step + 1, until + 1):
            loss = network(input_ids=batch, labels=batch).loss
            found.append(loss.item())
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                act(network)
            manager.save(step)
    return found


@pytest.mark.parametrize("act", [switch, activate_both, scale, merge, merge_and_unmerge, disable])
def test_what_a_run_has_switched_is_switched_after_a_resume(tmp_path: Path, act: Callable[[Any], None]) -> None:
    whole = losses(tmp_path / "whole", act, STEPS)
    first, rest = (losses(tmp_path / "resumed", act, until) for until in (RESUMED_AT, STEPS))
    assert first + rest == whole


def test_merged_adapters_that_keep_more_than_the_weight_are_refused(tmp_path: Path) -> None:
    """DoRA's norms of the weight before are in a cache, and unmerge_adapter() would end in a KeyError."""
    with pytest.raises(SaveError, match=r"adapters are merged, .*q_proj.* Call it before the step ends"):
        losses(tmp_path, merge, STEPS, use_dora=True)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_adapters_that_are_merged_after_a_save_are_in_no_part_of_it(tmp_path: Path, mode: Any) -> None:
    """PEFT merges by `.data`, which no version of a tensor shows, so a save returns once the copy is complete."""
    network = two_adapters()
    with world.manager(tmp_path, network, adamw(network), async_mode=mode) as manager:
        manager.load()
        wanted = copy.deepcopy(network.state_dict())
        with before_each_copy(lambda: time.sleep(0.2)):
            manager.save(1)
            network.merge_adapter()
            manager.wait()
        manager.load(1)
    assert all(torch.equal(value, wanted[name]) for name, value in network.state_dict().items())


OVER_TENSOR_RANKS: dict[str, dict[str, Any]] = {
    "all biases": {"bias": "all"},
    "biases of adapted modules": {"bias": "lora_only"},
    "biases of B": {"lora_bias": True},
    "a norm": {"modules_to_save": ["norm"]},
    "embeddings": {"target_modules": [*TARGETS, "embed_tokens"]},
}
"""What PEFT 0.21 trains under tensor parallelism; it raises an error of its own for rows, heads and DoRA."""


def over_tensor_ranks(folder: Path, base: Path, own: dict[str, Any], begins_at: int) -> dict[str, Any]:
    """Train to the end, the matrices of the base divided over two ranks; return all weights, whole."""
    network = LlamaForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(tp_size=2))
    torch.manual_seed(begins_at)  # a resumed run has other values before it loads
    network = adapted(network, "LORA", own)
    optimizer, batch = adamw(network), torch.arange(16).view(2, 8)
    with world.manager(folder, network, optimizer, interval=RESUMED_AT) as manager:
        assert manager.load().step == begins_at
        for step in range(begins_at + 1, STEPS + 1):
            network(input_ids=batch, labels=batch.roll(step, 1)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step)
    return {name: world.whole(value) for name, value in network.state_dict().items()}


def resume_over_tensor_ranks(root: str) -> None:
    folder = Path(root)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        config: Any = LlamaConfig
        torch.manual_seed(0)
        LlamaForCausalLM(config(**SHAPE, attention_bias=True)).save_pretrained(folder / "base")
    dist.barrier()
    for name, own in OVER_TENSOR_RANKS.items():
        whole, resumed = (over_tensor_ranks(folder / name, folder / "base", own, step) for step in (0, RESUMED_AT))
        assert world.differing(whole, resumed) == [], name


def test_adapters_over_tensor_parallelism_go_on(tmp_path: Path) -> None:
    """Trained biases, norms and embeddings too, which each rank holds whole beside its part of the matrices."""
    assert play(__name__, [Phase("resume_over_tensor_ranks", str(tmp_path), 2)]) == [[0, 0]]


class Acting(TrainerCallback):
    def __init__(self, act: Callable[[Any], None]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == RESUMED_AT:
            self.act(model)


def change_the_base(network: Any) -> None:
    with torch.no_grad():
        network.get_base_model().model.norm.weight.mul_(1.5)


@pytest.mark.parametrize("act", [merge, merge_and_unmerge, change_the_base])
def test_a_trainer_that_has_changed_the_base_saves_it_or_is_refused(tmp_path: Path, act: Callable[[Any], None]) -> None:
    """A step of the adapters alone would be resumed over the base of the start."""
    for config, folder in ((CONFIG, tmp_path / "alone"), (WITH_BASE, tmp_path / "both")):
        trainer = trainer_of(folder, "LORA", 0)
        trainer.add_callback(Acting(act))
        attach(trainer, config)
        if config is WITH_BASE:
            if act is not merge:  # whose weights have no gradients
                trainer.train()
        else:
            with pytest.raises(SaveError, match=r"the base is no longer that of the start: .*include_base=True"):
                trainer.train()


def test_generation_that_merges_the_adapter_needs_steps_with_the_base(tmp_path: Path) -> None:
    """TRL merges for vLLM before each generation; that is refused before the first step, and not after it."""
    trainer = trainer_of(tmp_path, "LORA", 0)
    trainer.args.use_vllm = True  # type: ignore[attr-defined]  # an argument of TRL's trainers
    with pytest.raises(ConfigError, match=r"use_vllm: each merge and unmerge changes the base .*include_base=True"):
        attach(trainer, CheckpointConfig(save=SaveConfig(interval=1), allow=("vllm",)))
