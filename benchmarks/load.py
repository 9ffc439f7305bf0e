"""A load of a training state into live tensors, digests checked: python -m benchmarks.load [--gb N].

Beside the reader's own load stands that of CheckpointManager.load, which rolls a whole run back: plan, agreement of all
ranks, weights, optimizer and schedule, counters and generators.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    StateDict,
    alternate,
    barrier,
    bring_into_page_cache,
    clean_folder,
    drop_from_page_cache,
    local,
    local_bytes,
    measures,
    parse,
    rank,
    report,
    run,
    touch_free_memory,
    training_state,
    world_size,
)
from titan_ckpt import CheckpointConfig, CheckpointManager, SaveConfig
from titan_ckpt.disk.kernel import Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.reading import engine
from titan_ckpt.geometry.chunks import Block, blocks_of
from titan_ckpt.process import gc_paused

OURS, DCP = "titan_ckpt", "dcp.load"
WHOLE = "titan_ckpt, the whole of CheckpointManager.load"
UNVERIFIED = "titan_ckpt without digests"
LIMIT_CACHED, LIMIT_DIRECT = "limit: memcpy", "limit: O_DIRECT read"


def main(options: Options) -> dict[str, Any]:
    """Compare warm and cold, in the layout of the save and in another one."""
    folder = Path(options.folder)
    state = training_state(options.gb)
    _save(folder, state)
    _save_for_peers(folder, state)
    true_ends = {fqn: ends(tensor) for fqn, tensor in state.items()}
    manager = _save_by_manager(folder / "run", state)
    cases = _cases(folder, state) | {WHOLE: lambda: manager.load(1)}
    _check_digests(folder / "native", cases[OURS])
    _check_digests(folder / "run" / "checkpoints" / "step-1", cases[WHOLE])
    total = local_bytes(state) * world_size()
    found: dict[str, Any] = {}
    for kind, limit in (("warm", LIMIT_CACHED), ("cold", LIMIT_DIRECT)):

        def before(name: str, kind: str = kind) -> None:
            spoil(state)
            (bring_into_page_cache if kind == "warm" else drop_from_page_cache)(folder / _folder_of(name))
            touch_free_memory(local_bytes(state))

        chosen = {name: case for name, case in cases.items() if not name.startswith("limit") or name == limit}
        times = alternate(chosen, options.pairs, before, after=proof(state, true_ends))
        report(f"load, {kind}, {total / 1e9:.2f} GB, {world_size()} rank(s)", times, total)
        before(OURS)
        with PeakMemory() as peak:
            cases[OURS]()
        peers = [name for name in chosen if "titan_ckpt" not in name and name != limit]
        for key, ours in ((kind, OURS), (f"{kind}_manager", WHOLE)):
            found[key] = measures(times, ours, DCP, peers, limit, bytes_written=0, extra_peak_mib=peak.mib)
    manager.close()
    found["resharded"] = _resharded(options, state)
    return found


def _resharded(options: Options, state: StateDict) -> dict[str, Any]:
    """Load, from the page cache, what was saved as row shards on 2 ranks: as columns, or whole on one rank."""
    folder = Path(options.folder) / "resharded"
    if world_size() > 1:
        _save(folder, state)
        state = training_state(options.gb, Shard(1))
    else:
        run(replace(options, nproc=2, folder=str(folder), json=False), _save_in_rows, keep=True)
    cases = {name: case for name, case in _cases(folder, state).items() if name in (OURS, DCP, LIMIT_CACHED)}

    def before(_: str) -> None:
        spoil(state)
        bring_into_page_cache(folder)
        touch_free_memory(local_bytes(state))

    times = alternate(cases, options.pairs, before)
    total = local_bytes(state) * world_size()
    report(f"load, warm, saved in rows on 2 ranks, {total / 1e9:.2f} GB, {world_size()} rank(s)", times, total)
    before(OURS)
    with PeakMemory() as peak:
        cases[OURS]()
    return measures(times, OURS, DCP, [DCP], LIMIT_CACHED, bytes_written=0, extra_peak_mib=peak.mib)


def _save_in_rows(options: Options) -> None:
    _save(Path(options.folder), training_state(options.gb))


def _save(folder: Path, state: StateDict) -> None:
    clean_folder(folder / "dcp")
    dcp.save(dict(state), checkpoint_id=folder / "dcp")
    clean_folder(folder / "native")
    WritePlan.of(state, Coordinator.current()).write(folder / "native", state)


def _save_for_peers(folder: Path, state: StateDict) -> None:
    tensors = {fqn: local(tensor) for fqn, tensor in state.items()}
    clean_folder(folder / "files")
    torch.save(tensors, folder / "files" / f"{rank()}.pt")
    safetensors.torch.save_file(tensors, folder / "files" / f"{rank()}.safetensors")


class _Named(nn.Module):
    """A model whose parameters are the weights of a state; the other tensors become the moments of its optimizer."""

    def __init__(self, state: StateDict) -> None:
        super().__init__()
        for fqn in [fqn for fqn in state if fqn.startswith("model.")]:
            *path, name = fqn.removeprefix("model.").split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(name, nn.Parameter(state[fqn]))


def manager_of(state: StateDict, base_folder: Path, /, **settings: Any) -> CheckpointManager:
    """Return the manager of a run whose live tensors are those of the state."""
    model = _Named(state)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for name, parameter in model.named_parameters():
        moments = {key: state[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    config = CheckpointConfig(save=SaveConfig(interval=1, async_mode="disabled"), **settings)
    return CheckpointManager(
        config, model_parts=[model], optimizers=[optimizer], lr_schedulers=[schedule], base_folder=base_folder
    )


def _save_by_manager(folder: Path, state: StateDict) -> CheckpointManager:
    """Save the state as a run does, and load it once; return the run's manager."""
    clean_folder(folder)
    manager = manager_of(state, folder)
    manager.save(1)
    manager.load(1)
    return manager


