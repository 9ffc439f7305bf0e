"""The tables of adapter_config.json's fields: refusals by name, and the selection of modules as PEFT selects them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

from titan_ckpt.errors import CorruptCheckpointError, NotACheckpointError
from titan_ckpt.formats.huggingface.peft import PeftReader, unselected
from titan_ckpt.formats.huggingface.peft_fields import (
    HONOURED,
    REFUSED,
    WITHOUT_EFFECT,
    Selection,
    is_trained_bias,
    saves,
)

KEY = "base_model.model.model.layers.0.self_attn.q_proj"
INNER = ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.1.up")
MODULES = [
    *(f"model.layers.{i}.{name}" for i in (0, 1, 10) for name in INNER),
    "lm_head", "model.embed_tokens", "q_proj", "h.1.attn.c_attn",
]  # fmt: skip


def write(folder: Path, config: dict[str, Any], keys: Sequence[str] = ()) -> Path:
    """Write a plain adapter of one module, with more fields and keys."""
    folder.mkdir(parents=True)
    tensors = {f"{KEY}.lora_A.weight": torch.ones(4, 8), f"{KEY}.lora_B.weight": torch.ones(8, 4)}
    save_file(tensors | {key: torch.ones(8) for key in keys}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", [*REFUSED, "a_later_field"])
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """An empty value is none; any other names the field, whatever tensors stand beside it."""
    values: list[Any] = [None, False, [], {}, 0, ""]
    for index, value in enumerate(values):
        with PeftReader(write(tmp_path / str(index), {name: value})) as reader:
            reader.require_supported()
    folder = write(tmp_path / "set", {name: {"x": 1}}, [f"{KEY}.lora_B.bias"])
    fault = rf"1 setting\(s\) cannot be honoured.*\n  {name} = \{{'x': 1\}}: "
    with PeftReader(folder) as reader:
        assert len(reader.tensors) == 3, "it can be looked at"
        with pytest.raises(NotACheckpointError, match=fault):
            reader.require_supported()
        with pytest.raises(NotACheckpointError, match=fault):
            reader.read([])


def test_the_docs_list_every_field_with_its_treatment() -> None:
    """The table in docs/converters.md has each field in the row of its treatment."""
    page = (Path(__file__).parents[2] / "docs/converters.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for treatment, fields in [("honoured", HONOURED), ("without effect", WITHOUT_EFFECT), ("refused", REFUSED)]:
        assert {name for name in fields if f"`{name}`" not in rows[treatment]} == set()


def test_all_settings_that_cannot_be_honoured_are_listed_in_one_error(tmp_path: Path) -> None:
    """Each with its value and its reason, and with a way out where there is one."""
    config = {
        "init_lora_weights": "pissa",
        "alora_invocation_tokens": [1],
        "use_bdlora": {"nblocks": 2},
    }
    folder = write(tmp_path / "a", config, [f"{KEY}.base_layer.bias"])
    with PeftReader(folder) as reader, pytest.raises(NotACheckpointError) as raised:
        reader.require_supported()
    lines = str(raised.value).splitlines()
    assert [line.split(" = ")[0].strip() for line in lines[1:]] == [
        "alora_invocation_tokens", "init_lora_weights", "use_bdlora",
    ]  # fmt: skip
    assert "path_initial_model_for_weight_conversion" in lines[2] and "set init_lora_weights to true" in lines[2]


def test_biases_of_modules_that_are_saved_whole_are_no_trained_biases() -> None:
    """A classifier beside the adapter has a bias of its own; that of a target is trained by the setting."""
    config = {"bias": "lora_only", "modules_to_save": ["score"]}
    assert not is_trained_bias(config, "base_model.model.score.bias")
    assert is_trained_bias(config, f"{KEY}.base_layer.bias")
    assert not is_trained_bias({"bias": "none"}, f"{KEY}.base_layer.bias")


def test_tensors_of_a_module_inside_one_that_is_saved_whole_are_its_own() -> None:
    """PEFT copies a module with all that it contains."""
    assert saves({"modules_to_save": ["self_attn"]}, f"{KEY}.weight")
    assert saves({"modules_to_save": ["q_proj"]}, f"{KEY}.weight")
    assert not saves({"modules_to_save": ["mlp", "self"]}, f"{KEY}.weight")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "up"]},
        {"target_modules": ["model.layers.1.mlp.down_proj", "proj"]},
        {"target_modules": r".*\.1\..*proj"},
        {"target_modules": "q_proj"},
        {"target_modules": r"lm_head|model\.layers\.10\.mlp\.down_proj"},
        {"target_modules": "|".join([r"model\.layers\.1\.self_attn\.q_proj", *["x" * 50] * 100])},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["self_attn.q_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r"model\.layers\.1.*"},
        {"target_modules": ["q_proj", "up", "lm_head", "c_attn"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "up"], "layers_to_transform": 10},
        {"target_modules": ["q_proj", "up"], "layers_to_transform": []},
        {"target_modules": ["up", "c_attn"], "layers_to_transform": [1], "layers_pattern": ["h", "experts"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    ],
)
def test_modules_are_selected_as_peft_selects_them(settings: dict[str, Any]) -> None:
    """Names, their ends, expressions, exclusions and layers: the same answer for every module."""
    config = LoraConfig(**settings)
    selection = Selection(settings)
    for module in MODULES:
        theirs = check_target_module_exists(config, module)
        assert selection.holds(module) == (bool(theirs) and type(theirs).__name__ != "_ExcludedModule"), module


def test_tensors_that_peft_would_ignore_are_found(tmp_path: Path) -> None:
    """A folder whose target_modules was changed by hand; expressions that no reader can bound are refused."""
    with PeftReader(write(tmp_path / "a", {"target_modules": ["k_proj"]})) as reader:
        assert unselected(reader) == [f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"]
    with PeftReader(write(tmp_path / "b", {"target_modules": r".*(q|v)_proj"})) as reader:
        assert not unselected(reader)
    wrong: list[tuple[str, Any, str]] = [
        ("target_modules", "(q_proj", "which is no regular expression that is matched here"),
        ("target_modules", {"q_proj": 1}, "expected list or str"),
        ("exclude_modules", [1], "expected list or str"),
        ("layers_to_transform", ["1"], "expected list or int"),
        ("use_dora", "yes", "expected bool"),
        ("base_model_name_or_path", ["base"], "expected str"),
    ]
    for name, value, fault in wrong:
        with pytest.raises(CorruptCheckpointError, match=f"{name} is .*{fault}"):
            PeftReader(write(tmp_path / f"{name}{len(str(value))}", {name: value}))
