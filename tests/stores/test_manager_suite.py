"""The tests of the manager that are about behaviour, on buckets: the same bodies, with another `run_folder`.

A test is here if it takes that fixture; those that do not are about files, links and mounts.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import test_failed_saves, test_manager, test_manager_lifecycle, test_model_alone
from tests.distributed import test_manager as test_manager_on_ranks
from tests.distributed import test_manager_layouts
from tests.faults import test_live_writer
from tests.run_folder import RunFolder
from tests.stores.servers import Server
from tests.unit.loading import test_external
from tests.unit.telemetry import test_events
from titan_ckpt.config import StoreConfig

_SUITES: tuple[ModuleType, ...] = (
    test_manager, test_manager_lifecycle, test_model_alone, test_failed_saves,
    test_manager_on_ranks, test_manager_layouts, test_live_writer, test_external, test_events,
)  # fmt: skip
_ON_BOTH = {
    "test_a5_a_run_without_a_save_table_writes_nothing",
    "test_a_second_writer_is_refused_while_the_first_lives",
    "test_a5_a_step_can_be_asked_for_and_rolled_back_to",
    "test_an_interrupt_while_writing_leaves_nothing_behind",
    "test_f5_nothing_readable_is_never_a_fresh_start",
    "test_retention_keeps_what_it_says",
    "test_warn_ends_the_run_at_one_failure_too_many_in_a_row",
}
"""These ask for deletions, versions, or errors that the two providers answer each in its own way."""
_IN_A_PROCESS = "test_a_resumed_run_equals_an_uninterrupted_one"
"""The only test with saves in a process, which takes seconds to start; others of that mode take no `run_folder`."""

for _suite in _SUITES:
    for _name, _test in vars(_suite).items():
        if _name.startswith("test_") and "run_folder" in inspect.signature(_test).parameters:
            assert _name not in globals(), f"two tests are called {_name}"
            globals()[_name] = _test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_folder" in metafunc.fixturenames:
        both = metafunc.function.__name__ in _ON_BOTH
        metafunc.parametrize("run_folder", ["s3", "azure"] if both else ["s3"], indirect=True)


@pytest.fixture
def run_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunFolder]:
    server = request.getfixturevalue(request.param)
    assert isinstance(server, Server)
    store = StoreConfig(endpoint=server.endpoint, retry_seconds=5.0)
    yield RunFolder(tmp_path, f"{server.url}/runs/{uuid.uuid4().hex[:8]}", store)
    assert not [*tmp_path.glob("*:"), *tmp_path.glob("checkpoints/step-*")], "a step on the local disk"


def test_every_suite_is_here_and_both_stores_are_asked() -> None:
    """A test that is renamed is not lost."""
    names = {name for name in globals() if name.startswith("test_")}
    assert names >= _ON_BOTH | {_IN_A_PROCESS}
    for suite in _SUITES:
        assert names & vars(suite).keys(), suite.__name__
