"""Our models load torchtitan's folders by its names, and export folders that its models load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import world
from titan_ckpt.config import ExportConfig
from titan_ckpt.errors import ConfigError, ExportError
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import build_model
from titan_ckpt.weights.transforms import StateDictTransforms

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _model(name: str, flavor: str, seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    model = build_model(name, flavor=flavor)
    model.init_weights()
    return model


def _theirs(fqn: str) -> str:
    fqn = "lm_head.weight" if fqn == "output.weight" else fqn
    for part in ("wq", "wk", "wv"):
        fqn = fqn.replace(f"attention.{part}.", f"attention.qkv_linear.{part}.")
    return fqn


def _transforms(model: LanguageModel) -> StateDictTransforms:
    return StateDictTransforms(model.key_map(), torchtitan=model.torchtitan_key_map())


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("flavor", ["debug-0.5m", "debug-2m"], ids=["tied", "untied"])
def test_a_model_goes_to_torchtitans_names_and_back(tmp_path: Path, name: str, flavor: str) -> None:
    """An export has exactly torchtitan's names, a tied matrix under both; a load finds them, nested too."""
    model = _model(name, flavor, 1)
    exports = (ExportConfig("dcp", names="torchtitan"),)
    with world.manager(tmp_path, model, export=exports, sd_transforms=_transforms(model)) as manager:
        manager.load()
        manager.export(1, last_step=True)
    expected = {_theirs(fqn): value.detach() for fqn, value in model.state_dict().items()}
    if "output.weight" not in model.state_dict():
        expected["lm_head.weight"] = expected["tok_embeddings.weight"]
    found = {fqn: torch.zeros_like(value) for fqn, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "exports/step-1", no_dist=True)
    assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())

    dcp.save({"app": {"model": found}}, checkpoint_id=tmp_path / "nested", no_dist=True)
    for folder in ("exports/step-1", "nested"):
        other = _model(name, flavor, 2)
        sources = [tmp_path / folder]
        world.load(world.manager(tmp_path / "run", other, initial_load=sources, sd_transforms=_transforms(other)))
        assert all(torch.equal(value, model.state_dict()[fqn]) for fqn, value in other.state_dict().items())


def test_a_model_without_such_a_table_is_refused(tmp_path: Path) -> None:
    """A model of one's own has no names in torchtitan; hf exports have their own."""
    with pytest.raises(ConfigError, match="names: torchtitan's are for the weights of a dcp export"):
        ExportConfig("hf", names="torchtitan")
    with pytest.raises(ExportError, match=r"dcp: there are no names of torchtitan for bias; weight"):
        world.manager(tmp_path, torch.nn.Linear(2, 2), export=(ExportConfig("dcp", names="torchtitan"),))
