"""A load of a bf16 Hugging Face folder into a sharded fp32 model: python -m benchmarks.hf_load [--gb N]."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    StateDict,
    Times,
    alternate,
    bring_into_page_cache,
    drop_from_page_cache,
    local,
    parse,
    quartiles,
    rank,
    report,
    run,
    touch_free_memory,
    world_size,
)
from benchmarks.hf_model import DTYPE, Subject, highest, make_subject
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.geometry.chunks import blocks_of
from titan_ckpt.geometry.keymap import IDENTITY

OURS, DCP, SLICES = "titan_ckpt", "dcp.load, HuggingFaceStorageReader", "safetensors get_slice + copy_"
LIMITS = {"warm": "limit: read() of the page cache", "cold": "limit: O_DIRECT read"}


def main(options: Options) -> dict[str, Any]:
    """Compare warm and cold; every case fills the live fp32 shards, and is checked."""
    subject = make_subject(options.gb)
    folder = Path(options.folder) / "model"
    subject.export(folder)
    cases = _cases(folder, subject)
    found: dict[str, Any] = {}
    for kind, limit in LIMITS.items():

        def before(_: str, kind: str = kind) -> None:
            for tensor in subject.state.values():
                local(tensor).zero_()
            (bring_into_page_cache if kind == "warm" else drop_from_page_cache)(folder)
            if kind == "cold":
                touch_free_memory(subject.num_bytes // world_size())

        chosen = {name: case for name, case in cases.items() if name not in LIMITS.values() or name == limit}
        times = alternate(chosen, options.pairs, before)
        title = f"HF load, {kind}, {subject.num_bytes / 1e9:.2f} GB bf16 into fp32, {world_size()} rank(s)"
        report(title, times, subject.num_bytes)
        before(OURS)
        with PeakMemory() as peak:
            cases[OURS]()
        found[kind] = _json(times, limit) | {"extra_peak_mib": round(highest(peak.mib), 1), "pairs": options.pairs}
    return found


def _json(times: Times, limit: str) -> dict[str, Any]:
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = {"ratio_vs_dcp": DCP, "fraction_of_limit": limit}
    return {
        **{key: round(median[other] / median[OURS], 3) for key, other in ratios.items()},
        **{f"{key}_quartiles": quartiles(times[other], times[OURS]) for key, other in ratios.items()},
    }


def _cases(folder: Path, subject: Subject) -> dict[str, Case]:
    buffers = raw.make_buffers()
    tensors = subject.under_file_names()
    files = sorted(folder.glob("*.safetensors"))
    as_they_are = [group.fqns[0] for group in subject.groups() if group.op == IDENTITY]
    true_sums = {fqn: _sum_of_bf16(tensor) for fqn, tensor in subject.state.items()}

    def ours() -> None:
        with HuggingFaceReader(folder) as reader:
            plan = subject.transforms.from_file(subject.state, reader.tensors, None, cast=True)
            assert not (plan.report.missing or plan.report.unexpected or plan.report.mismatched)
            reader.read(plan.requests)

    def slices() -> None:
        for file in files:
            with safetensors.safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no dict
                    values = opened.get_slice(key)
                    for block in blocks_of(tensors[key]):
                        block.data.copy_(values[block.chunk.within(block.chunk.whole(tuple(values.get_shape())))])

    def limit(direct: bool) -> None:
        for file in files[rank() :: world_size()]:
            raw.read(file, buffers, direct)

    def checked(load: Callable[[], None], fqns: Iterable[str]) -> Callable[[], None]:
        def prove() -> None:
            load()
            assert all(_sum_of_bf16(subject.state[fqn]) == true_sums[fqn] for fqn in fqns)

        return prove

    return {
        OURS: checked(ours, subject.state),
        DCP: checked(lambda: _dcp_load(folder, tensors), as_they_are),
        SLICES: checked(slices, as_they_are),
        LIMITS["warm"]: lambda: limit(direct=False),
        LIMITS["cold"]: lambda: limit(direct=True),
    }


def _dcp_load(folder: Path, tensors: StateDict) -> None:
    dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def _sum_of_bf16(tensor: torch.Tensor) -> float:
    """Return what tells a row that was loaded from one that was not, and costs little: a sum of every 1000th value."""
    return float(local(tensor).flatten()[::1009].to(DTYPE).double().abs().sum())


if __name__ == "__main__":
    run(parse("a load of a Hugging Face folder into a sharded model", gb=4.4, nproc=2), main)
