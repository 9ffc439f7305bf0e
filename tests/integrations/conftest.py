"""Ends the worker processes that a test has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from titan_ckpt.process import instances_of


@pytest.fixture
def workers_end() -> Iterator[None]:
    """A collection of garbage waits 5 s for each that it comes upon, in whichever test it comes."""
    yield
    for kind in (_MultiProcessingDataLoaderIter, _StatefulMultiProcessingDataLoaderIter):
        for iterator in instances_of(kind):
            iterator._shutdown_workers()
