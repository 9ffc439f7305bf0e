"""Samplers of the libraries and operations of datasets' streams: a resumed loader is exact, or refused by name.

A part is a class that a stream of datasets is made of; operations are made of these. The runs are those of
tests/integrations/loader_cases.py.
"""

from __future__ import annotations

import importlib.util
import inspect

import pytest
from datasets import IterableDataset, combine, distributed
from datasets.iterable_dataset import _BaseExamplesIterable
from torch.utils.data import Sampler

from tests.integrations.loader_cases import SAMPLED, STREAMS, judge_sampler, judge_stream
from tests.zoo.offered import below
from tests.zoo.worlds import Row
from titan_ckpt.components.known.streams import PARTS
from titan_ckpt.integrations.data_order import SAMPLERS

FLOORS = {": sampler": 27, ": part": 17, ": operation": 33}
_WITHOUT_ORDER = {"torch.utils.data.sampler.Sampler", "torch.utils.data.dataloader._InfiniteConstantSampler"}
"""Listed, because others extend it; given by torch to streams alone."""
_UNBUILT = {"from_polars": "polars", "from_spark": "pyspark"}
"""Operations that need a package which is not installed. What they make is judged by its parts, as any stream."""


def rows() -> list[Row]:
    """Return the row of every sampler, part and operation; those of samplers and operations are runs."""
    samplers = [(f"{name}: sampler", *judge_sampler(SAMPLED[name])) for name in sorted(SAMPLED)]
    parts = [(f"{name}: part", "refused" if why else "exact", why) for name, why in PARTS.items()]
    return [*samplers, *parts, *((f"{name}: operation", *judge_stream(STREAMS[name])) for name in STREAMS)]


def operations() -> set[str]:
    """Return the names of everything in datasets that makes a stream, or makes one from others."""
    methods = {
        name
        for name, method in inspect.getmembers(IterableDataset, callable)
        if name[0] != "_" and "IterableDataset" in str(inspect.signature(method).return_annotation)
    }
    functions = {
        name
        for module in (combine, distributed)
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and name[0] != "_"
    }
    return methods | functions


def test_every_sampler_of_the_installed_libraries_is_listed_and_has_a_run() -> None:
    """One that a newer version adds is refused until it is listed."""
    assert below(Sampler) | {"torch.utils.data.sampler.Sampler"} == SAMPLERS.keys()
    assert SAMPLED.keys() == SAMPLERS.keys() - _WITHOUT_ORDER


def test_every_part_of_the_streams_of_datasets_is_listed() -> None:
    """One that a newer version adds is refused until it is listed."""
    assert below(_BaseExamplesIterable, ["datasets"]) == PARTS.keys()


def test_every_operation_of_the_streams_of_datasets_has_a_run() -> None:
    assert operations() == {name.partition(",")[0] for name in STREAMS} | _UNBUILT.keys()
    assert not [package for package in _UNBUILT.values() if importlib.util.find_spec(package)]


@pytest.mark.parametrize("end", FLOORS)
def test_the_lists_are_above_their_floors(end: str) -> None:
    """A sampler, part or operation that goes from exact to refused is noticed without a run of the zoo."""
    listed = {
        ": sampler": [name for name in SAMPLED if not SAMPLERS[name]],
        ": part": [name for name, why in PARTS.items() if not why],
        ": operation": [*STREAMS],
    }
    assert len(listed[end]) >= FLOORS[end]
