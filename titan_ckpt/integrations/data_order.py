"""Decides whether the order of a loader's data continues exactly: its samplers, and streams of `datasets`.

A resumed loader asks its samplers for their order again and leaves out what was read. So an order may depend on the
epoch, on a torch.Generator named `generator` and on the process's random state, and on nothing that an earlier order
has changed. A sampler of a library is listed if that was seen; one of the user's own is looked at.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from titan_ckpt.components.unsaved_state import LIBRARIES, class_name, stored_by_code_of, unless_allowed

SAMPLERS: Mapping[str, str] = {
    **{
        f"torch.utils.data.sampler.{name}Sampler": ""
        for name in ("Batch", "Random", "Sequential", "SubsetRandom", "WeightedRandom")
    },
    "torch.utils.data.distributed.DistributedSampler": "",
    "torch.utils.data.dataloader._InfiniteConstantSampler": "",
    "torchdata.stateful_dataloader.sampler.BatchSampler": "",
    "torchdata.stateful_dataloader.sampler.RandomSampler": "",
    "torchdata.stateful_dataloader.sampler.StatefulDistributedSampler": "",
    "accelerate.data_loader.BatchSamplerShard": "",
    "accelerate.data_loader.SeedableRandomSampler": "",
    "transformers.trainer_pt_utils.DistributedLengthGroupedSampler": "",
    "transformers.trainer_pt_utils.DistributedSamplerWithLoop": "",
    "transformers.trainer_pt_utils.LengthGroupedSampler": "",
    "transformers.trainer_pt_utils.ShardSampler": "",
    "trl.trainer.utils.RepeatSampler": "",
    **{
        f"{package}.utilities.distributed.DistributedSamplerWrapper": ""
        for package in ("lightning.fabric", "lightning_fabric")
    },
    **{
        f"{package}.overrides.distributed.{name}": ""
        for package in ("lightning.pytorch", "pytorch_lightning")
        for name in ("UnrepeatedDistributedSampler", "UnrepeatedDistributedSamplerWrapper", "_IndexBatchSamplerWrapper")
    },
}
"""Full name of a library's class of samplers -> "": it was seen to continue exactly. Others are refused."""

_BASE = "torch.utils.data.sampler.Sampler"
_ADVICE = (
    "a resumed run would go on in another order: let it depend on the epoch and self.generator alone, use torchdata's "
    "StatefulDataLoader"
)


def sampler_faults(samplers: Collection[Any], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each sampler whose order depends on what no step holds, as far as its class says it."""
    for sampler in samplers:
        kinds = type(sampler).__mro__
        of_library = next((kind for kind in kinds[:-1] if kind.__module__.partition(".")[0] in LIBRARIES), None)
        own = kinds[: kinds.index(of_library)] if of_library is not None else kinds[:-1]
        name = class_name(sampler)
        known = of_library is None or f"{of_library.__module__}.{of_library.__qualname__}" in {*SAMPLERS, _BASE}
        if not known:
            reason = "its order was not proved to continue after a resume: take another sampler"
            yield from unless_allowed(f"sampler {name}", name, reason, allow)
        elif stored := next(stored_by_code_of(own, builds=("set_epoch",)), None):
            reason = f"its code sets {stored}, which no step holds, so {_ADVICE}"
            yield from unless_allowed(f"sampler {name}", name, reason, allow)


_VALUES = (list, dict, set, tuple, str, bytes, np.ndarray, torch.Tensor)


class OrderWatch:
    """What the user's own samplers hold before an order is drawn, to see whether drawing it changes them."""

    def __init__(self, samplers: Collection[Any]) -> None:
        self._before = [(s, _content(s)) for s in samplers if class_name(s) not in SAMPLERS]

    def faults(self, allow: Collection[str]) -> Iterator[str]:
        """Yield one line for each sampler that has changed."""
        for sampler, before in self._before:
            now = _content(sampler)
            changed = [name for name in before if name in now and before[name] != now[name]]
            changed += sorted(before.keys() ^ now.keys())
            if changed:
                name = class_name(sampler)
                reason = f"drawing an order changes self.{changed[0]}, which no step holds, so {_ADVICE}"
                yield from unless_allowed(f"sampler {name}", name, reason, allow)


def _content(sampler: Any) -> dict[str, bytes]:
    """Return the bytes of each attribute that can be pickled, but of the generator, of data and of other samplers."""
    found = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        is_data = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
        if name not in ("generator", "epoch") and (isinstance(value, _VALUES) or not is_data):
            with suppress(Exception):  # whatever the user's object raises, it cannot be compared
                found[name] = pickle.dumps(value)
    return found


def shuffled(dataset: Any, allow: Collection[str]) -> Iterator[str]:
    """Yield the fault of a stream of `datasets` with a buffer that is shuffled, which its state_dict() leaves out.

    Source: datasets, iterable_dataset.py BufferShuffledExamplesIterable.
    """
    waiting = [getattr(getattr(dataset, "_data", dataset), "_ex_iterable", None)]
    name = "datasets.IterableDataset.shuffle"
    while waiting:
        stream = waiting.pop()
        if type(stream).__name__ == "BufferShuffledExamplesIterable":
            reason = (
                "it shuffles a stream in a buffer that no step holds, and a resumed run never reads the rows in it: "
                "leave out streaming"
            )
            yield from unless_allowed(f"dataset {class_name(dataset)}", name, reason, allow)
            return
        if stream is not None:
            waiting += [getattr(stream, "ex_iterable", None), *getattr(stream, "ex_iterables", ())]
