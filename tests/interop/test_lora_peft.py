"""Adapters of ours in PEFT, and PEFT's in ours: the same logits, for every form that both know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from tests import world
from tests.interop.folders import disturb, gap, theirs, tuned, without_a_word
from tests.world import TINY, same, whole
from titan_ckpt.config import ExportConfig
from titan_ckpt.converters import ModelConvertersContainer
from titan_ckpt.errors import LoadMismatchError
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models import qwen3_moe

ATTENTION = ["wq", "wk", "wv", "wo"]
ALL = [*ATTENTION, "w1", "w2", "w3"]
HF_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HF = "model.layers"


def case(ours: dict[str, Any], peft: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same adapter in both tools' words."""
    return ours, peft


CASES = {
    "attention": case({"target_modules": ATTENTION}, {"target_modules": HF_ALL[:4]}),
    "all": case({"target_modules": ALL}, {"target_modules": HF_ALL}),
    "head": case({"target_modules": [*ALL, "output"]}, {"target_modules": [*HF_ALL, "lm_head"]}),
    "one_layer": case(
        {"target_modules": ["layers.1.attention.w[qk]"]},
        {"target_modules": [f"{HF}.1.self_attn.q_proj", f"{HF}.1.self_attn.k_proj"]},
    ),
    "embeddings": case({"target_modules": ["wq", "tok_embeddings"]}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "rslora": case({"target_modules": ALL, "use_rslora": True}, {"target_modules": HF_ALL, "use_rslora": True}),
    "dora": case({"target_modules": ALL, "use_dora": True}, {"target_modules": HF_ALL, "use_dora": True}),
    "dora_rslora": case(
        {"target_modules": ALL, "use_dora": True, "use_rslora": True},
        {"target_modules": HF_ALL, "use_dora": True, "use_rslora": True},
    ),
    "patterns": case(
        {
            "target_modules": ALL,
            "rank_pattern": {"wq": 2, "layers.1.feed_forward.w2": 6},
            "alpha_pattern": {"wq": 3.0, "layers.1.feed_forward.w2": 12.0},
        },
        {
            "target_modules": HF_ALL,
            "rank_pattern": {"q_proj": 2, f"{HF}.1.mlp.down_proj": 6},
            "alpha_pattern": {"q_proj": 3, f"{HF}.1.mlp.down_proj": 12},
        },
    ),
    "modules_to_save": case(
        {"target_modules": ATTENTION, "modules_to_save": ["norm", "output"]},
        {"target_modules": HF_ALL[:4], "modules_to_save": ["model.norm", "lm_head"]},
    ),
}


def hf_base(folder: Path) -> Any:
    """Write a random base to the folder and return it."""
    return theirs(TINY.to_hf(), folder)


def native(settings: dict[str, Any], model: Any = None) -> tuple[Any, ModelConvertersContainer]:
    """Return a model of ours with adapters, for evaluation."""
    model = world.llama() if model is None else model
    return model, world.convert(model.eval(), {"kind": "lora", "rank": 4, "alpha": 8.0, **settings})


def manager(
    model: Any, converters: ModelConvertersContainer, folder: Path, *sources: Path, **given: Any
) -> CheckpointManager:
    return world.manager(folder, model, initial_load=sources, model_converters=converters, **given)


def trained(
    model: Any,
    converters: ModelConvertersContainer,
    folder: Path,
    *sources: Path,
    formats: tuple[Any, ...] = ("peft", "hf"),
) -> Path:
    """Load the sources, train in effect, export as the last step, and return where the exports are."""
    exports = tuple(map(ExportConfig, formats))
    with manager(model, converters, folder, *sources, export=exports) as m:
        m.load()
        disturb(model, lambda name, _: converters.key_filter(name))
        m.save(1, last_step=True)
    return folder / "exports"


@pytest.mark.parametrize("name", CASES)
def test_a7_our_adapter_in_peft(name: str, tmp_path: Path) -> None:
    """Train on a Hugging Face base and export: PEFT on that base gives our logits, and so does the merged folder."""
    ours, _ = CASES[name]
    base = hf_base(tmp_path / "base")
    model, converters = native(ours)
    exports = trained(model, converters, tmp_path / "run", tmp_path / "base")
    assert gap(model, base) > 1e-2
    folder = exports / "step-1-peft"
    assert gap(LlamaForCausalLM.from_pretrained(exports / "step-1"), model) <= 1e-5
    with without_a_word("transformers", "peft"):
        adapted = PeftModel.from_pretrained(base, str(folder)).eval()
    assert gap(adapted, model) <= 1e-5
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert type(config["r"]) is int and type(config["lora_alpha"]) is int


@pytest.mark.parametrize("name", CASES)
def test_a4_an_adapter_that_peft_wrote_is_a_source(name: str, tmp_path: Path) -> None:
    """An adapter folder that PEFT wrote loads as a second source beside its base and gives PEFT's logits."""
    ours, settings = CASES[name]
    adapted = tuned(hf_base(tmp_path / "base"), tmp_path / "adapter", **settings)
    model, converters = native(ours)
    result = world.load(manager(model, converters, tmp_path / "run", tmp_path / "base", tmp_path / "adapter"))
    assert not result.report.initialized
    assert gap(model, adapted) <= 1e-5


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize("targets", [["wq", "wv"], ["experts.w2"], ["wq", "experts.w1", "experts.w2", "experts.w3"]])
def test_adapters_on_experts_in_peft(targets: list[str], tmp_path: Path) -> None:
    """Stacked experts are written one by one; PEFT, whose model fuses them again, gives the same logits."""
    shape = replace(qwen3_moe.FLAVORS["debug-1m"], dim=32, num_layers=2, head_dim=16, ffn_dim=64, vocab_size=96)
    shape = replace(shape, num_experts=4, expert_dim=32)
    base = theirs(shape.to_hf(), tmp_path / "base")
    model = qwen3_moe.Qwen3Moe(shape)
    model.init_weights()
    model, converters = native({"target_modules": targets}, model)
    exports = trained(model, converters, tmp_path / "run", tmp_path / "base")
    assert gap(model, base) > 1e-2
    assert gap(Qwen3MoeForCausalLM.from_pretrained(exports / "step-1"), model) <= 1e-5
    assert gap(PeftModel.from_pretrained(base, str(exports / "step-1-peft")).eval(), model) <= 1e-5


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"alpha": 16.0}, r"model\.layers\.0\.self_attn\.q_proj: rank 4 scaled by 2, expected rank 4 scaled by 4"),
        ({"rank": 8}, "rank 4 scaled by 2, expected rank 8 scaled by 1"),
        ({"use_rslora": True}, "rank 4 scaled by 2, expected rank 4 scaled by 4"),
        ({"use_dora": True}, "use_dora is False, expected True"),
    ],
)
def test_an_adapter_that_means_something_else_is_refused(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    """Another scale has the same keys and shapes: without this check the adapter would act half, in silence."""
    tuned(hf_base(tmp_path / "base"), tmp_path / "adapter", **CASES["attention"][1])
    model, converters = native({**CASES["attention"][0], **change})
    before = whole(model.state_dict())
    run = manager(model, converters, tmp_path / "run", tmp_path / "base", tmp_path / "adapter")
    world.load_fails(run, LoadMismatchError, fault)
    assert same(model.state_dict(), before)


def test_an_adapter_for_other_modules_is_refused(tmp_path: Path) -> None:
    """Keys that the run's converter does not have, and those it has and the file lacks, are both listed."""
    tuned(hf_base(tmp_path / "base"), tmp_path / "adapter", "q_proj")
    model, converters = native({"target_modules": ["wk"]})
    run = manager(model, converters, tmp_path / "run", tmp_path / "base", tmp_path / "adapter")
    said = world.load_fails(run, LoadMismatchError)
    assert "q_proj.lora_A.weight" in said and "attention.wk.lora_a.weight" in said


def test_the_tiny_model_has_what_the_cases_need() -> None:
    """The cases name modules of a model whose query and key heads differ in number, so a wrong permutation shows."""
    assert TINY.num_heads != TINY.num_kv_heads and not replace(TINY).tie_embeddings
