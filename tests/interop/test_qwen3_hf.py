"""Qwen3 and Qwen3-MoE against transformers' own: the same folder gives the same logits, and comes back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.interop.folders import export, load, open_strictly
from tests.world import assert_same_bytes, tensors
from titan_ckpt.models import qwen3, qwen3_moe
from titan_ckpt.models.qwen3 import Qwen3, Qwen3Config
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

Config = Qwen3Config | Qwen3MoeConfig
auto: Any = AutoModelForCausalLM  # its methods have no types

DENSE = replace(qwen3.FLAVORS["debug-0.5m"], vocab_size=256, max_seq_len=128)
SPARSE = replace(qwen3_moe.FLAVORS["debug-1m"], vocab_size=256, max_seq_len=128)
SHAPES: dict[str, Config] = {
    "tied": DENSE,
    "untied": replace(DENSE, tie_embeddings=False),
    "one_kv_head": replace(DENSE, num_kv_heads=1),
    "full_heads": replace(DENSE, num_kv_heads=4, tie_embeddings=False),
    "narrow_heads": replace(DENSE, head_dim=16),
    "moe": SPARSE,
    "moe_tied": replace(SPARSE, tie_embeddings=True, dense_layers=()),
    "moe_unscaled": replace(SPARSE, norm_topk_prob=False, experts_per_token=3),
    "moe_every_second": replace(SPARSE, sparse_step=2, dense_layers=(3,)),
    "moe_one_expert_each": replace(SPARSE, experts_per_token=1, num_experts=3),
}


def build(config: Config) -> Qwen3 | Qwen3Moe:
    return Qwen3Moe(config) if isinstance(config, Qwen3MoeConfig) else Qwen3(config)


def hf_twin(config: Config, folder: Path) -> PreTrainedModel:
    """Return transformers' model of this shape with random weights, saved in the folder."""
    torch.manual_seed(1)
    hf_config = config.to_hf()
    twin = auto.from_config(AutoConfig.for_model(**hf_config))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    twin.train(False)
    twin.save_pretrained(folder)
    assert isinstance(twin, PreTrainedModel)
    return twin


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = model(tokens)
    out: torch.Tensor = made.logits if isinstance(model, PreTrainedModel) else made
    return out


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_folder_gives_the_same_logits_and_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Weights that transformers saved give its logits here, and are the same tensors after an export."""
    twin = hf_twin(SHAPES[name], tmp_path / "theirs")
    config = type(SHAPES[name]).from_hf(twin.config.to_dict())
    assert config == SHAPES[name]
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu").eval()
    load(model, model.key_map(), tmp_path / "theirs")
    tokens = torch.randint(0, 256, (2, 100))
    expected = logits_of(twin, tokens)
    assert expected.abs().max() > 0.1
    assert (logits_of(model, tokens) - expected).abs().max() <= 1e-5
    export(model, model.key_map(), model.hf_config(), tmp_path / "ours")
    assert_same_bytes(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("name", list(SHAPES))
def test_an_export_opens_in_transformers_with_the_native_logits(name: str, tmp_path: Path) -> None:
    """Initial values of this model, exported, are read by from_pretrained without a warning, and compute the same."""
    torch.manual_seed(2)
    model = build(SHAPES[name]).eval()
    model.init_weights()
    export(model, model.key_map(), model.hf_config(), tmp_path / "ours")
    twin = open_strictly(auto, tmp_path / "ours")
    tokens = torch.randint(0, 256, (2, 100))
    assert (logits_of(model, tokens) - logits_of(twin, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["tied", "narrow_heads"])
def test_in_bfloat16_over_float32_weights_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Under autocast norms keep the wider dtype, as theirs do; what is left is less than bfloat16 rounds by."""
    twin = hf_twin(SHAPES[name], tmp_path)
    model = build(SHAPES[name]).eval()
    load(model, model.key_map(), tmp_path)
    tokens = torch.randint(0, 256, (2, 100))
    exact = logits_of(twin, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = logits_of(model, tokens), logits_of(twin, tokens)
    assert (ours - theirs).abs().max() < 0.5 * (theirs - exact).abs().max()


def test_experts_are_stacked_in_memory_and_apart_on_disk(tmp_path: Path) -> None:
    """One parameter per projection holds all experts; the folder has a matrix per expert, as the published ones do."""
    hf_twin(SPARSE, tmp_path)
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    model = Qwen3Moe(SPARSE)
    load(model, model.key_map(), tmp_path)
    files = tensors(tmp_path)
    for fqn, value in model.state_dict().items():
        if ".experts." in fqn:
            layer, name = fqn.split(".")[1], fqn.split(".")[-1]
            for e in range(SPARSE.num_experts):
                key = f"model.layers.{layer}.mlp.experts.{e}.{names[name]}.weight"
                assert torch.equal(value[e], files.pop(key))
    assert not [key for key in files if ".experts." in key]


@pytest.mark.parametrize("flavor", ["0.6B", "8B", "30B-A3B"])
def test_the_true_shapes_are_understood_by_transformers(flavor: str) -> None:
    """Built on meta from our config.json, transformers' model has as many parameters, and the same rotary base."""
    config = qwen3.FLAVORS.get(flavor) or qwen3_moe.FLAVORS[flavor]
    with torch.device("meta"):
        twin = auto.from_config(AutoConfig.for_model(**config.to_hf()))
        model = build(config)
    assert twin.num_parameters() == sum(p.numel() for p in model.parameters())
    assert twin.config.rope_parameters["rope_theta"] == 1_000_000.0
