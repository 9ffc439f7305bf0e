"""Folders as they are published: every spelling that from_pretrained reads is read, and nothing else is ignored."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import world
from tests.interop.folders import theirs
from tests.interop.test_models_hf import GPT2
from tests.interop.test_models_hf import SMALL as TWO_LAYERS
from titan_ckpt import ExportConfig
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.models import hf
from titan_ckpt.types import LoadReport

auto: Any = AutoModelForCausalLM  # its methods have no types
Tensors = dict[str, torch.Tensor]
TOKENS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))

SMALL: dict[str, Any] = TWO_LAYERS | {"num_experts": 4}
del SMALL["num_local_experts"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama_tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL},
    "glm4_moe": {"model_type": "glm4_moe", **SMALL, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "tie_word_embeddings": False},
    "bert": {"model_type": "bert", **SMALL, "is_decoder": True},
    "camembert": {"model_type": "camembert", **SMALL, "is_decoder": True},
}  # fmt: skip


def write(folder: Path, name: str) -> Tensors:
    """Write transformers' folder of this config with random weights, and return its tensors."""
    theirs(CONFIGS[name], folder)
    return world.tensors(folder)


def rewrite(folder: Path, tensors: Tensors) -> None:
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def train_once(base: Path, folder: Path) -> tuple[hf.HuggingFaceModel, LoadReport]:
    """Load a folder through the manager without taking a step, and export it again."""
    model = hf.build(base)
    report = world.finish(world.manager(folder, model, initial_load=[base], export=(ExportConfig("hf"),))).report
    return model.eval(), report


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """Return the logits of transformers' own model of a folder."""
    result: torch.Tensor = auto.from_pretrained(folder).eval()(input_ids=TOKENS).logits
    return result


def without_prefix(tensors: Tensors) -> Tensors:
    return {key.removeprefix("model.").removeprefix("transformer."): value for key, value in tensors.items()}


def with_prefix(tensors: Tensors) -> Tensors:
    return {f"bert.{key}" if key.startswith("cls.") else key: value for key, value in tensors.items()}


def with_buffers(tensors: Tensors) -> Tensors:
    return without_prefix(tensors) | {f"h.{i}.attn.bias": torch.ones(1, 1, 40, 40) for i in range(2)}


def with_masks(tensors: Tensors) -> Tensors:
    masks = {"bias": torch.ones(1, 1, 40, 40), "masked_bias": torch.tensor(-1e4)}
    return tensors | {f"transformer.h.{i}.attn.{name}": mask.clone() for i in range(2) for name, mask in masks.items()}


def with_scale(tensors: Tensors) -> Tensors:
    return tensors | {"model.embed_tokens.embed_scale": torch.tensor(9.0)}


def with_frequencies(tensors: Tensors) -> Tensors:
    return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


def with_next_token_layer(tensors: Tensors) -> Tensors:
    layer = {key.replace("layers.1.", "layers.46."): value for key, value in tensors.items() if "layers.1." in key}
    return tensors | {key: value.clone() for key, value in layer.items()}


def with_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": next(v for k, v in tensors.items() if "embed" in k or "wte" in k).clone()}


def head_alone(tensors: Tensors) -> Tensors:
    return {key.replace("model.embed_tokens.", "lm_head."): value for key, value in tensors.items()}


def with_old_norms(tensors: Tensors) -> Tensors:
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {key.replace(*item): v for key, v in tensors.items() for item in [next_name(key, names)]}


def next_name(key: str, names: dict[str, str]) -> tuple[str, str]:
    return next(((old, new) for old, new in names.items() if key.endswith(old)), ("", ""))


def stacked_experts(tensors: Tensors) -> Tensors:
    plain = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {p: [tensors[f"{experts}.{i}.{p}_proj.weight"] for i in range(4)] for p in ("gate", "up", "down")}
        pairs = zip(parts["gate"], parts["up"], strict=True)
        plain[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        plain[f"{experts}.down_proj"] = torch.stack(parts["down"])
    return plain


EDITS: dict[str, tuple[str, Callable[[Tensors], Tensors], int]] = {
    "without the base's prefix": ("llama", without_prefix, 0),
    "without prefix, with buffers": ("gpt2", with_buffers, 2),
    "with masks of old releases": ("gpt2", with_masks, 4),
    "with a scale of embeddings": ("gemma3", with_scale, 1),
    "with rotary frequencies": ("llama", with_frequencies, 2),
    "with a layer that predicts further tokens": ("glm4_moe", with_next_token_layer, 23),
    "with the tied head": ("llama_tied", with_head, 0),
    "with a tied head of another name": ("gpt2", with_head, 0),
    "with the tied head alone": ("llama_tied", head_alone, 0),
    "with old names of norms": ("bert", with_old_norms, 0),
    "with experts as in memory": ("qwen3_moe", stacked_experts, 0),
    "head before the body": ("camembert", dict, 0),
}
"""Content of a folder -> (model, change of its tensors, number of ignored tensors)."""


@pytest.mark.parametrize("edit", list(EDITS))
def test_every_spelling_that_from_pretrained_reads_is_read(
    edit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The logits are transformers' own, what is ignored is reported once, and the export has the folder's tensors."""
    name, change, num_ignored = EDITS[edit]
    tensors = change(write(tmp_path / "base", name))
    rewrite(tmp_path / "base", tensors)
    with caplog.at_level(logging.INFO, "titan_ckpt"):
        model, report = train_once(tmp_path / "base", tmp_path / "run")
    expected = logits(tmp_path / "base")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected)
    assert len(report.ignored) == num_ignored
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("titan_ckpt")]
    assert sum("ignored" in message for message in ours) == (num_ignored > 0)
    exported = load_file(tmp_path / "run/exports/step-1/model.safetensors")
    assert torch.equal(logits(tmp_path / "run/exports/step-1"), expected)
    assert exported.keys() <= tensors.keys() - {*report.ignored}
    assert all(torch.equal(value, tensors[key]) for key, value in exported.items())


def test_a_tensor_that_nothing_declares_is_refused(tmp_path: Path) -> None:
    """A leftover that is in none of transformers' lists may be a weight that the model lacks."""
    rewrite(tmp_path / "base", write(tmp_path / "base", "llama") | {"model.layers.2.mlp.up_proj.weight": torch.ones(2)})
    with pytest.raises(LoadMismatchError, match=r"1 that the model does not have: model\.layers\.2\.mlp\.up_proj") as e:
        train_once(tmp_path / "base", tmp_path / "run")
    assert str(e.value).endswith("does not need in checkpoint.initial_load.ignore"), "no guess at another model"


def test_floats_that_json_lacks_are_read_and_written(tmp_path: Path) -> None:
    """Infinity stands in config.json as transformers writes it, in the folder and in the export."""
    shape = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
    CONFIGS["mamba2"] = {"model_type": "mamba2", **SMALL, **shape}
    write(tmp_path / "base", "mamba2")
    limits = [json.loads((tmp_path / "base/config.json").read_text())["time_step_limit"]]
    model, _ = train_once(tmp_path / "base", tmp_path / "run")
    assert math.isinf(model.hf_config()["time_step_limit"][1])
    limits += [json.loads((tmp_path / "run/exports/step-1/config.json").read_text())["time_step_limit"]]
    assert limits == [[0.0, {"__float__": "Infinity"}]] * 2
