"""The benchmarks run, at a size that measures nothing, and report what they promise where they promise it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Options
from tests.stores import servers
from titan_ckpt.testing import distributed

KEYS = {"ratio_vs_dcp", "ratio_vs_best_peer", "fraction_of_limit", "bytes_written", "extra_peak_mib", "pairs"}


@pytest.fixture
def leftovers_of_peers() -> Iterator[None]:
    """Collect what the peers leave open while its warnings belong to this test, and not in a later one."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("save", [()]),
        ("async_save", [("blocking",), ("committed",)]),
        ("load", [("warm",), ("cold",)]),
        ("many_tensors", [("save_first",), ("save_again",), ("load",), ("end_to_end",)]),
    ],
)
def test_each_benchmark_reports_its_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: list[tuple[str, ...]]
) -> None:
    """Every measure has every key, at the top or under the name of its part, and counted its turns."""
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, "_resharded", lambda *_: {}, raising=False)  # starts processes of its own
    found = module.main(Options(gb=0.01, nproc=1, pairs=1, json=True, folder=str(tmp_path / "bench"), tensors=40))
    for part in parts:
        measure: dict[str, Any] = found
        for key in part:
            measure = measure[key]
        assert measure.keys() >= KEYS
        assert measure["pairs"] == 1 and measure["ratio_vs_dcp"] > 0


@distributed(nproc=2)
def test_shared_reads_are_compared_with_what_the_machine_gives(tmp_path: Path) -> None:
    """For one host and for as many as ranks: the shares of loads by each rank, and of the limit."""
    module = importlib.import_module("benchmarks.shared_reads")
    found = module.main(Options(gb=0.034, nproc=2, pairs=1, json=True, folder=str(tmp_path / "bench"), tensors=0))
    hosts = {"1 host of 200 MB/s with 2 ranks", "2 hosts of 200 MB/s each"}
    assert found["times_faster"].keys() == found["share_of_limit"].keys() == hosts
    assert all(share > 0 for share in found["share_of_limit"].values())


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.usefixtures("leftovers_of_peers")
def test_a_bucket_is_asked_as_often_for_many_tensors_as_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves and loads beside DCP with s3fs and s3torchconnector report their measures; loads are compared."""
    servers.require_installed()
    store = importlib.import_module("benchmarks.store")
    for name, value in store.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with servers.moto(tmp_path) as server:
        options = Options(gb=0.002, nproc=1, pairs=1, json=True, folder=str(tmp_path / "b"), tensors=0, server="moto")
        found = store.main(options, server)
    for kind in ("save", "load"):
        assert found[kind].keys() >= KEYS and found[kind]["ratio_vs_dcp"] > 0
    few, more = ([n for name, n in found["requests"].items() if name.startswith(kind)] for kind in ("save", "load"))
    assert few[0] == few[1] and more[1] - more[0] in (0, 1), "the header of many tensors is more than one read"


def test_initial_values_are_compared_with_those_of_one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are timed, and the limit."""
    initialize = importlib.import_module("benchmarks.initialize")
    monkeypatch.setitem(initialize.FLAVORS, "1B", initialize.FLAVORS["debug-0.5m"])
    options = Options(gb=initialize.GB, nproc=1, pairs=1, json=True, folder=str(tmp_path), tensors=0)
    found = initialize.main(options)
    assert found["ratio"] > 0 and 0 < found["shard_bytes"] < 1 << 24 and found["pairs"] == 1


def test_the_modules_that_a_tensor_passes_are_counted(tmp_path: Path) -> None:
    """Those that are given it, by value or by name, in each of the three ways."""
    ways = importlib.import_module("benchmarks.modules").count(tmp_path)
    assert "titan_ckpt.formats.native.writer" in ways["save"]
    assert "titan_ckpt.formats.reading.slices" in ways["load"] - ways["save"]
    assert "titan_ckpt.weights.low_rank" in ways["merged LoRA export"] - ways["load"]
    assert all(len(ways[way]) <= most for way, most in {"save": 6, "load": 12, "merged LoRA export": 11}.items())
