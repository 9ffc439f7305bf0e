"""The user's own model of transformers in a loop of its own: it is read, exported and opened again without a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests import world
from tests.unit.models.test_hf import FAMILIES, SMALL
from titan_ckpt import ExportConfig, InitialLoadConfig, StateDictTransforms
from titan_ckpt.converters import from_tables
from titan_ckpt.errors import ConfigError, ExportError
from titan_ckpt.testing import distributed

MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "tied": ("qwen3", "Qwen3ForCausalLM"),
    "experts": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "transposed": ("gpt2", "GPT2LMHeadModel"),
    "another head": ("llama", "LlamaForSequenceClassification"),
    "no head": ("qwen3", "Qwen3Model"),
}
EXPORT = (ExportConfig("hf"),)


def built(kind: str, seed: int = 0, **settings: Any) -> Any:
    family, name = MODELS[kind]
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **settings})
    torch.manual_seed(seed)
    return getattr(transformers, name)(config)


def keys_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def exported(folder: Path, model: Any, **given: Any) -> Path:
    world.finish(world.manager(folder, model, **{"export": EXPORT, **given}))
    return folder / "exports" / "step-1"


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_transformers_exports_by_itself(kind: str, tmp_path: Path) -> None:
    """The folder is the one that save_pretrained writes: names, class, generation settings, and the same values."""
    model = built(kind)
    if generates := model.can_generate():
        model.generation_config.max_new_tokens = 7
    out = exported(tmp_path, model)
    model.save_pretrained(tmp_path / "theirs")
    assert keys_in(out) == keys_in(tmp_path / "theirs")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "theirs"))
    assert ours == {"tie_word_embeddings": ours["tie_word_embeddings"]} | theirs
    if generates:
        settings = [(folder / "generation_config.json").read_text() for folder in (out, tmp_path / "theirs")]
        assert json.loads(settings[0]) == json.loads(settings[1])
    again, about = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(about.values())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_transformers_starts_from_a_folder_by_itself(kind: str, tmp_path: Path) -> None:
    built(kind, seed=1).save_pretrained(tmp_path / "base")
    model = built(kind)
    source = InitialLoadConfig(str(tmp_path / "base"), format="hf")
    world.load(world.manager(tmp_path / "run", model, initial_load=[source]))
    assert world.same(dict(model.state_dict()), dict(built(kind, seed=1).state_dict()))


class Mine(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers leaves its hook untyped
    """A class of the user's own over one of transformers."""


def test_a_class_of_ones_own_is_opened_by_that_of_transformers(tmp_path: Path) -> None:
    model = torch.compile(Mine(built("llama").config), backend="eager")
    out = exported(tmp_path, model)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(value, again[name.removeprefix("_orig_mod.")]) for name, value in model.state_dict().items())  # type: ignore[attr-defined]


@distributed(nproc=2)
@pytest.mark.parametrize(("way", "kind"), [("ddp", "experts"), ("fsdp2", "experts"), ("fsdp2", "tied")])
def test_a_sharded_model_exports_by_itself(way: str, kind: str, tmp_path: Path) -> None:
    """Under DDP and FSDP2, with weights that are fused in memory and apart in the folder, or tied."""
    model = built(kind)
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    wrapped = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    assert StateDictTransforms.from_transformers(wrapped).hf_config is not None
    out = exported(tmp_path, wrapped)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(out)
    assert type(again).__name__ == MODELS[kind][1]
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())


def test_a_model_with_converters_is_given_its_table(tmp_path: Path) -> None:
    """The converter changes the modules, so the table is made before; the refusal says so."""
    lora = from_tables([{"kind": "lora", "rank": 2, "target_modules": ["q_proj"]}])
    model = built("llama")
    table = StateDictTransforms.from_transformers(model)
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    lora.convert(model)
    with pytest.raises(ExportError, match=r"StateDictTransforms\.from_transformers\(model\) before converters"):
        exported(tmp_path, model, model_converters=lora)
    with world.manager(tmp_path, model, export=EXPORT, model_converters=lora, sd_transforms=table) as manager:
        manager.load()
        for name, value in model.named_parameters():
            if name not in whole:
                torch.nn.init.normal_(value)
        manager.save(1, last_step=True)
    kind: Any = LlamaForCausalLM
    again, about = kind.from_pretrained(tmp_path / "exports" / "step-1", output_loading_info=True)
    assert not any(about.values())
    merged = {name for name, value in again.state_dict().items() if not torch.equal(value, whole[name])}
    assert merged == {name for name in whole if "q_proj" in name}


@pytest.mark.parametrize("kind", ["tied", "transposed"])
def test_a_head_that_was_untied_by_hand_is_refused_until_the_config_says_so(kind: str, tmp_path: Path) -> None:
    """Before training; some versions of transformers would tie it again, which the export's reader does not see."""
    model = built(kind, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(3 * model.lm_head.weight.detach())
    with pytest.raises(ConfigError, match=r"has lm_head\.weight of its own.*tie_word_embeddings = False"):
        exported(tmp_path / "refused", model)
    model.config.tie_word_embeddings = False
    again = type(model).from_pretrained(exported(tmp_path, model))
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_what_has_no_plain_export_is_refused_by_name(tmp_path: Path) -> None:
    """Before the first step; a manager that exports nothing takes the same models."""
    adapted = built("llama")
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    wrapped = get_peft_model(built("llama"), LoraConfig(target_modules=["q_proj"]))
    for model in (adapted, wrapped, torch.nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match=r"has adapters of PEFT.*: merge|Linear is no PreTrainedModel"):
            StateDictTransforms.from_transformers(model)
    with pytest.raises(ConfigError, match="has adapters of PEFT"):
        exported(tmp_path / "refused", adapted)
    exported(tmp_path / "run", adapted, export=())
