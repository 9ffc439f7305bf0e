"""Folders of models that are no causal language models: read, converted, merged, trained and opened again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from tests import world
from tests.interop.folders import open_strictly
from tests.interop.tasks import TASKS, evaluated, logits, made
from tests.tools.steps import call
from tests.zoo.model_runs import Outcome, full_outcome, lora_outcomes
from titan_ckpt import ExportConfig
from titan_ckpt.testing import distributed

EXPORT = (ExportConfig("hf"),)


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_is_converted_there_and_back_by_the_class_that_it_names(task: str, tmp_path: Path) -> None:
    """transformers opens the result with nothing missing or left over, and it has the same logits."""
    model = made(task)
    model.save_pretrained(tmp_path / "base")
    assert call("convert", tmp_path / "base", tmp_path / "native", "--to", "native") == 0
    assert call("convert", tmp_path / "native", tmp_path / "hf", "--to", "hf", "--config", tmp_path / "base") == 0
    assert torch.equal(evaluated(open_strictly(type(model), tmp_path / "hf")), evaluated(model))
    assert call("verify", tmp_path / "hf") == 0


@pytest.mark.parametrize("task", TASKS)
def test_an_adapter_is_merged_into_a_base_of_any_task(task: str, tmp_path: Path) -> None:
    """The merged folder has the logits of PEFT's model, up to one rounding of each weight."""
    base = made(task)
    base.save_pretrained(tmp_path / "base")
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    heads = ("score", "classifier", "lm_head", "proj_out")
    targets = [name for name in linear if not name.endswith(heads)]
    torch.manual_seed(3)
    adapted: Any = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, target_modules=targets))
    adapted.save_pretrained(tmp_path / "adapter")
    assert call("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "merged") == 0
    expected, plain = evaluated(adapted), evaluated(made(task))
    difference = (evaluated(open_strictly(type(base), tmp_path / "merged")) - expected).abs().max()
    assert difference < 1e-5 < 1e-3 < (expected - plain).abs().max()


def test_a_folder_names_the_class_of_the_weights_that_are_in_it(tmp_path: Path) -> None:
    """The weights are a causal model's, and the config.json that gives the sizes names a classifier."""
    base = world.write_llama(tmp_path / "base")
    assert call("convert", base, tmp_path / "native", "--to", "native", "--model", "llama3") == 0
    said = json.loads((base / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert call("convert", tmp_path / "native", tmp_path / "hf", "--to", "hf", "--config", tmp_path) == 0
    open_strictly(AutoModelForCausalLM, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def composite() -> Any:
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 64}
    shape = {"text_config": text | layers, "vision_config": images | {"num_position_embeddings": 4}}
    make: Any = Qwen3_5ForConditionalGeneration
    return make(AutoConfig.for_model("qwen3_5", **shape))


def test_an_adapter_that_fits_neither_is_refused_by_the_model_that_the_folder_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the one tensor that does not fit, and not all that the text alone does not have."""
    composite().save_pretrained(tmp_path / "base")
    adapted: Any = get_peft_model(composite(), LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    with torch.no_grad():
        (pair,) = [m for name, m in adapted.named_modules() if name.endswith("q_proj.lora_A.default")]
        pair.weight = nn.Parameter(torch.ones(2, 31))
    adapted.save_pretrained(tmp_path / "adapter")
    assert call("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "merged") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "language_model.layers.0.self_attn.q_proj.lora_A.weight: expected a weight [" in said
    assert "has no place for it" not in said


def test_an_adapter_of_the_text_model_in_a_composite_one_is_merged_into_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder holds text and images, and AutoModelForCausalLM opens the text: so it does the merged folder."""
    composite().save_pretrained(tmp_path / "base")
    adapted: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    assert call("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "merged") == 0
    assert "is merged as the Qwen3_5ForCausalLM that the adapter is of" in " ".join(capsys.readouterr().out.split())
    merged = open_strictly(AutoModelForCausalLM, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [type(merged).__name__]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, adapted.eval()(tokens).logits, atol=1e-5, rtol=0)


class Loop:
    """A loop of the user's own, sharded where there are ranks."""

    def __init__(self, task: str, seed: int) -> None:
        self.model = made(task, seed)
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = world.adamw(self.model, lr=1e-3)

    def run(self, folder: Path, base: Path, last: int, killed: Path | None = None) -> None:
        """Train to the last step from where the folder is; copy it after step 2 as a kill would leave it."""
        given: dict[str, Any] = {"initial_load": [base], "export": EXPORT}
        with world.manager(folder, self.model, self.optimizer, **given) as manager:
            for step in range(manager.load().step + 1, last + 1):
                world.learn(self.optimizer, logits(self.model.train()).square().mean())
                manager.save(step, last_step=step == last)
                if step == 2 and killed is not None:
                    manager.wait()
                    if not dist.is_initialized() or dist.get_rank() == 0:
                        shutil.copytree(folder, killed)


def _trained_and_resumed(task: str, root: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        made(task, seed=5).save_pretrained(root / "base")
    if dist.is_initialized():
        dist.barrier()
    torch.manual_seed(0)
    whole = Loop(task, seed=1)
    whole.run(root / "whole", root / "base", 4, killed=root / "resumed")
    if dist.is_initialized():
        dist.barrier()
    again = Loop(task, seed=2)
    again.run(root / "resumed", root / "base", 4)
    found, expected = (world.weights_and_moments(run.model, run.optimizer) for run in (again, whole))
    assert not (wrong := world.differing(found, expected)), wrong
    weights = world.whole(dict(whole.model.state_dict()))
    for folder in ("whole", "resumed"):
        opened = open_strictly(type(made(task)), root / folder / "exports" / "step-4")
        assert world.same(dict(opened.state_dict()), weights)
    assert not torch.equal(evaluated(opened), evaluated(made(task, seed=5)))


@pytest.mark.parametrize("task", TASKS)
def test_a_killed_run_of_any_task_resumes_bit_for_bit(task: str, tmp_path: Path) -> None:
    """From its base, with dropout; transformers opens both exports, which hold what was trained."""
    _trained_and_resumed(task, tmp_path)


@distributed(nproc=2)
@pytest.mark.parametrize("task", ["vision-language", "translation", "speech to text"])
def test_a_killed_run_of_any_task_resumes_bit_for_bit_under_fsdp2(task: str, tmp_path: Path) -> None:
    """The same, sharded over two ranks."""
    _trained_and_resumed(task, tmp_path)


def test_a_run_file_trains_the_text_of_a_model_that_also_reads_images(tmp_path: Path) -> None:
    """As any causal language model: loaded, trained, resumed and exported bit for bit; adapters never differ unseen."""
    made("vision-language").save_pretrained(tmp_path / "base")
    assert full_outcome(tmp_path / "base", tmp_path / "full") == Outcome("exact")
    adapted = lora_outcomes(tmp_path / "base", tmp_path / "lora")
    assert all(outcome.verdict != "different" for outcome in adapted.values()), adapted
