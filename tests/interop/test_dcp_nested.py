"""DCP folders that nest the model: the place is found from the names, or named by a setting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests import world
from titan_ckpt.config import ExportConfig, InitialLoadConfig
from titan_ckpt.errors import ConfigError, LoadMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def _loaded(folder: Path, **settings: Any) -> nn.Sequential:
    model = _model(9)
    world.load(world.manager(folder.parent / "run", model, initial_load=[InitialLoadConfig(str(folder), **settings)]))
    return model


@pytest.mark.parametrize("place", [(), ("model",), ("state", "model"), ("app", "net", "inner")], ids=".".join)
def test_the_model_is_found_wherever_it_is_nested(tmp_path: Path, place: tuple[str, ...]) -> None:
    """The optimizer's state and counters beside it are left where they are."""
    model = _model(1)
    state: dict[str, Any] = {"optimizer": {"state": {"0.weight": torch.ones(8, 4)}}, "train_state": {"step": 3}}
    state |= dict(model.state_dict())
    for key in reversed(place):
        state = {key: state} if key != place[-1] else {key: model.state_dict(), "optimizer": state["optimizer"]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(_loaded(tmp_path / "dcp").state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_two_places_are_one_error_and_a_setting_decides(tmp_path: Path) -> None:
    """Nothing is guessed between a model and its average."""
    model, average = _model(1), _model(2)
    dcp.save({"app": {"model": model.state_dict(), "ema": average.state_dict()}}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(LoadMismatchError, match=r"2 places, each with 4 of its tensors: app\.ema\., app\.model\..*pre"):
        _loaded(tmp_path / "dcp")
    loaded = _loaded(tmp_path / "dcp", prefix="app.ema.")
    assert torch.equal(loaded.state_dict()["1.bias"], average.state_dict()["1.bias"])
    with pytest.raises(LoadMismatchError, match=r"no tensor has the prefix 'ema\.'; the names there begin with app\."):
        _loaded(tmp_path / "dcp", prefix="ema.")


def test_a_prefix_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A missing dot and a format without prefixes are faults of the config."""
    with pytest.raises(ConfigError, match=r"ends without a dot; write .model\..\n.*only a DCP folder nests the model"):
        InitialLoadConfig("x", format="hf", prefix="model")
    world.save(world.manager(tmp_path, _model(1)))
    with pytest.raises(ConfigError, match=r"initial_load\.prefix: only a DCP folder nests the model, and .* is native"):
        _loaded(tmp_path / "checkpoints" / "step-1", prefix="model.")


def _tied(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_tied_tensor_has_both_names_and_must_be_one(tmp_path: Path) -> None:
    """A tied model is exported and loaded with both names, as torchtitan has it; two different tensors are refused."""
    model = _tied(1)
    with world.manager(tmp_path, model, export=(ExportConfig("dcp"),)) as manager:
        manager.load()
        manager.export(1, last_step=True)
    found = {name: torch.zeros(8, 4) for name in model.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "exports/step-1", no_dist=True)
    assert torch.equal(found["1.weight"], model.state_dict()["0.weight"])
    other = _tied(2)
    world.load(world.manager(tmp_path / "run", other, initial_load=[tmp_path / "exports/step-1"]))
    assert torch.equal(other.state_dict()["1.weight"], model.state_dict()["1.weight"])
    broken = torch.full((8, 4), math.nan)
    dcp.save({"model": dict.fromkeys(found, broken)}, checkpoint_id=tmp_path / "nan", no_dist=True)
    world.load(world.manager(tmp_path / "run", other, initial_load=[tmp_path / "nan"]))
    assert other.state_dict()["1.weight"].isnan().all(), "the same bits are one tensor"
    dcp.save({"model": found | {"1.weight": torch.ones(8, 4)}}, checkpoint_id=tmp_path / "untied", no_dist=True)
    world.load_fails(
        world.manager(tmp_path / "run", _tied(2), initial_load=[tmp_path / "untied"]),
        LoadMismatchError,
        r"1\.weight and 0\.weight are one tensor in this model and differ there",
    )
