"""How long a save holds training up if the model's own hooks make a part of the state dict.

python -m benchmarks.own_state [--gb N] [--nproc N] [--pairs N] [--json]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.common import Options, alternate_in_two, clean_folder, parse, report, run, world_size
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig

WIDTH = 1024
LIVE, MADE = "live q, k and v", "fused, split by hooks"


class Block(nn.Module):
    """The matrices of a block of a transformer; those of q, k and v are fused or apart."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        names = {"qkv": 3 * WIDTH} if fused else dict.fromkeys("qkv", WIDTH)
        names |= dict.fromkeys(("o", "gate", "up", "down"), WIDTH)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, rows, bias=False) for name, rows in names.items()})
        if fused:
            hooked: Any = self.parts  # torch has no types for these methods
            hooked.register_state_dict_post_hook(_split)
            hooked.register_load_state_dict_pre_hook(_join)


def main(options: Options) -> dict[str, Any]:
    """Compare saves of the same weights, each from a manager of its own; staging is waited for at once."""
    count = max(1, int(options.gb * 1e9) // (7 * WIDTH * WIDTH * 4))
    folder = Path(options.folder)
    managers = {name: _manager(count, fused, folder / name) for name, fused in ((LIVE, False), (MADE, True))}
    steps = dict.fromkeys(managers, 0)

    def save(name: str) -> Callable[[], object]:
        steps[name] += 1
        managers[name].save(steps[name])
        managers[name].maybe_wait_for_staging()
        return managers[name].wait

    blocking, _ = alternate_in_two({name: partial(save, name) for name in managers}, options.pairs)
    num_bytes = count * 7 * WIDTH * WIDTH * 4
    report(f"a save holds training up, {num_bytes / 1e9:.2f} GB, {world_size()} rank(s)", blocking, num_bytes)
    for manager in managers.values():
        manager.close()
    clean_folder(folder)
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in blocking.items()}
    return {"seconds": medians, "ratio": round(medians[MADE] / medians[LIVE], 2), "pairs": options.pairs}


def _manager(count: int, fused: bool, folder: Path) -> CheckpointManager:
    model = nn.Sequential(*(Block(fused=fused) for _ in range(count)))
    if world_size() > 1:
        for block in model:
            fully_shard(block, mesh=init_device_mesh("cpu", (world_size(),)))
    manager = CheckpointManager(CheckpointConfig(save=SaveConfig(interval=1)), model_parts=[model], base_folder=folder)
    manager.load()
    return manager


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    parts = _gathered(state.pop(f"{prefix}qkv.weight")).chunk(3)
    state.update({f"{prefix}{name}.weight": part.contiguous() for name, part in zip("qkv", parts, strict=True)})


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}qkv.weight"] = torch.cat([_gathered(state.pop(f"{prefix}{name}.weight")) for name in "qkv"])


def _gathered(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


if __name__ == "__main__":
    run(parse("state that the model's own hooks make", gb=0.4), main)
