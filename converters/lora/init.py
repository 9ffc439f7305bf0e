"""Initial values of adapters: equal for any number of ranks, and drawn without the run's generators.

Owns the initial values of A, B, magnitudes and trained copies. Source of the distributions: peft, tuners/lora/layer.py
reset_lora_parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from titan_ckpt.converters.lora.copies import TrainedCopy
from titan_ckpt.converters.lora.layers import (
    AdaptedStacks,
    LoRAConv1D,
    LoRAEmbedding,
    LoRALinear,
    StackAdapter,
    child_weight,
)
from titan_ckpt.converters.lora.merge import whole
from titan_ckpt.geometry.chunks import blocks_of, fill


@torch.no_grad()
def initialize_adapter(module: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    """Set the tensors of an adapted module whose fqn is `wanted` to their initial values, under any sharding."""
    if isinstance(module, TrainedCopy):
        base = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for name, value in (*module.trained.named_parameters(), *module.trained.named_buffers()):
            if wanted(f"{fqn}.trained.{name}"):
                fill(value, whole(base[name]))
        return
    if isinstance(module, AdaptedStacks):
        for name in module.adapters:
            _initialize_stack(module.get_submodule(f"lora_{name}"), f"{fqn}.lora_{name}", wanted, seed)
        return
    assert isinstance(module, LoRALinear | LoRAEmbedding | LoRAConv1D)
    embedding = isinstance(module, LoRAEmbedding)
    random, zero = ("lora_b", "lora_a") if embedding else ("lora_a", "lora_b")
    if wanted(name := f"{fqn}.{random}.weight"):
        weight, generator = child_weight(module, random), _generator(name, seed)
        shape = weight.shape
        fill(weight, torch.randn(shape, generator=generator) if embedding else _linear_values(shape, generator))
    if wanted(f"{fqn}.{zero}.weight"):
        for block in blocks_of(child_weight(module, zero)):
            block.data.zero_()
    if module.adapter.magnitude and wanted(f"{fqn}.lora_magnitude.weight"):
        rows = torch.linalg.vector_norm(whole(module.get_parameter("weight")).float(), dim=1)
        fill(child_weight(module, "lora_magnitude"), rows)


def _initialize_stack(factors: nn.Module, fqn: str, wanted: Callable[[str], bool], seed: int) -> None:
    assert isinstance(factors, StackAdapter)
    if wanted(name := f"{fqn}.lora_a"):
        fill(factors.lora_a, _linear_values(factors.lora_a.shape, _generator(name, seed)))
    if wanted(f"{fqn}.lora_b"):
        for block in blocks_of(factors.lora_b):
            block.data.zero_()


def _linear_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return values of kaiming_uniform(a=sqrt(5)), as for a linear module."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator that depends only on the name and the seed, so it is equal on every rank."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
