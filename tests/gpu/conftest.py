"""Every test of a GPU has the device, which is the CPU in a dry run, and runs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield the CUDA device, or the CPU in a dry run. Nothing of a test may be left in flight on the device."""
    if request.config.getoption("--dry-run"):
        yield torch.device("cpu")
        return
    torch.cuda.manual_seed(0)
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
