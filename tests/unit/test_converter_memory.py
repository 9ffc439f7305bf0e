"""Merging holds one tensor at a time."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch import nn
from converters import LoRAConfig, build
from titan_ckpt.model_wrapper import ModelWrapper
from titan_ckpt.tensors import blocks_of

WIDTH, LAYERS = 2048, 8
torch.set_num_threads(1)

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
converters = build([LoRAConfig(tuple(str(i) for i in range(LAYERS)), rank=4)])
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
print((resident("VmHWM") - before) / (WIDTH * WIDTH * 4))
"""


def test_a_merge_takes_the_memory_of_one_tensor() -> None:
    """The peak while all of a model is merged and dropped is one weight above the model, not a second model."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.2, done.stdout
