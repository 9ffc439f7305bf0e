"""A load of a training state into live tensors, digests checked: python -m benchmarks.load [--gb N]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    StateDict,
    alternate,
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
from titan_ckpt.disk.memory import Buffer
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.native.reader import NativeReader
from titan_ckpt.formats.native.shared_check import check_together
from titan_ckpt.formats.native.transfers import BlockReader
from titan_ckpt.formats.native.writer import NativeWriter
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.geometry.requests import ReadRequest

OURS, DCP = "titan_ckpt", "dcp.load"
UNVERIFIED = "titan_ckpt without digests"
LIMIT_CACHED, LIMIT_DIRECT = "limit: memcpy", "limit: O_DIRECT read"


def main(options: Options) -> dict[str, Any]:
    """Compare warm and cold, in the layout of the save and in another one."""
    folder = Path(options.folder)
    state = training_state(options.gb)
    _save(folder, state)
    _save_for_peers(folder, state)
    true_ends = {fqn: _ends(tensor) for fqn, tensor in state.items()}
    cases = _cases(folder, state)
    total = local_bytes(state) * world_size()
    found: dict[str, Any] = {}
    for kind, limit in (("warm", LIMIT_CACHED), ("cold", LIMIT_DIRECT)):

        def before(name: str, kind: str = kind) -> None:
            _spoil(state)
            (bring_into_page_cache if kind == "warm" else drop_from_page_cache)(folder / _folder_of(name))
            touch_free_memory(local_bytes(state))

        chosen = {name: case for name, case in cases.items() if not name.startswith("limit") or name == limit}
        times = alternate(_proved(chosen, state, true_ends), options.pairs, before)
        report(f"load, {kind}, {total / 1e9:.2f} GB, {world_size()} rank(s)", times, total)
        before(OURS)
        with PeakMemory() as peak:
            cases[OURS]()
        peers = [name for name in chosen if "titan_ckpt" not in name and name != limit]
        found[kind] = measures(times, OURS, DCP, peers, limit, bytes_written=0, extra_peak_mib=peak.mib)
    found["resharded"] = _resharded(options, state)
    return found


def _resharded(options: Options, state: StateDict) -> dict[str, float | int]:
    """Load, from the page cache, what was saved as row shards on 2 ranks: as columns, or whole on one rank."""
    folder = Path(options.folder) / "resharded"
    if world_size() > 1:
        _save(folder, state)
        state = training_state(options.gb, Shard(1))
    else:
        run(replace(options, nproc=2, folder=str(folder), json=False), _save_in_rows, keep=True)
    cases = {name: case for name, case in _cases(folder, state).items() if name in (OURS, DCP, LIMIT_CACHED)}

    def before(_: str) -> None:
        _spoil(state)
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
    writer = NativeWriter()
    writer.plan(state, Coordinator.current())
    writer.write(folder / "native", state)


def _save_for_peers(folder: Path, state: StateDict) -> None:
    tensors = {fqn: local(tensor) for fqn, tensor in state.items()}
    clean_folder(folder / "files")
    torch.save(tensors, folder / "files" / f"{rank()}.pt")
    safetensors.torch.save_file(tensors, folder / "files" / f"{rank()}.safetensors")


def _folder_of(case: str) -> str:
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
    """Load as the manager does: verified by all ranks together, then read."""
    with gc_paused(), NativeReader(folder) as reader:
        requests = [ReadRequest(fqn, b.chunk, b.data) for fqn, tensor in state.items() for b in blocks_of(tensor)]
        check_together([(reader, requests)], coordinator)
        reader.read(requests)


def _load_unverified(folder: Path, state: StateDict, coordinator: Coordinator) -> None:
    """Load in the same way, with nothing to verify before and every block taken for right."""

    def prepare(file: BlockReader) -> None:
        file.to_check = []

    trusted: dict[str, Any] = {"_verified": lambda *_: True, "_is_trusted": lambda file: file.is_cached}
    with patch.multiple(BlockReader, prepare=prepare, **trusted):
        _load(folder, state, coordinator)


def _ends(tensor: torch.Tensor) -> torch.Tensor:
    flat = local(tensor).flatten()
    return torch.cat([flat[:64], flat[-64:]])


def _spoil(state: StateDict) -> None:
    for tensor in state.values():
        local(tensor).zero_()


def _proved(cases: dict[str, Case], state: StateDict, ends: dict[str, torch.Tensor]) -> dict[str, Case]:
    """Let every case fail that did not load."""

    def proving(name: str, case: Case) -> Callable[[], object]:
        def prove() -> None:
            case()
            if not name.startswith("limit"):
                assert all(torch.equal(_ends(tensor), ends[fqn]) for fqn, tensor in state.items()), name

        return prove

    return {name: proving(name, case) for name, case in cases.items()}


if __name__ == "__main__":
    run(parse("a load of a training state into live tensors"), main)