def _check_digests(folder: Path, load: Case) -> None:
    """Check that a load with a flipped bit raises, so that what is measured verifies what it reads."""
    path = folder / f"rank-{rank():05d}.safetensors"
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        (byte,) = file.read(1)
        for value in (byte ^ 1, byte):
            barrier()
            file.seek(-100, os.SEEK_END)
            file.write(bytes([value]))
            file.flush()
            barrier()
            try:
                load()
            except CheckpointError:
                assert value != byte
            else:
                assert value == byte


def _folder_of(case: str) -> str:
    if case == WHOLE:
        return "run"
    return "dcp" if case == DCP else "native" if "titan_ckpt" in case or "limit" in case else "files"


def _cases(folder: Path, state: StateDict) -> dict[str, Case]:
    path = folder / "files" / f"{rank()}.safetensors"
    pickled = folder / "files" / f"{rank()}.pt"
    coordinator = Coordinator.current()
    buffers = raw.make_buffers()
    copied = Buffer.allocate(local_bytes(state))
    copied.tensor.fill_(1)

    def copy_from(source: StateDict) -> None:
        for fqn, tensor in state.items():
            local(tensor).copy_(source[fqn])

    def opened() -> None:
        with safetensors.safe_open(path, "pt") as file:
            for fqn, tensor in state.items():
                local(tensor).copy_(file.get_tensor(fqn))

    own_file = folder / "native" / f"rank-{rank():05d}.safetensors"
    return {
        OURS: lambda: _load(folder / "native", state, coordinator),
        UNVERIFIED: lambda: _load_unverified(folder / "native", state, coordinator),
        DCP: lambda: dcp.load(dict(state), checkpoint_id=folder / "dcp"),
        "torch.load + copy_": lambda: copy_from(torch.load(pickled)),
        "torch.load(mmap) + copy_": lambda: copy_from(torch.load(pickled, mmap=True)),
        "safetensors load_file + copy_": lambda: copy_from(safetensors.torch.load_file(path)),
        "safetensors safe_open + copy_": opened,
        LIMIT_CACHED: lambda: raw.copy([local(tensor) for tensor in state.values()], copied),
        LIMIT_DIRECT: lambda: raw.read(own_file, buffers, direct=True),
    }


def _load(folder: Path, state: StateDict, coordinator: Coordinator) -> None:
    """Load in one pass, which verifies what it reads."""
    with gc_paused(), NativeReader(folder) as reader:
        requests = [Block(b.chunk, b.data, fqn) for fqn, tensor in state.items() for b in blocks_of(tensor)]
        fill = reader.plan(requests)
        coordinator.barrier("planned")
        fill()


def _load_unverified(folder: Path, state: StateDict, coordinator: Coordinator) -> None:
    """Load in the same way, with nothing hashed and every block taken for right."""

    class Unhashed:
        def update(self, piece: object) -> None: ...

    with (
        patch.object(engine, "xxhash", SimpleNamespace(xxh3_128=lambda *_: Unhashed())),
        patch.object(engine.SliceReader, "_has_digest", lambda *_: True),
    ):
        _load(folder, state, coordinator)


def ends(tensor: torch.Tensor) -> torch.Tensor:
    flat = local(tensor).flatten()
    return torch.cat([flat[:64], flat[-64:]])


def spoil(state: StateDict) -> None:
    for tensor in state.values():
        local(tensor).zero_()


def proof(state: StateDict, true_ends: dict[str, torch.Tensor]) -> Callable[[str], None]:
    """Return what fails after a case that did not load; limits load nothing."""

    def prove(case: str) -> None:
        if not case.startswith("limit"):
            assert all(torch.equal(ends(tensor), true_ends[fqn]) for fqn, tensor in state.items()), case

    return prove


if __name__ == "__main__":
    run(parse("a load of a training state into live tensors", pairs=9), main)
