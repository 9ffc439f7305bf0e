"""Checkpoints of torchtitan's own manager go on under ours, with all their training state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.runs import Run, config, distributed, same, train
from titan_ckpt import CheckpointError

HSDP = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
FSDP_4, TP_FSDP = {"data_parallel_shard": 4}, {"tensor_parallel": 2, "data_parallel_shard": 2}


@distributed(4)
def _on_four(assets: Path, folder: Path) -> None:
    def run(dump: str, degrees: dict[str, int], steps: int = 1, **settings: Any) -> Run:
        return train(config(assets, folder / dump, degrees=degrees, steps=steps, interval=1, layers=2, **settings))

    path: dict[str, Any] = {"initial_load_path": str(folder / "hsdp/checkpoint/step-1"), "load_only": True}
    path["initial_load_model_only"] = False
    at_1 = run("hsdp", HSDP, titan=False)
    theirs = run("hsdp", HSDP, steps=2, titan=False, load_only=True)
    same(at_1, run("fsdp", FSDP_4, **path), losses=0)
    with pytest.raises(CheckpointError, match=r'positions of 4 data-parallel ranks, this run has 2.*"dataloader"'):
        run("tp", TP_FSDP, **path)
    same(at_1, run("tp", TP_FSDP, exclude_from_loading=["dataloader"], **path), losses=0)
    same(theirs, run("hsdp", HSDP, steps=2), losses=1)  # in place


def test_hsdp_goes_on_in_place_and_into_other_layouts(assets: Path, tmp_path: Path) -> None:
    """At the same data-parallel degree the data position comes along; without it, tensor parallelism may change too."""
    _on_four(assets, tmp_path)


@distributed(4)
def _mixed(assets: Path, folder: Path) -> None:
    def run(dump: str, degrees: dict[str, int] = TP_FSDP, steps: int = 1, **settings: Any) -> Run:
        return train(config(assets, folder / dump, degrees=degrees, steps=steps, interval=1, layers=2, **settings))

    path: dict[str, Any] = {"initial_load_path": str(folder / "theirs/checkpoint/step-1"), "load_only": True}
    at_1 = run("theirs", titan=False)
    theirs = run("theirs", titan=False, steps=3, load_only=True)
    excluded: dict[str, Any] = {"initial_load_model_only": False, "exclude_from_loading": ["dataloader"]}
    same(at_1, run("fsdp", FSDP_4, **excluded, **path), losses=0)
    ours = run("theirs", steps=2, last_save_in_dcp=True)  # in place
    assert ours.losses == theirs.losses[:1]
    same(theirs, run("theirs", titan=False, folder="dcp", steps=3, load_only=True), losses=1)


def test_tensor_parallelism_over_fsdp_goes_on_either_way(assets: Path, tmp_path: Path) -> None:
    """TP x FSDP2 on 4 ranks, 2 layers: in place, by path into FSDP2 alone, and back to torchtitan's manager."""
    _mixed(assets, tmp_path)


@distributed(1)
def _broken(assets: Path, folder: Path) -> None:
    train(config(assets, folder / "run", titan=False, layers=2))
    checkpoint = folder / "run/checkpoint"

    def refused(match: str, flavour: str = "llama3_debugmodel", **settings: Any) -> None:
        before = sorted(str(path) for path in checkpoint.rglob("*") if "/." not in str(path.relative_to(checkpoint)))
        with pytest.raises((CheckpointError, OSError), match=match):
            train(config(assets, folder / "run", flavour, layers=2, **settings))
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
