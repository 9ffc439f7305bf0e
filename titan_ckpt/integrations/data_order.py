"""Decides whether the order in which samplers give indices, and the making of batches, continue exactly after a resume.

A resumed loader asks its samplers for their order again and leaves out what was read. So an order may depend on the
epoch, on a torch.Generator named `generator`, on the process's random state and on the state that a sampler gives, and
on nothing else that an earlier order has changed. A sampler of a library is listed if that was seen; one of the user's
own is looked at.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch

from titan_ckpt.components.classes import class_name, exact, is_of_library, names_of, own_and_base
from titan_ckpt.components.unsaved_state import fault_of, function_faults, stored_by_code_of
from titan_ckpt.errors import ConfigError
from titan_ckpt.process import process_state

SAMPLERS: Mapping[str, str] = exact(
    {
        "torch.utils.data.sampler": "Sampler BatchSampler RandomSampler SequentialSampler SubsetRandomSampler "
        "WeightedRandomSampler",
        "torch.utils.data": "distributed.DistributedSampler dataloader._InfiniteConstantSampler",
        "torch.distributed.elastic.utils.data.elastic_distributed_sampler": "ElasticDistributedSampler",
        "torchdata.stateful_dataloader.sampler": "BatchSampler RandomSampler StatefulDistributedSampler",
        "accelerate.data_loader": "BatchSamplerShard SeedableRandomSampler SkipBatchSampler",
        "transformers.trainer_pt_utils": "BatchRebalanceSampler DistributedLengthGroupedSampler "
        "DistributedSamplerWithLoop LengthGroupedSampler ShardSampler",
        "trl.trainer.utils": "RepeatSampler",
        **dict.fromkeys(
            ("lightning.fabric.utilities.distributed", "lightning_fabric.utilities.distributed"),
            "DistributedSamplerWrapper",
        ),
        **dict.fromkeys(
            ("lightning.pytorch", "pytorch_lightning"),
            "demos.lstm.SequenceSampler overrides.distributed.UnrepeatedDistributedSampler "
            "overrides.distributed.UnrepeatedDistributedSamplerWrapper",
        ),
    }
)
"""Full name of a library's class of samplers -> "": it was seen to continue exactly. Others are refused.

The base Sampler has no order of its own, and torch gives _InfiniteConstantSampler to streams alone.
"""

_ADVICE = (
    "a resumed run would go on in another order: let it depend on the epoch and self.generator alone, or give the "
    "sampler state_dict and load_state_dict"
)


def has_state(value: Any) -> bool:
    """Return whether an object gives its state and takes it back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def sampler_faults(samplers: Collection[Any], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each sampler whose order depends on what no step holds, as far as its class says it."""
    for sampler in samplers:
        own, base = own_and_base(type(sampler))
        if base is not object and names_of(base)[0] not in SAMPLERS:
            reason = "its order was not proved to continue after a resume: take another sampler"
            yield from fault_of("sampler", sampler, reason, allow)
        elif not has_state(sampler) and (stored := next(stored_by_code_of(own, builds=("set_epoch",)), None)):
            yield from fault_of("sampler", sampler, f"its code sets {stored}, which no step holds, so {_ADVICE}", allow)


def collator_faults(collator: Any, allow: Collection[str], held: Collection[Any]) -> Iterator[str]:
    """Yield one line if the function that makes batches keeps what no step holds.

    `held`: the generators that steps hold. A method is judged with its object, where that is looked at.
    """
    function = collator.func if isinstance(collator, partial) else collator
    if function is None or isinstance(function, MethodType):
        return
    yield from function_faults([("collate_fn", collator)], allow, live=held)
    if is_of_library(type(function)) and getattr(function, "seed", None) is not None:
        yield "collate_fn: its seed gives it random numbers of its own, which no step holds: leave the seed out"


_END = object()
_VALUES = (list, dict, set, tuple, str, bytes, np.ndarray, torch.Tensor)


class OrderWatch:
    """Says whether an order that is drawn changes the user's own samplers that give no state."""

    def __init__(self, samplers: Collection[Any]) -> None:
        others = (sampler for sampler in samplers if not class_name(sampler).startswith("titan_ckpt."))
        own = (sampler for sampler in others if class_name(sampler) not in SAMPLERS and not has_state(sampler))
        self._before = [(sampler, _content(sampler)) for sampler in own]

    def watched(self, order: Iterator[Any], allow: Collection[str]) -> Iterator[Any]:
        """Yield the rest of an order.

        Raises: ConfigError if the user's own sampler draws from the process's random state, in which a step draws too.
        """
        names = [class_name(sampler) for sampler, _ in self._before]
        if not names or set(names) & set(allow):
            yield from order
            return
        while True:
            before = process_state()
            entry = next(order, _END)
            if process_state() != before:
                reason = f"it draws from the process's random numbers in the middle of an order, so {_ADVICE}"
                raise ConfigError([*fault_of("sampler", self._before[0][0], reason, allow)])
            if entry is _END:
                return
            yield entry

    def faults(self, allow: Collection[str]) -> Iterator[str]:
        """Yield one line for each sampler that has changed."""
        for sampler, before in self._before:
            now = _content(sampler)
            changed = [name for name in before if name in now and before[name] != now[name]]
            changed += sorted(before.keys() ^ now.keys())
            if changed:
                reason = f"drawing an order changes self.{changed[0]}, which no step holds, so {_ADVICE}"
                yield from fault_of("sampler", sampler, reason, allow)


def _content(sampler: Any) -> dict[str, bytes]:
    """Return the bytes of each attribute that can be pickled, but of the generator, of data and of other samplers."""
    found = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        is_data = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
        if name not in ("generator", "epoch") and (isinstance(value, _VALUES) or not is_data):
            with suppress(Exception):  # whatever the user's object raises, it cannot be compared
                found[name] = pickle.dumps(value)
    return found
