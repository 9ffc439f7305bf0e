"""Many small tensors, and an optimizer of many parameters: where planning and bookkeeping are all the time.

python -m benchmarks.many_tensors [--tensors N] [--nproc N] [--pairs N] [--json]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    StateDict,
    alternate,
    clean_folder,
    folder_bytes,
    local,
    local_bytes,
    measures,
    parse,
    rank,
    report,
    run,
    world_size,
)
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.disk import posix
from titan_ckpt.disk.files import IO_BYTES
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.geometry.chunks import Block, blocks_of
from titan_ckpt.process import gc_paused

OURS, DCP = "titan_ckpt", "dcp"
FIRST, AGAIN = "titan_ckpt, first", "titan_ckpt, plan kept"
LIMIT_WRITE, LIMIT_READ = "limit: O_DIRECT write of the bytes", "limit: read() of the page cache"
END_TO_END_PARAMETERS = 5_000


def main(options: Options) -> dict[str, Any]:
    """Compare a first save, a later one, and a load; then a whole training state through CheckpointManager."""
    state = small_tensors(options.tensors)
    folder = Path(options.folder)
    first, again = _save(options, state, folder)
    found = {"save_first": first, "save_again": again, "load": _load(options, state, folder)}
    end_to_end = replace(options, tensors=min(options.tensors, END_TO_END_PARAMETERS))
    return found | {"end_to_end": _end_to_end(end_to_end, folder)}


def small_tensors(number: int) -> StateDict:
    """Return matrices of 256 bytes, as experts of a small mixture have them, sharded over all ranks."""
    names = [f"layers.{i // 64}.moe.experts.{i % 64}.w.weight" for i in range(number)]
    if world_size() == 1:
        return {name: torch.full((8, 8), float(i)) for i, name in enumerate(names)}
    mesh = init_device_mesh("cpu", (world_size(),))
    rows = 8 // world_size()
    return {
        name: DTensor.from_local(torch.full((rows, 8), float(i)), mesh, [Shard(0)], run_check=False)
        for i, name in enumerate(names)
    }


def _save(options: Options, state: StateDict, folder: Path) -> tuple[dict[str, float | int], dict[str, float | int]]:
    """Measure a first save, which plans, and a later one, which kept the plan; peers that keep theirs count in both."""
    coordinator = Coordinator.current()
    kept = WritePlan.of(state, coordinator)
    cached = DefaultSavePlanner(enable_plan_caching=True)
    buffers = raw.make_buffers()
    size = max(IO_BYTES, local_bytes(state))

    def ours(last: WritePlan | None) -> None:
        WritePlan.of(state, coordinator, last).write(folder, state)
        coordinator.barrier("written")
        if rank() == 0:
            posix.fsync_folder(folder)

    def saved_by(save: Callable[[StateDict, Path], None], suffix: str) -> Case:
        def case() -> None:
            path = folder / f"{rank()}{suffix}"
            save({fqn: local(tensor) for fqn, tensor in state.items()}, path)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

        return case

    cases: dict[str, Case] = {
        FIRST: lambda: ours(None),
        AGAIN: lambda: ours(kept),
        DCP: lambda: dcp.save(dict(state), checkpoint_id=folder),
        "dcp, plan cached": lambda: dcp.save(dict(state), checkpoint_id=folder, planner=cached),
        "torch.save + fsync, a file per rank": saved_by(torch.save, ".pt"),
        "safetensors + fsync, a file per rank": saved_by(safetensors.torch.save_file, ".safetensors"),
        LIMIT_WRITE: lambda: raw.write_direct(folder / f"{rank()}.raw", size, buffers),
    }
    times = alternate(cases, options.pairs, lambda _: clean_folder(folder), steady=(DCP,))
    total = local_bytes(state) * world_size()
    report(f"a save of {len(state)} tensors, {world_size()} rank(s)", times, total)
    peers = [name for name in cases if name not in (FIRST, AGAIN, LIMIT_WRITE)]

    def measured(name: str) -> dict[str, float | int]:
        clean_folder(folder)
        with PeakMemory() as peak:
            cases[name]()
        written = folder_bytes(folder)
        return measures(times, name, DCP, peers, LIMIT_WRITE, bytes_written=written, extra_peak_mib=peak.mib)

    return measured(FIRST), measured(AGAIN)


def _load(options: Options, state: StateDict, folder: Path) -> dict[str, float | int]:
    clean_folder(folder)
    dcp.save(dict(state), checkpoint_id=folder / "dcp")
    clean_folder(folder / "native")
    clean_folder(folder / "files")
    coordinator = Coordinator.current()
    WritePlan.of(state, coordinator).write(folder / "native", state)
    path = folder / "files" / f"{rank()}.safetensors"
    safetensors.torch.save_file({fqn: local(tensor) for fqn, tensor in state.items()}, path)
    last = list(state)[-1]
    expected = local(state[last]).clone()
    buffers = raw.make_buffers()

    def ours() -> None:
        with gc_paused(), NativeReader(folder / "native") as reader:
            requests = [Block(b.chunk, b.data, fqn) for fqn, tensor in state.items() for b in blocks_of(tensor)]
            reader.read(requests)

    def safetensors_load() -> None:
        source = safetensors.torch.load_file(path)
        torch._foreach_copy_([local(tensor) for tensor in state.values()], [source[fqn] for fqn in state])

    def proved(case: Case) -> Case:
        def prove() -> None:
            case()
            assert torch.equal(local(state[last]), expected)

        return prove

    cases: dict[str, Case] = {
        OURS: proved(ours),
        DCP: proved(lambda: dcp.load(dict(state), checkpoint_id=folder / "dcp")),
        "safetensors load_file + foreach copy": proved(safetensors_load),
        LIMIT_READ: lambda: raw.read(folder / "native" / f"rank-{rank():05d}.safetensors", buffers, direct=False),
    }
    times = alternate(cases, options.pairs, lambda _: local(state[last]).zero_(), steady=(DCP,))
    report(f"a load of {len(state)} tensors, {world_size()} rank(s)", times, local_bytes(state) * world_size())
    with PeakMemory() as peak:
        ours()
    peers = [DCP, "safetensors load_file + foreach copy"]
    return measures(times, OURS, DCP, peers, LIMIT_READ, bytes_written=0, extra_peak_mib=peak.mib)


class _Many(nn.Module):
    """A model of as many parameters as are asked for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(number))


