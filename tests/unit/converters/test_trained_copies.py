"""modules_to_save: a trained copy computes and returns exactly what the exported module will."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from titan_ckpt.converters import LoRAConfig, ModelConvertersContainer, build
from titan_ckpt.converters.parallel import ConvertedParallel
from titan_ckpt.errors import ConverterError
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.models import hf
from titan_ckpt.weights.wrapper import ModelWrapper


class Mixed(nn.Module):
    """Two dtypes, a buffer that counts, an argument by name, and results of several types in one structure."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, shift: float) -> dict[str, Any]:
        self.calls += 1
        return {"low": x * self.weight + shift, "high": [x.double() * self.scale, None], "order": x.argsort(-1)}


def router() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=8, num_experts=6, num_experts_per_tok=2)
    kind: Any = Qwen3MoeTopKRouter
    made: nn.Module = kind(config).bfloat16()
    nn.init.normal_(made.get_parameter("weight"))
    return made


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": (lambda: nn.RMSNorm(8).bfloat16(), {}),
    "lstm": (lambda: nn.LSTM(8, 4), {}),
    "lstm in bfloat16": (lambda: nn.LSTM(8, 4).bfloat16(), {}),
    "router": (router, {}),
    "mixed": (Mixed, {"shift": 0.25}),
}


def trained(module: nn.Module) -> tuple[Any, ModelConvertersContainer]:
    """A model whose module `m` is trained in full beside an adapter, after one step."""
    model = nn.ModuleDict({"m": module, "up": nn.Linear(8, 8)})
    converters = build([LoRAConfig(("up",), rank=2, modules_to_save=("m",))])
    converters.convert(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if converters.key_filter(name):
                parameter.normal_(0, 0.3)
    return model, converters


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("name", CASES)
def test_a_trained_copy_computes_what_is_exported(name: str) -> None:
    """Tuples, dicts and named arguments pass; each result has the values and the dtype of the exported module."""
    make, keywords = CASES[name]
    model, converters = trained(make())
    exported = make()
    values = ModelWrapper([model], converters).state_dict("export")
    blocks = {fqn[2:]: next(iter(blocks_of(v))).data for fqn, v in values.items() if fqn.startswith("m.")}
    exported.load_state_dict(blocks)
    x = torch.randn(3, 8, dtype=next(exported.parameters()).dtype)
    got, expected = model["m"](x, **keywords), exported(x, **keywords)
    assert type(got) is type(expected) and len(tensors(got)) == len(tensors(expected)) > 0
    for ours, theirs in zip(tensors(got), tensors(expected), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    sum(t.float().sum() for t in tensors(got) if t.is_floating_point()).backward()  # type: ignore[union-attr]
    for parameter_name, parameter in model["m"].named_parameters():
        assert (parameter.grad is not None) == parameter_name.startswith("trained.")
        assert not parameter_name.startswith("trained.") or parameter.dtype == torch.float32


def test_hooks_of_the_module_run_once() -> None:
    """They run around the module; its copy has none of its own."""
    module, calls = nn.RMSNorm(8), []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    model, _ = trained(module)
    model["m"](torch.randn(2, 8))
    assert calls == ["before", "after"]


def test_a_module_whose_forward_was_replaced_is_refused() -> None:
    """Its copy would never compute."""
    module: Any = nn.RMSNorm(8)
    module.forward = lambda x: x
    with pytest.raises(ConverterError, match="m: its forward was replaced on the module itself"):
        trained(module)


UNCUT: dict[str, tuple[dict[str, Any], bool, str]] = {
    "biases": ({"bias": "all"}, False, "model.layers.0.self_attn.k_proj"),
    "a bias of B": ({"lora_bias": True}, False, "model.layers.0.self_attn.q_proj"),
    "rows": ({"trainable_token_indices": {"embed_tokens": (3,)}}, False, "model.embed_tokens"),
    "rows of a tied table": ({"trainable_token_indices": {"embed_tokens": (3,)}}, True, "lm_head"),
    "a trained copy": ({"modules_to_save": ("lm_head",)}, False, "lm_head"),
    "a frozen copy": ({"frozen_copies": ("lm_head",)}, False, "lm_head"),
    "a tied adapter": ({"target_modules": ("embed_tokens",), "ensure_weight_tying": True}, True, "lm_head"),
    "a tied copy": ({"modules_to_save": ("embed_tokens",), "ensure_weight_tying": True}, True, "lm_head"),
}
"""Settings of LoRA, whether the model's head is tied, and a module that tensor parallelism would cut."""


@pytest.mark.parametrize("case", UNCUT)
def test_tensor_parallelism_refuses_what_it_cannot_cut(case: str) -> None:
    """A plan that names such a module is one error before the first step, and none within it."""
    settings, tied, name = UNCUT[case]
    config: Any = LlamaConfig
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    shape = config(**sizes, num_attention_heads=2, attention_bias=True, tie_word_embeddings=tied)
    model = hf.build(shape.to_dict())
    build([LoRAConfig(**{"target_modules": ("q_proj",), "rank": 2, **settings})]).convert(model)
    mesh: Any = None  # refused before it is looked at
    with pytest.raises(ConverterError, match="cannot be cut: tensor parallelism has no form for trained biases"):
        ConvertedParallel(ColwiseParallel())._apply(model.get_submodule(name), mesh)
