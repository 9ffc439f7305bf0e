"""Adapters stacked by rank: one folder that does what PEFT does with all of them active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from titan_ckpt.converters.stack import stack_adapters
from titan_ckpt.errors import BaseMismatchError, ConverterError, ExportError

TOKENS = torch.arange(40).reshape(2, 20) % 96


def base_model(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.train(False)
    model.save_pretrained(folder)
    return model


def write_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(len(folder.name))
    tuned = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(TOKENS).logits
    return out


def test_a_stack_does_what_all_do_together(tmp_path: Path) -> None:
    """Other ranks, scales, rsLoRA, targets and patterns: PEFT with both active gives the stack's logits."""
    base = tmp_path / "base"
    model = base_model(base)
    one = write_adapter(base, tmp_path / "one", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "embed_tokens"])
    other = write_adapter(
        base, tmp_path / "other", r=3, lora_alpha=9, use_rslora=True, target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 5}, alpha_pattern={"down_proj": 2}, modules_to_save=["lm_head"],
    )  # fmt: skip
    stack_adapters([one, other], tmp_path / "stack")
    plain = logits(model)
    both: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(one), adapter_name="one")
    both.load_adapter(str(other), adapter_name="other")
    both.base_model.set_adapter(["one", "other"])
    stack = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(tmp_path / "stack"))
    assert (logits(both.eval()) - plain).abs().max() > 1e-2
    assert (logits(stack.eval()) - logits(both)).abs().max() <= 1e-5
    config = json.loads((tmp_path / "stack/adapter_config.json").read_text())
    assert config["r"] == 7 and type(config["lora_alpha"]) is int and config["base_model_name_or_path"] == str(base)


def test_a_scale_that_all_share_changes_no_value(tmp_path: Path) -> None:
    """Equal scales: every number of the stack is one of the adapters', bit for bit."""
    from safetensors.torch import load_file

    base = tmp_path / "base"
    base_model(base)
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    folders = [write_adapter(base, tmp_path / name, **settings) for name in ("a", "bb", "ccc")]
    stack_adapters(folders, tmp_path / "stack")
    made = load_file(tmp_path / "stack/adapter_model.safetensors")
    given = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    for key, value in made.items():
        assert torch.equal(value, torch.cat([tensors[key] for tensors in given], dim=0 if "lora_A" in key else 1))


def test_what_does_not_add_up_is_refused(tmp_path: Path) -> None:
    """DoRA, two trained copies of one module, one adapter alone, other bases, and a folder that is there already."""
    base, stranger = tmp_path / "base", tmp_path / "stranger"
    base_model(base)
    base_model(stranger, seed=1)
    plain = write_adapter(base, tmp_path / "plain", r=2, target_modules=["q_proj"])
    dora = write_adapter(base, tmp_path / "dora", r=2, target_modules=["q_proj"], use_dora=True)
    heads = [
        write_adapter(base, tmp_path / f"head{i}", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        for i in range(2)
    ]
    foreign = write_adapter(stranger, tmp_path / "foreign", r=2, target_modules=["q_proj"])
    out = tmp_path / "stack"
    with pytest.raises(ConverterError, match="DoRA scales whole rows"):
        stack_adapters([plain, dora], out)
    with pytest.raises(ConverterError, match=r"lm_head\.weight was trained in full by two"):
        stack_adapters(heads, out)
    none = [write_adapter(base, tmp_path / f"none{i}", r=2, lora_alpha=0, target_modules=["q_proj"]) for i in range(2)]
    with pytest.raises(ConverterError, match="every pair is scaled by 0"):
        stack_adapters(none, out)
    with pytest.raises(ConverterError, match="name two or more"):
        stack_adapters([plain], out)
    with pytest.raises(BaseMismatchError, match="trained on different bases"):
        stack_adapters([plain, foreign], out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ExportError):
        stack_adapters([plain, heads[0]], out)
