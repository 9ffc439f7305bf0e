"""Merging holds one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.forked import memory_of
from titan_ckpt.converters import LoRAConfig, build
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.weights.wrapper import ModelWrapper

WIDTH, LAYERS = 2048, 8


@pytest.mark.parametrize(("dtype", "dora"), [(torch.float32, False), (torch.bfloat16, True)], ids=["lora", "dora"])
def test_a_merge_takes_the_memory_of_one_tensor(dtype: torch.dtype, dora: bool) -> None:
    """The peak while a model is merged and dropped is one weight above it, and 4 MiB for float32 values of parts."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))
    converters = build([LoRAConfig(tuple(str(i) for i in range(LAYERS)), rank=4, use_dora=dora)])
    converters.convert(model)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter)
    wrapper = ModelWrapper([model], converters)

    def export() -> None:
        for value in wrapper.state_dict("export").values():
            for block in blocks_of(value):
                assert block.data.shape == (WIDTH, WIDTH)
                del block  # as a writer does before it asks for the next

    peak, _ = memory_of(export, before=export)
    assert peak - WIDTH * WIDTH * dtype.itemsize < 4 << 20
