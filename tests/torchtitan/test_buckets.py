"""torchtitan's Trainer with its checkpoints, exports and sources in a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores import servers
from tests.torchtitan.runs import Run, config, distributed, same, same_tensors, train
from titan_ckpt import StoreConfig
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.integrations.torchtitan import TitanCheckpointer
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import open_location

FSDP = {"data_parallel_shard": 2}
HF: dict[str, Any] = {"last_save_in_hf": True, "last_save_model_only": True}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the endpoint of a server that answers as S3 does."""
    servers.require_installed()
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server.endpoint


def _steps(url: str, store: StoreConfig) -> list[int]:
    place = open_location(url, settings=store)
    assert isinstance(place, BucketPath)
    return [step.step for step in BucketSteps(place).survey().steps]


@distributed(2)
def _run(assets: Path, folder: Path, endpoint: str) -> None:
    os.environ.update(servers.CREDENTIALS)
    store = StoreConfig(endpoint=endpoint, retry_seconds=5.0)

    def made(dump: str, **settings: Any) -> Any:
        return config(assets, folder / dump, degrees=FSDP, layers=2, **settings)

    def in_bucket(dump: str, **settings: Any) -> Any:
        return made(dump, store=store, **{"folder": "s3://box/run/checkpoint"} | settings)

    whole = train(made("local", async_mode="async"))
    first = train(in_bucket("first", async_mode="async", steps=4))
    assert len(first.losses) == 4
    assert _steps("s3://box/run/checkpoint", store) == [2, 4]
    other_machine = train(in_bucket("second", async_mode="async_with_pinned_mem", last_save_in_dcp=True))
    assert len(other_machine.losses) == 2
    same(whole, other_machine, losses=2)
    assert _steps("s3://box/run/checkpoint", store) == [2, 4, 6]
    assert not [*folder.glob("**/step-*.distcp"), *folder.glob("first/**/step-*"), *folder.glob("second/**/step-*")]

    by_dcp: dict[str, Any] = {"initial_load_path": "s3://box/run/dcp/step-6", "initial_load_model_only": False}
    _same_state(whole, train(in_bucket("dcp", folder="s3://box/dcp/checkpoint", load_only=True, **by_dcp)))
    by_step: dict[str, Any] = {"initial_load_path": "s3://box/run/checkpoint/step-6", "initial_load_model_only": False}
    _same_state(whole, train(in_bucket("step", folder="s3://box/step/checkpoint", load_only=True, **by_step)))

    exported = train(in_bucket("hf", folder="s3://box/hf/checkpoint", steps=2, **HF))
    by_hf: dict[str, Any] = {
        "initial_load_path": "s3://box/hf/exports/step-2",
        "initial_load_in_hf": True,
        "load_only": True,
    }
    loaded = train(in_bucket("from-hf", folder="s3://box/from-hf/checkpoint", steps=0, **by_hf))
    same_tensors(loaded.model, exported.model)


def _same_state(run: Run, loaded: Run) -> None:
    assert loaded.losses == []  # it goes on after the last step
    same(run, loaded, losses=0)


def test_a_run_in_a_bucket_goes_on_elsewhere_and_exports_there(assets: Path, tmp_path: Path, endpoint: str) -> None:
    """Two ranks: checkpoints, the last step's DCP and Hugging Face folders, and sources of each kind are in a bucket.

    The run ends with the bits of a run with a local folder, on another machine's empty dump folder.
    """
    _run(assets, tmp_path, endpoint)


@distributed(1)
def _lora(assets: Path, folder: Path, endpoint: str) -> None:
    from tests.torchtitan.test_lora import BOTH, THEIRS

    os.environ.update(servers.CREDENTIALS)
    store = StoreConfig(endpoint=endpoint, retry_seconds=5.0)
    train(config(assets, folder / "base", steps=1, layers=2, folder="s3://box/base/checkpoint", store=store, **HF))
    base: dict[str, Any] = {
        "layers": 2,
        "initial_load_in_hf": True,
        "initial_load_path": "s3://box/base/exports/step-1",
        "store": store,
    }
    trained = train(config(assets, folder / "a", THEIRS, steps=2, folder="s3://box/a/checkpoint", **BOTH, **base))
    more: dict[str, Any] = {
        "additional_load_path": "s3://box/a/exports/step-2-peft",
        "folder": "s3://box/b/checkpoint",
        "load_only": True,
    }
    loaded = train(config(assets, folder / "b", THEIRS, steps=0, **more, **base))
    same_tensors(loaded.model, trained.model)


def test_an_adapter_and_its_base_are_in_a_bucket(assets: Path, tmp_path: Path, endpoint: str) -> None:
    """A LoRA run takes its base from the bucket, and exports there; a second one loads base and PEFT folder."""
    _lora(assets, tmp_path, endpoint)


def test_the_command_line_sets_the_store() -> None:
    """The settings of a store are flags of torchtitan's command line, as every other setting is."""
    import tyro

    made = tyro.cli(
        TitanCheckpointer.Config,
        args=[
            "--folder",
            "s3://b/run/checkpoint",
            "--store.endpoint",
            "http://host:9000",
            "--store.retry_seconds",
            "4",
        ],
    )
    assert made.store == StoreConfig(endpoint="http://host:9000", retry_seconds=4.0)
    assert made.folder == "s3://b/run/checkpoint"
