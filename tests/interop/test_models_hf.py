"""Models of transformers, trained under their own names: folders in and out, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.interop.folders import export, gap, load, logits, open_strictly, theirs
from tests.unit.models.test_hf import SMALL as THREE_LAYERS
from tests.world import assert_same_bytes, shard, tensors
from titan_ckpt.models import hf
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


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_folder_gives_its_logits_and_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Built on meta from the folder, filled from it, and exported: the same logits, and the same tensors on disk."""
    twin = theirs(CONFIGS[name], tmp_path / "theirs")
    with torch.device("meta"):
        model = hf.build(tmp_path / "theirs")
    model.to_empty(device="cpu").eval()
    load(model, tmp_path / "theirs")
    tokens = torch.randint(3, 64, (2, 30))
    assert logits(twin, tokens).abs().max() > 0.1
    assert gap(model, twin, tokens) <= 1e-5
    export(model, tmp_path / "ours")
    assert_same_bytes(tmp_path / "theirs", tmp_path / "ours")
    again = open_strictly(auto, tmp_path / "ours")
    assert torch.equal(logits(again, tokens), logits(twin, tokens))


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
        torch.nn.functional.cross_entropy(predicted.flatten(0, 1), mine[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    export(model, folder / "trained")
