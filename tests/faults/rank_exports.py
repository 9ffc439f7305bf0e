"""Exports that two forked ranks make together, to be killed in: rows, columns, merged and staged weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo  # DTensor imports it at its first use: a second in every fork
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.faults.test_hf_export import CONFIG
from tests.world import llama, write_hf
from tests.world import manager as build
from titan_ckpt import ExportConfig
from titan_ckpt.config import InitialLoadConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.distributed.coordinator import Coordinator

ALONE = Coordinator(0, 1, None, "", 60.0)
_LORA = {"kind": "lora", "rank": 2, "target_modules": ["wq", "wo"]}
_WHOLE = {f"w{i}": torch.arange(1000 * 70).float().view(1000, 70) + i for i in range(3)} | {"norm": torch.ones(70)}


def prepare(root: Path) -> None:
    """Make what an export only reads: a Hugging Face folder with a tokenizer, as root/base."""
    model = llama(CONFIG, 1)
    write_hf(root / "base", dict(model.state_dict()), model.key_map(), config=model.hf_config(), line=ALONE)
    (root / "base" / "tokenizer.json").write_text("{}")


def join(line: Coordinator) -> None:
    """Join the ranks in a process group, which goes with its process."""
    if line.world_size > 1:
        store: Any = line._store
        store = dist.PrefixStore("group", store)
        timeout = timedelta(seconds=line.timeout_seconds)
        dist.init_process_group("gloo", rank=line.rank, world_size=line.world_size, store=store, timeout=timeout)


def _shards(dim: Literal[0, 1], root: Path, line: Coordinator) -> Callable[[], None]:
    """Export three matrices, of which each rank has a half of the rows or columns, and a vector that both have."""
    state: dict[str, Any] = dict(_WHOLE)
    if line.world_size > 1:
        mesh = init_device_mesh("cpu", (line.world_size,))
        for name in ("w0", "w1", "w2"):
            part = _WHOLE[name].chunk(line.world_size, dim)[line.rank].contiguous()
            state[name] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    folder, base = root / "exports" / "step-1", root / "base"
    return lambda: write_hf(folder, state, line=line, assets=base, max_shard_bytes=600_000)


def _run(mode: Literal["disabled", "thread"], root: Path, line: Coordinator) -> Callable[[], None]:
    """Save a step of a LoRA model, with an export of its merged weights: at once, or of what the save has staged."""
    converters = from_tables([_LORA])
    model = llama(CONFIG, converters=converters)
    if line.world_size > 1:
        for layer in model.layers.values():
            fully_shard(layer, mesh=init_device_mesh("cpu", (line.world_size,)))
    manager = build(
        root,
        model,
        async_mode=mode,
        timeout_seconds=line.timeout_seconds,
        initial_load=(InitialLoadConfig(str(root / "base")),),
        export=(ExportConfig("hf", interval=1),),
        model_converters=converters,
    )
    step = manager.load().step
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora" in name:
                (value.to_local() if isinstance(value, DTensor) else value).fill_(0.01)

    def save() -> None:
        assert manager._saver is not None
        manager._coordinator.timeout_seconds = manager._saver._coordinator.timeout_seconds = line.timeout_seconds
        with manager:
            manager.save(step + 1)

    return save


@dataclass(frozen=True)
class Kind:
    """A way to export. `make` prepares it on a rank and returns what is to be killed in."""

    name: str
    make: Callable[[Path, Coordinator], Callable[[], None]]

    def on_rank(self, root: Path, line: Coordinator) -> Callable[[], None]:
        join(line)
        return self.make(root, line)


KINDS = (
    Kind("rows", lambda root, line: _shards(0, root, line)),
    Kind("columns", lambda root, line: _shards(1, root, line)),
    Kind("merged", lambda root, line: _run("disabled", root, line)),
    Kind("staged", lambda root, line: _run("thread", root, line)),
)
