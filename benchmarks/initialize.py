"""Initial values of a new run on ranks that each hold a shard: python -m benchmarks.initialize [--gb N].

Llama 3.2's 1B, 1.24 * 10^9 parameters in fp32, under FSDP2; with a smaller `--gb`, fewer layers and tokens.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common import Options, PeakMemory, alternate, barrier, parse, quartiles, report, run, say, world_size
from titan_ckpt.geometry.chunks import local_tensor
from titan_ckpt.models.llama3 import FLAVORS, Llama3, Llama3Config
from titan_ckpt.weights.initialize import InitialValues, construct, initialize_missing, materialize
from titan_ckpt.weights.wrapper import ModelWrapper

GB = 4.94
"""Bytes of the whole model."""
CASES: dict[str, InitialValues] = {"as one CPU would": "default", "on the device, in shards": "device"}


def main(options: Options) -> dict[str, Any]:
    """Compare the values of one CPU, which every rank makes, with those that each rank draws for its shard."""
    whole = FLAVORS["1B"]
    share = min(1.0, options.gb / GB)
    shape = replace(
        whole, num_layers=max(1, round(whole.num_layers * share)), vocab_size=round(whole.vocab_size * share)
    )
    times = alternate(
        {name: partial(_make_and_drop, shape, values) for name, values in CASES.items()}
        | {"limit: normal_() over the shard": partial(_limit, shape)},
        options.pairs,
        lambda _: gc.collect(),
        steady=[*CASES] if share == 1 else (),
    )
    ratios: dict[str, float] = {}
    num_bytes = 0
    for name, values in CASES.items():
        gc.collect()
        barrier()
        with PeakMemory() as peak:
            model = _make(shape, values)
        num_bytes = sum(local_tensor(p).nbytes for p in model.parameters())
        ratios[name] = peak.mib * 2**20 / num_bytes
        del model
    report(f"initial values, {world_size()} ranks, shards of {num_bytes / 1e9:.2f} GB", times, num_bytes)
    for name, ratio in ratios.items():
        say(f"  {name:44s} {ratio:8.2f} x the shard's bytes at the peak")
    before, after, limit = times.values()
    peak_before, peak_after = ratios.values()
    return {
        "ratio": round(statistics.median(before) / statistics.median(after), 3),
        "ratio_quartiles": quartiles(before, after),
        "seconds": round(statistics.median(after), 3),
        "seconds_before": round(statistics.median(before), 3),
        "seconds_limit": round(statistics.median(limit), 3),
        "peak_per_shard": round(peak_after, 3),
        "peak_per_shard_before": round(peak_before, 3),
        "shard_bytes": num_bytes,
        "pairs": options.pairs,
    }


def _make(shape: Llama3Config, values: InitialValues) -> Llama3:
    """Return a new model of which this rank holds its shard, with initial values."""
    torch.manual_seed(1)
    model = construct(lambda: Llama3(shape), values)
    if world_size() > 1:
        mesh = init_device_mesh("cpu", (world_size(),))
        for layer in model.layers.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    materialize(model, "cpu")
    initialize_missing(ModelWrapper([model]))
    return model


def _make_and_drop(shape: Llama3Config, values: InitialValues) -> None:
    _make(shape, values)


def _limit(shape: Llama3Config) -> None:
    with torch.device("meta"):
        num_elements = sum(p.numel() for p in Llama3(shape).parameters()) // world_size()
    torch.empty(num_elements).normal_()


if __name__ == "__main__":
    run(parse("initial values of a new run", gb=GB, nproc=2, pairs=3), main)
