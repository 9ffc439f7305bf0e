"""Offline conversion: round trips are byte-identical, memory is bounded, nothing half-done stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests import world
from tests.interop.folders import gap
from tests.world import same
from titan_ckpt.converting import convert
from titan_ckpt.errors import CorruptCheckpointError, ExportError, KeyMapError, NotACheckpointError
from titan_ckpt.models.llama3 import Llama3, Llama3Config


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama in two shards that transformers wrote."""
    return world.write_llama(tmp_path / "base", max_shard_size="200KB")


def model_of(base: Path) -> Llama3:
    config = LlamaConfig.from_pretrained(base)
    return Llama3(Llama3Config.from_hf(config.to_dict()))


def test_a_converted_folder_is_a_source_of_a_run(tmp_path: Path, base: Path) -> None:
    """A run starts from the converted native folder as from the Hugging Face one."""
    convert(base, tmp_path / "native", "native", key_map=model_of(base).key_map())
    model = model_of(base)
    world.load(world.manager(tmp_path / "run", model, initial_load=[tmp_path / "native"]))
    loaded: Any = LlamaForCausalLM.from_pretrained(base)
    assert gap(model, loaded.eval()) <= 1e-5


def test_a_training_step_gives_its_weights_only(tmp_path: Path, base: Path) -> None:
    """Optimizer state stays behind; bf16 is the cast."""
    model = model_of(base)
    model.init_weights()
    optimizer = world.adamw(model)
    world.step_on(model, optimizer, world.TOKENS)
    world.save(world.manager(tmp_path / "run", model, optimizer))
    step = tmp_path / "run" / "checkpoints" / "step-1"
    convert(step, tmp_path / "dcp", "dcp", dtype=torch.bfloat16)
    convert(tmp_path / "dcp", tmp_path / "native", "native")
    found = load_file(tmp_path / "native" / "rank-00000.safetensors")
    assert same(found, {f"model.{k}": v.bfloat16() for k, v in model.state_dict().items()})


@pytest.mark.parametrize("to", ["dcp", "native"])
def test_a_value_beyond_float16_is_refused(tmp_path: Path, to: Any) -> None:
    """The tensor is named, and nothing stays."""
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, 1e5])}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"b: its largest value is 100000, and float16 ends at 65504"):
        convert(tmp_path / "model.safetensors", tmp_path / "out", to, dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_unknown_keys_are_listed_and_nothing_stays(tmp_path: Path, base: Path) -> None:
    """A table that does not fit is one error; the target is not there."""
    from titan_ckpt import KeyMap, KeyRule

    table = KeyMap((KeyRule.of("embed.weight", "model.embed_tokens.weight"),))
    with pytest.raises(KeyMapError, match=r"lm_head\.weight"):
        convert(base, tmp_path / "native", "native", key_map=table)
    assert not (tmp_path / "native").exists()


def test_what_cannot_be_asked_for_is_one_error(tmp_path: Path, base: Path) -> None:
    """A format, dtype, size and target that make no sense, all at once; and a target that cannot be written."""
    wrong: Any = {"to": "gguf", "dtype": torch.int8, "max_shard_bytes": 0}
    with pytest.raises(
        ExportError, match=r"(?s)'gguf' is not one of hf.*int8 takes scales.*is no size.*is there already"
    ):
        convert(base, base, **wrong)
    (tmp_path / "file").write_text("")
    for to in ("hf", "native", "dcp"):
        asked: Any = to
        table = model_of(base).key_map()
        with pytest.raises(ExportError, match="exists"):
            convert(base, tmp_path / "file" / "out", asked, key_map=table, assets=base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "file"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_source_that_is_no_file_is_one_error(tmp_path: Path, name: str) -> None:
    """A pipe is not waited for, and a link into nothing is a download that is not complete."""
    (tmp_path / "source").mkdir()
    if name == "config.json":
        save_file({"a": torch.zeros(2)}, tmp_path / "source" / "model.safetensors")
    os.mkfifo(tmp_path / "source" / name)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: .*no.* regular file|{name}: cannot be read"):
        convert(tmp_path / "source", tmp_path / "out", "native")
    (tmp_path / "source" / name).unlink()
    (tmp_path / "source" / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "source" / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(CorruptCheckpointError, match="Is the download complete"):
        convert(tmp_path / "source", tmp_path / "out", "native")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    """A PEFT folder is refused with the way to merge it."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}'
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.ones(4, 2)},
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(NotACheckpointError, match=r"titan-ckpt merge BASE .* writes a model"):
        convert(adapter, tmp_path / "native", "native")
