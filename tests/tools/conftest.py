"""The same weights in every format, made once for all tests of the command line tools; no test changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools.steps import LORA, SHAPE, save_sharded, save_step
from titan_ckpt.converters import from_tables


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all others are; see the functions above."""
    folder = tmp_path_factory.mktemp("tools")
    torch.manual_seed(0)
    config: Any = LlamaConfig.from_dict(SHAPE.to_hf())
    LlamaForCausalLM(config).save_pretrained(folder / "hf", max_shard_size="200KB")
    save_step(folder / "hf", folder / "run1")
    save_step(folder / "hf", folder / "lora", converters=from_tables([LORA]))
    save_sharded(folder)
    for seed, modules in ((1, ["q_proj", "down_proj"]), (2, ["q_proj", "up_proj"])):
        torch.manual_seed(seed)
        base: Any = LlamaForCausalLM.from_pretrained(folder / "hf")
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
        adapted.save_pretrained(str(folder / f"peft{seed}"))
    return folder