def _end_to_end(options: Options, folder: Path) -> dict[str, float | int]:
    """Save and load model, AdamW state and all else, restored: one measure for both together."""
    model = _Many(options.tensors)
    if world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    expected = [local(p.detach()).clone() for p in model.parameters()][-1]
    config = CheckpointConfig(folder="run", save=SaveConfig(interval=1, async_mode="disabled"))

    def spoil() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).zero_()
                for value in optimizer.state[parameter].values():
                    local(value).zero_()

    def check() -> None:
        last = list(model.parameters())[-1]
        assert torch.equal(local(last.detach()), expected)
        assert float(optimizer.state[last]["step"]) == 1.0

    def ours() -> None:
        with CheckpointManager(config, model_parts=[model], optimizers=[optimizer], base_folder=folder) as manager:
            manager.save(1)
            spoil()
            assert manager.load().step == 1
        check()

    def torchtitan() -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(model, optimizer, options=flat)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        spoil()
        weights, moments = get_state_dict(model, optimizer, options=flat)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=flat)
        check()

    buffers = raw.make_buffers()
    size = max(IO_BYTES, 3 * sum(local(p).nbytes for p in model.parameters()))
    cases: dict[str, Case] = {
        OURS: ours,
        DCP: torchtitan,
        LIMIT_WRITE: lambda: raw.write_direct(folder / f"{rank()}.raw", size, buffers),
    }
    times = alternate(cases, options.pairs, lambda _: clean_folder(folder), steady=(DCP,))
    report(f"save and load of {options.tensors} parameters with AdamW, {world_size()} rank(s)", times, 0)
    clean_folder(folder)
    with PeakMemory() as peak:
        ours()
    written = folder_bytes(folder)
    return measures(times, OURS, DCP, [DCP], LIMIT_WRITE, bytes_written=written, extra_peak_mib=peak.mib)


if __name__ == "__main__":
    run(parse("saves and loads of many small tensors"), main)
