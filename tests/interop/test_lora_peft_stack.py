"""Adapters stacked by rank: one folder that does what PEFT does with all of them active."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.interop.folders import gap, theirs, tuned
from tests.world import TINY
from titan_ckpt.converters.stack import stack_adapters
from titan_ckpt.errors import BaseMismatchError, ConverterError, ExportError


def write_adapter(base: Path, folder: Path, *targets: str, **settings: Any) -> Path:
    tuned(LlamaForCausalLM.from_pretrained(base), folder, *targets, seed=len(folder.name), **settings)
    return folder


def test_a_stack_does_what_all_do_together(tmp_path: Path) -> None:
    """Other ranks, scales, rsLoRA, targets and patterns: PEFT with both active gives the stack's logits."""
    base = tmp_path / "base"
    model = theirs(TINY.to_hf(), base)
    one = write_adapter(base, tmp_path / "one", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "embed_tokens"])
    other = write_adapter(
        base, tmp_path / "other", r=3, lora_alpha=9, use_rslora=True, target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 5}, alpha_pattern={"down_proj": 2}, modules_to_save=["lm_head"],
    )  # fmt: skip
    stack_adapters([one, other], tmp_path / "stack")
    both: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(one), adapter_name="one")
    both.load_adapter(str(other), adapter_name="other")
    both.base_model.set_adapter(["one", "other"])
    stack = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(tmp_path / "stack"))
    assert gap(both.eval(), model) > 1e-2
    assert gap(stack.eval(), both) <= 1e-5
    config = json.loads((tmp_path / "stack/adapter_config.json").read_text())
    assert config["r"] == 7 and type(config["lora_alpha"]) is int and config["base_model_name_or_path"] == str(base)


def test_a_scale_that_all_share_changes_no_value(tmp_path: Path) -> None:
    """Equal scales: every number of the stack is one of the adapters', bit for bit."""
    base = tmp_path / "base"
    theirs(TINY.to_hf(), base)
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
    theirs(TINY.to_hf(), base)
    theirs(TINY.to_hf(), stranger, seed=2)
    plain = write_adapter(base, tmp_path / "plain", r=2, target_modules=["q_proj"])
    dora = write_adapter(base, tmp_path / "dora", r=2, target_modules=["q_proj"], use_dora=True)
    heads = [
        write_adapter(base, tmp_path / f"head{i}", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        for i in range(2)
    ]
    foreign = write_adapter(stranger, tmp_path / "foreign", r=2, target_modules=["q_proj"])
    out = tmp_path / "stack"
    table = write_adapter(base, tmp_path / "table", r=2, target_modules=["embed_tokens"])
    named = load_file(table / "adapter_model.safetensors")
    renamed = {k.replace("embedding_A", "A.weight").replace("embedding_B", "B.weight"): v for k, v in named.items()}
    linear = tmp_path / "linear"
    shutil.copytree(table, linear)
    save_file(renamed, linear / "adapter_model.safetensors")
    with pytest.raises(ConverterError, match=r"embed_tokens\.lora_embedding_A is for a module of another kind"):
        stack_adapters([table, linear], out)
    save_file(named | {k: v.clone() for k, v in renamed.items()}, linear / "adapter_model.safetensors")
    with pytest.raises(ConverterError, match=r"embed_tokens\.lora_.* is for a module of another kind"):
        stack_adapters([plain, linear], out)
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
