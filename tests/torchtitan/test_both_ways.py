"""Checkpoints of torchtitan's own manager go on under ours, with all their training state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.runs import Run, config, distributed, same, train
from titan_ckpt import CheckpointError

FSDP, TP = {"data_parallel_shard": 2}, {"tensor_parallel": 2, "data_parallel_shard": 1}
HSDP = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
FSDP_4, TP_FSDP = {"data_parallel_shard": 4}, {"tensor_parallel": 2, "data_parallel_shard": 2}


@distributed(2)
def _changed(assets: Path, folder: Path) -> None:
    flavour = "llama3_debugmodel"
    theirs = train(config(assets, folder / "run", flavour, titan=False, degrees=FSDP, steps=2))
    from_two: dict[str, Any] = {
        "initial_load_model_only": False, "initial_load_path": str(folder / "run/checkpoint/step-2"), "load_only": True,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r'positions of 2 data-parallel ranks, this run has 1.*"dataloader"'):
        train(config(assets, folder / "tp", flavour, degrees=TP, steps=2, **from_two))
    afresh = from_two | {"exclude_from_loading": ["dataloader"]}
    ours = train(config(assets, folder / "tp", flavour, degrees=TP, steps=2, **afresh))
    same(theirs, ours, losses=0)


def test_another_layout_takes_everything_but_the_data_position(assets: Path, tmp_path: Path) -> None:
    """From FSDP2 to TP: weights, moments, schedule and counters are the same; the data is refused or starts afresh."""
    _changed(assets, tmp_path)


@distributed(4)
def _on_four(assets: Path, folder: Path) -> None:
    def run(dump: str, degrees: dict[str, int], steps: int = 2, **settings: Any) -> Run:
        return train(config(assets, folder / dump, degrees=degrees, steps=steps, **settings))

    def by_path(dump: str, **settings: Any) -> dict[str, Any]:
        path = str(folder / dump / "checkpoint/step-2")
        return {"initial_load_path": path, "initial_load_model_only": False, "load_only": True} | settings

    at_2 = run("hsdp", HSDP, titan=False)
    theirs = run("hsdp", HSDP, steps=3, titan=False, load_only=True)
    same(at_2, run("fsdp", FSDP_4, **by_path("hsdp")), losses=0)
    same(at_2, run("tp", TP_FSDP, **by_path("hsdp", exclude_from_loading=["dataloader"])), losses=0)
    same(theirs, run("hsdp", HSDP, steps=3), losses=1)  # in place

    sharded = run("fsdp", FSDP_4, titan=False)
    same(sharded, run("other", HSDP, **by_path("fsdp")), losses=0)


def test_hsdp_goes_on_in_place_and_from_and_into_other_layouts(assets: Path, tmp_path: Path) -> None:
    """At the same data-parallel degree the data position comes along; without it, tensor parallelism may change too."""
    _on_four(assets, tmp_path)


@distributed(1)
def _broken(assets: Path, folder: Path) -> None:
    train(config(assets, folder / "run", titan=False))
    checkpoint = folder / "run/checkpoint"

    def refused(match: str, flavour: str = "llama3_debugmodel", **settings: Any) -> None:
        before = sorted(str(path) for path in checkpoint.rglob("*") if "/." not in str(path.relative_to(checkpoint)))
        with pytest.raises((CheckpointError, OSError), match=match):
            train(config(assets, folder / "run", flavour, **settings))
        after = sorted(str(path) for path in checkpoint.rglob("*") if "/." not in str(path.relative_to(checkpoint)))
        assert after == before

    refused("the weights do not fit the model", "qwen3_debugmodel")
    (checkpoint / "step-6/.metadata").unlink()  # torchtitan was killed while it wrote this step
    refused(r"goes on from torchtitan's step 4, and step-6 would be in the way of its saves: move it away")
    shutil.rmtree(checkpoint / "step-6")
    (checkpoint / "step-4/__0_0.distcp").unlink()
    refused("step-4/__0_0.distcp, needed for .* is missing", load_step=4)
    refused("goes on from torchtitan's step 2, and step-4 would be in the way")
    (checkpoint / "step-2/.metadata").write_bytes(b"not a pickle")
    refused("step-2/.metadata is not the metadata of a DCP checkpoint, and may be hostile", load_only=True)
    (checkpoint / "step-2/.metadata").unlink()
    (checkpoint / "step-4/.metadata").unlink()
    refused("holds no checkpoint that can be loaded, but content that looks like one")


def test_a_broken_folder_of_torchtitans_is_one_clear_error(assets: Path, tmp_path: Path) -> None:
    """Half written, of another model, with a missing shard: the folder stays as it is and no run starts afresh."""
    _broken(assets, tmp_path)
