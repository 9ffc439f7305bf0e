"""Every test has one thread, a fixed seed and no network; a soak raises the effort."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

# Before torch or transformers are imported: ranks share two cores, and a test that reaches for a hub must fail.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    RES_OPTIONS="timeout:1 attempts:1",  # torch asks for the name of a peer at every connection, an answer may be lost
)
# Workers of pytest-xdist have these two, and a console keeps the size that they say.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.run_folder import RunFolder
from titan_ckpt.process import freeze_imports
from titan_ckpt.testing import ranks

# TRL imports it where it finds it, which takes seconds once much is imported; a test of it takes this away.
sys.modules["wandb"] = None  # type: ignore[assignment]

torch.set_num_threads(1)

ranks._PRELOADED.append("tests.preloaded")

settings.register_profile(
    "check",
    max_examples=100,
    deadline=None,  # a busy machine is no failure
    derandomize=True,  # a change is judged by the same examples as the change before it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("soak", settings.get_profile("check"), max_examples=5000, derandomize=False)
settings.load_profile("soak" if os.environ.get("TITAN_CKPT_SOAK") == "1" else "check")

_HERE = Path(__file__).parent
_TAKE_LONG = (_HERE / "distributed", _HERE / "faults", _HERE / "integrations", _HERE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dry-run", action="store_true", help="run tests marked gpu on the CPU, where that means something"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collections, and keep later ones away from what was imported.

    To walk it takes most of a second, and a forked process copies what it walks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a CUDA device where there is none, and begin with the folders that take long.

    Their files come in turn, because the worlds of `distributed` use several cores and the tests of `faults` often
    wait. Small files come last, so that all workers end at about the same time.
    """
    without = _without_device(config, items)
    items[:] = [item for item in items if item not in without]
    config.hook.pytest_deselected(items=without)
    seen: dict[Path, dict[Path, None]] = {folder: {} for folder in _TAKE_LONG}
    for item in items:
        seen.get(item.path.parent, {})[item.path] = None
    turn = {file: number for files in seen.values() for number, file in enumerate(files)}
    items[:] = sorted(items, key=lambda item: turn.get(item.path, len(items)))


def _without_device(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that cannot run without a CUDA device. Raises: UsageError if those alone are asked for."""
    dry = config.getoption("--dry-run")
    if torch.cuda.is_available() and not dry:
        return []
    if config.getoption("markexpr") == "gpu" and not dry:
        raise pytest.UsageError(
            f"tests of a GPU were asked for, and torch {torch.__version__} finds no CUDA device: run them on a machine "
            "that has one, or with --dry-run on the CPU"
        )
    marks = {item: item.get_closest_marker("gpu") for item in items}
    return [item for item, mark in marks.items() if mark and not (dry and not mark.kwargs.get("only"))]


@pytest.fixture(scope="session", autouse=True)
def _one_cache_of_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name the folder in which runs of this session and the ranks they start find each other's tokenised corpus."""
    os.environ["TITAN_CKPT_TESTS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_to_collect() -> None:
    """Set aside what earlier files of this process have left, which every collection and most loads would walk.

    For good: gc.unfreeze() would give the collector back what `pytest_collection` has set aside, and every later load
    that asks it for the loaders of the process would walk that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)  # what they have left open is no fault of this file
        gc.collect()
    freeze_imports()


@pytest.fixture(scope="module")
def cheap_forks() -> None:
    """Put this process on huge pages again, before loaders fork many workers of it."""
    from tests.forked import take_huge_pages  # which imports torch's compiler

    take_huge_pages.cache_clear()
    take_huge_pages()


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """Return where a run has its checkpoints; tests/stores has another fixture of this name."""
    return RunFolder(tmp_path)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
