"""Models of transformers under their own names, and ours: folders in and out, on one process and on two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.interop.folders import export, gap, load, logits, open_strictly, theirs
from tests.unit.models.test_hf import SMALL as THREE_LAYERS
from tests.world import assert_same_bytes, learn, shard, tensors
from titan_ckpt.models import hf, llama3, qwen3, qwen3_moe
from titan_ckpt.models.llama3 import Llama3, Llama3Config, RopeScaling
from titan_ckpt.models.qwen3 import Qwen3, Qwen3Config
from titan_ckpt.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from titan_ckpt.testing import distributed

auto: Any = AutoModelForCausalLM  # its methods have no types

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 64, "bos_token_id": 1}
GPT2["eos_token_id"] = 2
SMALL: dict[str, Any] = THREE_LAYERS | {"num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama_tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "llama_untied": {"model_type": "llama", **SMALL},
    "gemma3_text": {"model_type": "gemma3_text", **SMALL, "layer_types": ["full_attention", "sliding_attention"]},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "gpt_oss": {"model_type": "gpt_oss", **SMALL},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL},
}


Config = Llama3Config | Qwen3Config | Qwen3MoeConfig
LONG = torch.arange(200).view(2, 100) * 7 % 256

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


def built(name: str, folder: Path) -> Any:
    """Build a model on meta from a folder of transformers."""
    with torch.device("meta"):
        if name not in SHAPES:
            return hf.build(folder)
        config = type(SHAPES[name]).from_hf(json.loads((folder / "config.json").read_text()))
        assert config == SHAPES[name]
        return build(config)


@pytest.mark.parametrize("name", [*CONFIGS, *SHAPES])
def test_a_folder_gives_its_logits_and_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Filled from what transformers wrote, and exported: its logits, the same tensors, and it opens without a word."""
    ours = SHAPES.get(name)
    twin = theirs(ours.to_hf() if ours else CONFIGS[name], tmp_path / "theirs")
    model = built(name, tmp_path / "theirs").to_empty(device="cpu").eval()
    load(model, tmp_path / "theirs")
    tokens = LONG if ours else torch.randint(3, 64, (2, 30))
    assert logits(twin, tokens).abs().max() > 0.1
    assert gap(model, twin, tokens) <= 1e-5
    export(model, tmp_path / "ours")
    assert_same_bytes(tmp_path / "theirs", tmp_path / "ours")
    assert torch.equal(logits(open_strictly(auto, tmp_path / "ours"), tokens), logits(twin, tokens))


SHARDED = ("llama_tied", "qwen3_moe")


def test_two_ranks_of_fsdp_read_and_write_the_same_folder(tmp_path: Path) -> None:
    """Sharded over its own layers, a model loads its slices, computes the whole model's logits, trains and exports.

    Five experts and odd vocabularies do not divide by two ranks; the export is the folder, byte for byte.
    """
    tokens = torch.randint(3, 63, (2, 30))
    for name in SHARDED:
        twin = theirs(CONFIGS[name] | {"vocab_size": 63}, tmp_path / name / "theirs")
        torch.save((tokens, logits(twin, tokens)), tmp_path / name / "expected.pt")
    _on_two_ranks(tmp_path)
    for name in SHARDED:
        assert_same_bytes(tmp_path / name / "theirs", tmp_path / name / "ours")
        trained, before = tensors(tmp_path / name / "trained"), tensors(tmp_path / name / "theirs")
        assert trained.keys() == before.keys()
        assert not [key for key, value in trained.items() if torch.equal(value, before[key])]


@distributed(nproc=2)
def _on_two_ranks(folder: Path) -> None:
    for name in SHARDED:
        _read_and_write(folder / name)


def _read_and_write(folder: Path) -> None:
    tokens, expected = torch.load(folder / "expected.pt")
    with torch.device("meta"):
        model = hf.build(folder / "theirs")
    shard(model)
    model.to_empty(device="cpu")
    load(model, folder / "theirs")
    assert all(isinstance(p, DTensor) for p in model.parameters())
    tied = model.config.tie_word_embeddings
    assert tied == (model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight"))
    assert (logits(model, tokens) - expected).abs().max() <= 1e-5
    export(model, folder / "ours")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = tokens[dist.get_rank()].unsqueeze(0)
    for _ in range(2):
        predicted = model(mine[:, :-1])
        learn(optimizer, torch.nn.functional.cross_entropy(predicted.flatten(0, 1), mine[:, 1:].flatten()))
    export(model, folder / "trained")


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_narrow_heads"])
def test_in_bfloat16_over_float32_weights_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Under autocast norms keep the wider dtype, as theirs do; what is left is less than bfloat16 rounds by."""
    twin = theirs(SHAPES[name].to_hf(), tmp_path)
    model = build(SHAPES[name]).eval()
    load(model, tmp_path)
    exact = logits(twin, LONG)
    with torch.autocast("cpu", torch.bfloat16):
        here, there = logits(model, LONG), logits(twin, LONG)
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
