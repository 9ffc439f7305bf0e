"""Every architecture by name: built, trained, resumed and exported as TOML asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import world
from tests.tiny_run import losses, settings
from titan_ckpt.config import ExportConfig, from_dict
from titan_ckpt.errors import ConfigError, ExportError
from titan_ckpt.models import qwen3, qwen3_moe
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.models.registry import ARCHITECTURES, build_model
from titan_ckpt.training.config import ModelConfig
from titan_ckpt.training.trainer import Trainer

auto: Any = AutoModelForCausalLM  # its methods have no types

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": qwen3.FLAVORS["debug-0.5m"].to_hf(),
    "qwen3_moe": qwen3_moe.FLAVORS["debug-1m"].to_hf() | {"num_hidden_layers": 2},
    "hf": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "vocab_size": 2048, "max_position_embeddings": 64,
    },
}  # fmt: skip


def folder_of(name: str, where: Path) -> Path:
    """Return a folder with transformers' weights of this shape."""
    torch.manual_seed(3)
    folder = where / "base"
    auto.from_config(AutoConfig.for_model(**SHAPES[name])).save_pretrained(folder)
    return folder


def run_of(name: str, base: Path, where: Path, steps: int) -> Trainer:
    return Trainer(
        settings(
            where,
            model={"name": name, "flavor": None, "folder": str(base)},
            data={"sequence_length": 32},
            training={"steps": steps, "batch_size": 8},
            schedule={"kind": "constant", "warmup_ratio": 0.0},
            checkpoint={"initial_load": [{"path": str(base)}], "export": {"format": "hf"}},
        )
    )


@pytest.mark.parametrize("name", list(SHAPES))
def test_an_architecture_trains_from_a_folder_resumes_and_exports(name: str, tmp_path: Path) -> None:
    """Four steps from transformers' weights, then four more: the loss falls, and the export has the trained logits."""
    base = folder_of(name, tmp_path)
    run_of(name, base, tmp_path, 4).run()
    trainer = run_of(name, base, tmp_path, 8)
    assert trainer.run().step == 8
    found = losses(tmp_path)
    assert len(found) == 8
    assert found[-1] < found[0] - 0.5
    exported, report = auto.from_pretrained(tmp_path / "run" / "exports" / "step-8", output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.randint(0, 300, (1, 20))
    with torch.no_grad():
        difference = trainer.model.eval()(tokens) - exported.eval()(tokens).logits
    assert difference.abs().max() <= 1e-5


def test_every_flavor_of_every_architecture_builds_on_meta() -> None:
    """The list's flavors are models with a length, a vocabulary, layers and a table for each parameter."""
    with torch.device("meta"):
        for name, architecture in ARCHITECTURES.items():
            for flavor in architecture.flavors:
                model = build_model(name, flavor=flavor)
                assert isinstance(model, LanguageModel)
                assert model.max_seq_len is not None
                assert len(list(model.layers.children())) > 1
                table = model.key_map()
                assert all(table.group_of_fqn(fqn).keys for fqn in model.state_dict())


def test_the_settings_know_the_same_names() -> None:
    """TOML accepts as model.name exactly the names of the list."""
    for name in ARCHITECTURES:
        assert from_dict(ModelConfig, {"name": name, "folder": "f"}).name == name
    with pytest.raises(ConfigError, match="qwen3_moe"):
        from_dict(ModelConfig, {"name": "qwen4", "folder": "f"})


@pytest.mark.parametrize(
    ("name", "flavor", "cause"),
    [
        ("gpt5", "8B", r"model\.name: 'gpt5' is unknown; known: llama3, qwen3"),
        ("qwen3", "9B", r"model\.flavor: '9B' is unknown; known: debug-0\.5m, .*8B"),
        ("hf", "8B", r"known: none: hf needs model\.folder"),
        ("qwen3", None, r"model\.flavor: None is unknown"),
    ],
)
def test_an_unknown_name_or_flavor_is_answered_with_the_known_ones(name: str, flavor: str | None, cause: str) -> None:
    """The message is about the setting, and says what there is."""
    with pytest.raises(ConfigError, match=cause):
        build_model(name, flavor=flavor)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "is not there"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object, found list"),
        (json.dumps({"model_type": "llama"}), "model_type: 'llama' is not supported, expected 'qwen3'"),
    ],
)
def test_a_folder_that_does_not_fit_is_named_with_the_reason(tmp_path: Path, content: str | None, cause: str) -> None:
    """A wrong folder is found before anything is built."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=cause) as caught:
        build_model("qwen3", folder=tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_names_of_torchtitan_are_for_models_that_have_them(tmp_path: Path) -> None:
    """A model of one's own has none; hf exports have their own. tests/torchtitan loads and exports by these names."""
    with pytest.raises(ExportError, match=r"torchtitan_weights: there are no names of torchtitan for bias; weight"):
        world.manager(tmp_path, torch.nn.Linear(2, 2), export=(ExportConfig("torchtitan_weights"),))
