"""Start real processes in a gloo group and run a function on each; a failing rank fails the test with its traceback."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_WAIT = timedelta(seconds=120)


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank and return what each returned. `function` is importable by name."""
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, None, True, _WAIT, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks = [
        context.Process(target=_rank, args=(results, store.port, rank, world_size, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    failure = None
    while len(found) < world_size and failure is None:
        rank, failure, value = results.get()
        found[rank] = value
    for process in ranks:
        if failure:
            process.kill()
        process.join()
    assert failure is None, f"rank {rank}:\n{failure}"
    return [found[rank] for rank in range(world_size)]


def _rank(
    results: Any, port: int, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False, _WAIT)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_WAIT)
        value = function(*args)
        dist.barrier()
        results.put((rank, None, value))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()[-6000:], None))
