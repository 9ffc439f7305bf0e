"""Our models against transformers' own: the same folder gives the same logits, and comes back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.interop.folders import export, gap, load, logits, open_strictly, theirs
from tests.world import assert_same_bytes, tensors
from titan_ckpt.models import llama3, qwen3, qwen3_moe
from titan_ckpt.models.llama3 import Llama3, Llama3Config, RopeScaling
from titan_ckpt.models.qwen3 import Qwen3, Qwen3Config
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

Config = Llama3Config | Qwen3Config | Qwen3MoeConfig
auto: Any = AutoModelForCausalLM  # its methods have no types
TOKENS = torch.arange(200).view(2, 100) * 7 % 256

LLAMA = replace(llama3.FLAVORS["debug-0.5m"], vocab_size=256, max_seq_len=128)
DENSE = replace(qwen3.FLAVORS["debug-0.5m"], vocab_size=256, max_seq_len=128)
SPARSE = replace(qwen3_moe.FLAVORS["debug-1m"], vocab_size=256, max_seq_len=128)
SHAPES: dict[str, Config] = {
    "llama3_tied": LLAMA,
    "llama3_untied": replace(LLAMA, tie_embeddings=False),
    "llama3_one_kv_head": replace(LLAMA, num_kv_heads=1),
    "llama3_full_heads": replace(LLAMA, num_kv_heads=4, tie_embeddings=False),
    "llama3_wide_heads": replace(LLAMA, head_dim=32, tie_embeddings=False),
    "llama3_scaled": replace(LLAMA, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    "qwen3_tied": DENSE,
    "qwen3_untied": replace(DENSE, tie_embeddings=False),
    "qwen3_one_kv_head": replace(DENSE, num_kv_heads=1),
    "qwen3_full_heads": replace(DENSE, num_kv_heads=4, tie_embeddings=False),
    "qwen3_narrow_heads": replace(DENSE, head_dim=16),
    "moe": SPARSE,
    "moe_tied": replace(SPARSE, tie_embeddings=True, dense_layers=()),
    "moe_unscaled": replace(SPARSE, norm_topk_prob=False, experts_per_token=3),
    "moe_every_second": replace(SPARSE, sparse_step=2, dense_layers=(3,)),
    "moe_one_expert_each": replace(SPARSE, experts_per_token=1, num_experts=3),
}


def build(config: Config) -> Any:
    if isinstance(config, Llama3Config):
        return Llama3(config)
    return Qwen3Moe(config) if isinstance(config, Qwen3MoeConfig) else Qwen3(config)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_folder_gives_the_same_logits_and_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Weights that transformers saved give its logits here, and are the same tensors after an export."""
    twin = theirs(SHAPES[name].to_hf(), tmp_path / "theirs")
    config = type(SHAPES[name]).from_hf(twin.config.to_dict())
    assert config == SHAPES[name]
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu").eval()
    load(model, tmp_path / "theirs")
    assert logits(twin, TOKENS).abs().max() > 0.1
    assert gap(model, twin, TOKENS) <= 1e-5
    export(model, tmp_path / "ours")
    assert_same_bytes(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("name", list(SHAPES))
def test_an_export_opens_in_transformers_with_the_native_logits(name: str, tmp_path: Path) -> None:
    """Initial values of this model, exported, are read by from_pretrained without a warning, and compute the same."""
    torch.manual_seed(2)
    model = build(SHAPES[name]).eval()
    model.init_weights()
    export(model, tmp_path / "ours")
    twin = open_strictly(auto, tmp_path / "ours")
    assert gap(model, twin, TOKENS) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_narrow_heads"])
def test_in_bfloat16_over_float32_weights_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Under autocast norms keep the wider dtype, as theirs do; what is left is less than bfloat16 rounds by."""
    twin = theirs(SHAPES[name].to_hf(), tmp_path)
    model = build(SHAPES[name]).eval()
    load(model, tmp_path)
    exact = logits(twin, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        here, there = logits(model, TOKENS), logits(twin, TOKENS)
    assert (here - there).abs().max() < 0.5 * (there - exact).abs().max()


def test_experts_are_stacked_in_memory_and_apart_on_disk(tmp_path: Path) -> None:
    """One parameter per projection holds all experts; the folder has a matrix per expert, as the published ones do."""
    theirs(SPARSE.to_hf(), tmp_path)
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    model = Qwen3Moe(SPARSE)
    load(model, tmp_path)
    files = tensors(tmp_path)
    for fqn, value in model.state_dict().items():
        if ".experts." in fqn:
            layer, name = fqn.split(".")[1], fqn.split(".")[-1]
            for e in range(SPARSE.num_experts):
                key = f"model.layers.{layer}.mlp.experts.{e}.{names[name]}.weight"
                assert torch.equal(value[e], files.pop(key))
    assert not [key for key in files if ".experts." in key]


@pytest.mark.parametrize(("family", "flavor"), [(llama3, "8B"), (qwen3, "0.6B"), (qwen3, "8B"), (qwen3_moe, "30B-A3B")])
def test_the_true_shapes_are_understood_by_transformers(family: Any, flavor: str) -> None:
    """Built on meta from our config.json, transformers' model has as many parameters, and the same rotary base."""
    config = family.FLAVORS[flavor]
    with torch.device("meta"):
        twin = auto.from_config(AutoConfig.for_model(**config.to_hf()))
        model = build(config)
    assert twin.num_parameters() == sum(p.numel() for p in model.parameters())
    assert twin.config.rope_parameters["rope_theta"] == (5e5 if family is llama3 else 1e6)
    if family is llama3:
        assert twin.config.rope_parameters["rope_type"] == "llama3"
        assert twin.config.rope_parameters["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize("flavor", ["1B", "3B", "8B", "70B"])
def test_rotary_frequencies_of_the_true_shapes_are_those_of_transformers(flavor: str) -> None:
    """The scaled frequencies are bit-equal, so the angles agree even at position 131071."""
    config = replace(llama3.FLAVORS[flavor], max_seq_len=2)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig.from_dict(llama3.FLAVORS[flavor].to_hf()), torch.device("cpu")
    )
    angles = llama3.rotary_table(config)[1].angle()
    assert (angles - expected).abs().max() <= 1.2e-7
    assert torch.equal(llama3.rotary_table(config)[1], torch.polar(torch.ones_like(expected), expected))
