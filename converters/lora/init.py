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
from titan_ckpt.converters.lora.layers import AdaptedStacks, LoRAConv1D, LoRAEmbedding, LoRALinear
from titan_ckpt.converters.merge import whole
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
    assert isinstance(module, LoRALinear | LoRAEmbedding | LoRAConv1D | AdaptedStacks)
    for adapter in module.adapters.values() if isinstance(module, AdaptedStacks) else [module.adapter]:
        adapted = adapter.site.rpartition(".")[0] if adapter.operation == "stack" else adapter.site
        a, b, *lengths = (name.removeprefix(f"{adapted}.") for name in adapter.tensors)
        embedding = adapter.operation == "embedding"
        random, zero = (b, a) if embedding else (a, b)
        if wanted(name := f"{fqn}.{random}"):
            weight, generator = module.get_parameter(random), _generator(name, seed)
            draw = torch.randn if embedding else _linear_values
            fill(weight, draw(weight.shape, generator=generator))
        if wanted(f"{fqn}.{zero}"):
            for block in blocks_of(module.get_parameter(zero)):
                block.data.zero_()
        if lengths and wanted(f"{fqn}.{lengths[0]}"):
            rows = torch.linalg.vector_norm(whole(module.get_parameter("weight")).float(), dim=1)
            fill(module.get_parameter(lengths[0]), rows)


def _linear_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return values of kaiming_uniform(a=sqrt(5)), as for a linear module."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator that depends only on the name and the seed, so it is equal on every rank."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
