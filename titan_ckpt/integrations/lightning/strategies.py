"""The strategies of Lightning and Fabric that keep no parameters with names and shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_REFUSED = {
    "FSDP": "it is FSDP1, which flattens parameters, so none of them has a shard with a name: use "
    "ModelParallelStrategy (FSDP2)",
    "DeepSpeed": "its engine keeps weights and optimizer state in partitions of its own: use ModelParallelStrategy, or "
    "DeepSpeed's own checkpoints",
    "XLA": "only CPU and CUDA devices are supported",
    "DataParallel": "it runs several devices in one process: use DDPStrategy",
}
"""Start of a strategy's name -> why it cannot be checkpointed, and what to use instead."""


def problems(strategy: Any) -> Iterator[str]:
    """Yield why this strategy does not work with titan_ckpt."""
    for name, why in _REFUSED.items():
        if any(kind.__name__.startswith(name) for kind in type(strategy).__mro__):
            yield f"{type(strategy).__name__}: {why}"
            return
