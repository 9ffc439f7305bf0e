"""The time that comparing replicas adds to a save if every rank holds all: python -m benchmarks.replicas [--gb N]."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common import (
    Case,
    Options,
    StateDict,
    alternate,
    clean_folder,
    local_bytes,
    parse,
    report,
    run,
)
from titan_ckpt.disk import posix
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.replicas import check_replicas
from titan_ckpt.formats.native.writer import WritePlan

MODES: tuple[Literal["sampled", "full"], ...] = ("sampled", "full")


def main(options: Options) -> dict[str, Any]:
    """Compare the check with the save that it goes before, of large tensors and of many small ones.

    Every rank holds all of them, `gb` * 10^9 bytes of the large ones.
    """
    one = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    states = {
        "large": {f"t{i}": one.clone() for i in range(max(1, int(options.gb * 1e9) // one.nbytes))},
        "many": {f"t{i}": torch.ones(8, 8) for i in range(options.tensors)},
    }
    return {name: _measure(name, state, options) for name, state in states.items()}


def _measure(name: str, state: StateDict, options: Options) -> dict[str, Any]:
    line, folder = Coordinator.current(), Path(options.folder)
    steps = itertools.count(1)
    plan = WritePlan.of(state, line)

    def save() -> None:
        WritePlan.of(state, line, plan).write(folder, state)
        line.barrier("written")
        posix.fsync_folder(folder)

    def checked(mode: Literal["sampled", "full"]) -> Case:
        return lambda: check_replicas(state, plan.replicas, line, mode, next(steps))

    cases: dict[str, Case] = {"the save alone": save} | {mode: checked(mode) for mode in MODES}
    times = alternate(cases, options.pairs, lambda _: clean_folder(folder))
    report(f"replicas of {name}, {len(state)} tensors, {options.nproc} ranks", times, local_bytes(state))
    median = {case: statistics.median(seconds) for case, seconds in times.items()}
    return {
        **{f"{case.removeprefix('the ').replace(' ', '_')}_seconds": round(s, 4) for case, s in median.items()},
        "tensors": len(state),
        "bytes": local_bytes(state),
        "pairs": options.pairs,
    }


if __name__ == "__main__":
    run(parse("comparing replicas", gb=0.2, nproc=2), main)
