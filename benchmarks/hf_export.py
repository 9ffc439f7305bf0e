"""A Hugging Face export of a sharded model, in bf16, durable when it returns: python -m benchmarks.hf_export."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (  # torchtitan imports it from there too
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.tensor import DTensor

from benchmarks import raw
from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    Times,
    alternate,
    barrier,
    clean_folder,
    folder_bytes,
    parse,
    rank,
    report,
    run,
    world_size,
)
from benchmarks.hf_model import DTYPE, Subject, fsync_folder, highest, make_subject

OURS = "titan_ckpt, proved"
CONSOLIDATED = "sharded + consolidated (torchtitan)"
GATHERED = "full_state_dict + save_file"
LIMIT = "limit: O_DIRECT write, and read back"


def main(options: Options) -> dict[str, Any]:
    """Compare; every case writes into an emptied folder and fsyncs what it leaves there."""
    rows = make_subject(options.gb)
    found = _measured(options, rows, _cases(options, rows), "rows")
    del rows
    columns = make_subject(options.gb, dim=1)
    cases = _cases(options, columns)
    del cases[GATHERED]
    return found | {"columns": _measured(options, columns, cases, "columns")}


def _measured(options: Options, subject: Subject, cases: dict[str, Case], layout: str) -> dict[str, Any]:
    folder = Path(options.folder) / "export"
    times = alternate(cases, options.pairs, lambda _: clean_folder(folder))
    title = f"HF export in bf16, {subject.num_bytes / 1e9:.2f} GB, shards of {layout}, {world_size()} rank(s), fsync"
    report(title, times, subject.num_bytes)
    clean_folder(folder)
    with PeakMemory() as peak:
        cases[OURS]()
    return _json(times) | {
        "bytes_ratio": round(folder_bytes(folder) / subject.num_bytes, 3),
        "extra_peak_mib": round(highest(peak.mib), 1),
        "pairs": options.pairs,
    }


def _json(times: Times) -> dict[str, float]:
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = {"ratio_vs_consolidated": CONSOLIDATED, "ratio_vs_full_gather": GATHERED, "fraction_of_limit": LIMIT}
    return {name: round(median[case] / median[OURS], 3) for name, case in ratios.items() if case in median}


def _cases(options: Options, subject: Subject) -> dict[str, Case]:
    folder = Path(options.folder) / "export"
    buffers = raw.make_buffers()
    numbers = subject.file_numbers()
    tensors = subject.under_file_names()

    def consolidated() -> None:
        """Do what torchtitan does for last_save_in_hf (components/checkpoint.py), and make the result durable."""
        cast = {key: tensor.to(DTYPE) for key, tensor in tensors.items()}
        writer = HuggingFaceStorageWriter(
            str(folder / "sharded"), fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=False
        )
        dcp.save(cast, storage_writer=writer)
        consolidate_safetensors_files_on_every_rank(str(folder / "sharded"), str(folder), numbers, num_threads=5)
        fsync_folder(folder)

    def gathered() -> None:
        whole = {}
        for key, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank() == 0:
                whole[key] = full.to(DTYPE)
            del full
        if rank() == 0:
            for number in sorted(set(numbers.values())):
                part = {key: value for key, value in whole.items() if numbers[key] == number}
                safetensors.torch.save_file(part, folder / f"{number}.safetensors", {"format": "pt"})
        whole.clear()
        barrier()
        fsync_folder(folder)

    def limit() -> None:
        path = folder / f"{rank()}.raw"
        raw.write_direct(path, subject.num_bytes // world_size(), buffers)
        barrier()
        raw.read(path, buffers, direct=True)

    return {
        OURS: lambda: subject.export(folder / "out"),
        CONSOLIDATED: consolidated,
        GATHERED: gathered,
        LIMIT: limit,
    }


if __name__ == "__main__":
    run(parse("a Hugging Face export of a sharded model", gb=4.4, nproc=2), main)
