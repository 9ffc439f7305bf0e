"""The base that a PEFT folder names, compared with the run's base; the initial weights of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.tiny_run import export_base, losses, settings
from titan_ckpt.errors import BaseMismatchError, LoadMismatchError
from titan_ckpt.loading.adapters import check_named_base
from titan_ckpt.loading.plan import LoadSource
from titan_ckpt.training.trainer import Trainer
from titan_ckpt.weights.wrapper import ModelWrapper

LLAMA, COMMIT = "meta-llama/Llama-3.2-1B", "4e20de362430cd3b72f300e6b0f18e50e7166e08"


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def in_cache(root: Path, name: str = LLAMA, commit: str = COMMIT) -> Path:
    return write_model(root / f"models--{name.replace('/', '--')}" / "snapshots" / commit)


def said_of(base: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], revision: str | None = None) -> str:
    """Return the warnings about an adapter with this config over this base."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_named_base(Path("adapter"), config, LoadSource(base, "hf", revision=revision))
    return caplog.text


def test_names_that_agree_or_say_nothing_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same folder, a link to it, a folder of the same files, the same hub id, and a folder without any name."""
    base = write_model(tmp_path / "base")
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/model.safetensors").symlink_to(base / "model.safetensors")
    named = write_model(tmp_path / "named", _name_or_path=LLAMA)
    for folder, name in [
        (base, str(base)),
        (base, str(tmp_path / "link")),
        (base, str(tmp_path / "files")),
        (base / "model.safetensors", str(base)),
        (base, LLAMA),
        (base, None),
        (named, LLAMA),
        (named, "Llama-3.2-1B"),
        (in_cache(tmp_path / "cache"), LLAMA),
    ]:
        assert not said_of(folder, caplog, {"base_model_name_or_path": name}), (folder, name)


def test_names_that_contradict_each_other_are_warned_of_with_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another folder, a folder that is not here, another hub id in config.json or in the cache's path."""
    base, other = write_model(tmp_path / "base"), write_model(tmp_path / "other")
    named = write_model(tmp_path / "named", _name_or_path="Qwen/Qwen3-0.6B")
    cached = in_cache(tmp_path / "cache", "meta-llama/Llama-3.1-8B")
    for folder, name, found in [
        (base, str(other), str(base)),
        (base, "/home/somebody/models/base", str(base)),
        (named, LLAMA, "Qwen/Qwen3-0.6B"),
        (cached, LLAMA, "meta-llama/Llama-3.1-8B"),
    ]:
        said = said_of(folder, caplog, {"base_model_name_or_path": name})
        assert f"adapter was trained on {name}" in said and found in said, said


def test_revisions_that_both_sides_state_must_agree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another one is refused, with a way out; a shortened commit and a moving branch are not another one."""
    base = write_model(tmp_path / "base")
    with pytest.raises(BaseMismatchError, match=r"at revision v1\n.*at revision v10\n.*leave `revision` out"):
        said_of(base, caplog, {"revision": "v1"}, "v10")
    for given, recorded in [(COMMIT[:8], COMMIT), (COMMIT, "main"), (None, "v1"), ("v1", None)]:
        assert not said_of(base, caplog, {"revision": recorded}, given), (given, recorded)
    said = said_of(in_cache(tmp_path / "cache"), caplog, {"base_model_name_or_path": LLAMA, "revision": "a" * 40})
    assert "revision aaaa" in said and f"is revision {COMMIT}" in said


def test_f9_a_recorded_digest_makes_names_needless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter of this package is compared by its base's weights, wherever they are and whatever they are called."""
    record = {"digest": "ab" * 16, "path": "elsewhere"}
    config = {"base_model_name_or_path": "/elsewhere", "revision": "v1", "titan_ckpt_base": record}
    assert not said_of(write_model(tmp_path / "base"), caplog, config, "v2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of the model after a step."""
    return export_base(tmp_path_factory.mktemp("base"))


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
