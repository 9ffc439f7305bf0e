"""D6: weights that are asked for are the ones trained on, or nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.tiny_run import losses, settings
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights.wrapper import ModelWrapper


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of the model after a step."""
    folder = tmp_path_factory.mktemp("base")
    export = {"save": {"interval": 5}, "export": {"format": "hf"}}
    Trainer(settings(folder, training={"steps": 1}, checkpoint=export)).run()
    return folder / "run" / "exports" / "step-1"


class Recomputing(Trainer):
    """Recomputes the activations of every block, which puts a segment of its own into names."""

    def build_model(self) -> nn.Module:  # type: ignore[override]
        model = super().build_model()
        for name, block in list(model.layers.named_children()):
            setattr(model.layers, name, checkpoint_wrapper(block))
        return model


def test_d6_wrapper_segments_are_not_part_of_a_name(tmp_path: Path, base: Path) -> None:
    """A model with wrapped blocks loads a plain folder, saves plain names, and trains as the plain model does."""
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    wrapped = nn.ModuleDict({"compiled": compiled, "recomputed": checkpoint_wrapper(nn.Linear(2, 2))})
    assert [*ModelWrapper([wrapped]).state_dict()] == [
        "compiled.weight", "compiled.bias", "recomputed.weight", "recomputed.bias"
    ]  # fmt: skip
    load = {"save": {"interval": 2}, "initial_load": [{"path": str(base)}]}
    Trainer(settings(tmp_path / "plain", checkpoint=load)).run()
    Recomputing(settings(tmp_path / "wrapped", checkpoint=load)).run()
    assert losses(tmp_path / "plain") == losses(tmp_path / "wrapped")
    files = [
        load_file(tmp_path / name / "run" / "checkpoints" / "step-3" / "rank-00000.safetensors")
        for name in ("plain", "wrapped")
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


def test_d6_shapes_missing_and_unexpected_keys_are_all_listed(tmp_path: Path, base: Path) -> None:
    """One error names the tensor of another shape, the missing one and the unknown one; no step is taken."""
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text())))
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_prj.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LoadMismatchError) as raised:
        Trainer(settings(tmp_path, checkpoint={"initial_load": [{"path": str(folder)}]})).run()
    message = str(raised.value)
    for part in ("norm.weight: expected float32[96], found", "layers.0.feed_forward.w3.weight", "up_prj.weight"):
        assert part in message, message
    assert losses(tmp_path) == []
