"""Merging holds one tensor at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from torch import nn
from titan_ckpt.converters import LoRAConfig, build
from titan_ckpt.weights.wrapper import ModelWrapper
from titan_ckpt.geometry.chunks import blocks_of

WIDTH, LAYERS = 2048, 8
DTYPE, DORA = getattr(torch, sys.argv[1]), sys.argv[2] == "dora"
torch.set_num_threads(1)

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE) for _ in range(LAYERS)))
converters = build([LoRAConfig(tuple(str(i) for i in range(LAYERS)), rank=4, use_dora=DORA)])
converters.convert(model)
for name, parameter in model.named_parameters():
    if "lora_b" in name:
        nn.init.normal_(parameter)
wrapper = ModelWrapper([model], converters)

def export():
    for value in wrapper.state_dict("export").values():
        for block in blocks_of(value):
            assert block.data.shape == (WIDTH, WIDTH)
            del block  # as a writer does before it asks for the next

export()  # the libraries' own buffers
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")  # forget the peak so far
before = resident("VmRSS")
export()
print(resident("VmHWM") - before - WIDTH * WIDTH * DTYPE.itemsize)
"""


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "lora"), ("bfloat16", "dora")])
def test_a_merge_takes_the_memory_of_one_tensor(dtype: str, kind: str) -> None:
    """The peak while a model is merged and dropped is one weight above it, and 4 MiB for float32 values of parts."""
    command = [sys.executable, "-c", PROGRAM, dtype, kind]
    # what is freed is given back to the system, and counts when it is used again
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=at_once)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 20, done.stdout
