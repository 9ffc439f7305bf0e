"""Initial values of adapters: the same at every number of ranks, and drawn from no one's generator.

Owns what A, B, magnitudes and trained copies start as. Source of the distributions: peft, tuners/lora/layer.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from converters.lora_layers import (
    AdaptedStacks,
    LoRAEmbedding,
    LoRALinear,
    StackAdapter,
    TrainedCopy,
    child_weight,
)
from titan_ckpt.tensors import blocks_of, fill


@torch.no_grad()
def initialize_adapter(module: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    """Give those tensors of an adapted module that are `wanted`, by fqn, their initial values, on any sharding."""
    if isinstance(module, TrainedCopy):
        base = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for name, value in (*module.trained.named_parameters(), *module.trained.named_buffers()):
            if wanted(f"{fqn}.trained.{name}"):
                fill(value, _whole(base[name]))
        return
    if isinstance(module, AdaptedStacks):
        for name in module.adapters:
            _initialize_stack(module.get_submodule(f"lora_{name}"), f"{fqn}.lora_{name}", wanted, seed)
        return
    assert isinstance(module, LoRALinear | LoRAEmbedding)
    random, zero = ("lora_b", "lora_a") if isinstance(module, LoRAEmbedding) else ("lora_a", "lora_b")
    if wanted(name := f"{fqn}.{random}.weight"):
        weight = child_weight(module, random)
        draw = _embedding_values if isinstance(module, LoRAEmbedding) else _linear_values
        fill(weight, draw(weight.shape, _generator(name, seed)))
    if wanted(f"{fqn}.{zero}.weight"):
        for block in blocks_of(child_weight(module, zero)):
            block.data.zero_()
    if module.adapter.dora and wanted(f"{fqn}.lora_magnitude.weight"):
        rows = torch.linalg.vector_norm(_whole(module.weight).float(), dim=1)
        fill(child_weight(module, "lora_magnitude"), rows)


def _initialize_stack(factors: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    assert isinstance(factors, StackAdapter)
    if wanted(name := f"{fqn}.lora_a"):
        fill(factors.lora_a, _linear_values(factors.lora_a.shape, _generator(name, seed)))
    if wanted(f"{fqn}.lora_b"):
        for block in blocks_of(factors.lora_b):
            block.data.zero_()


def _linear_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """kaiming_uniform(a=sqrt(5)), the initial values of a linear module."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def _embedding_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Standard normal. Source: peft, tuners/lora/layer.py reset_lora_parameters."""
    return torch.randn(shape, generator=generator)


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator that depends on the name and the seed alone: the same on every rank."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with all its values. Collective for a sharded one."""
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach()
